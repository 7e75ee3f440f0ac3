"""What an engine answers to a generate request, checked and made plain."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any


class AnswerInvalid(Exception):
    """An engine's answer lacks what a sample needs; it is not used."""


@dataclass(frozen=True)
class Sample:
    """One answer. `logprobs` and `versions` are per output token; a sample may span versions."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str  # "stop", "length" or "abort"
    engine: str
    min_version: int
    max_version: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_samples(answer: Any, n: int, engine: str) -> list[Sample]:
    """The `n` samples of SGLang's /generate answer (one object, or a list of them).

    Raises AnswerInvalid.
    """
    items = answer if isinstance(answer, list) else [answer]
    if len(items) != n:
        raise AnswerInvalid(f"{engine} answered {len(items)} samples, {n} were asked for")
    try:
        return [_parse(item, engine) for item in items]
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise AnswerInvalid(f"{engine}: answer not understood: {type(e).__name__}: {e}") from e


def _parse(item: dict[str, Any], engine: str) -> Sample:
    meta = item["meta_info"]
    output_ids = [int(t) for t in item["output_ids"]]
    finish = meta["finish_reason"]["type"]
    triples = meta["output_token_logprobs"]
    logprobs = [float(t[0]) for t in triples]
    if [t[1] for t in triples] != output_ids:
        raise AnswerInvalid(f"{engine}: log-probs are not those of the output tokens")
    if not all(math.isfinite(p) for p in logprobs):
        raise AnswerInvalid(f"{engine}: a log-prob is not finite")
    versions = _versions(meta, len(output_ids), engine)
    seen = versions or [_version(meta.get("weight_version"), engine)]
    return Sample(output_ids, logprobs, versions, finish, engine, min(seen), max(seen))


def _versions(meta: dict[str, Any], n_tokens: int, engine: str) -> list[int]:
    """Policy version of each output token, from the spans that SGLang reports."""
    spans: list[dict[str, Any]] | None = meta.get("weight_versions")
    if spans is None:  # an aborted request has none
        spans = [{"version": meta.get("weight_version"), "start": 0, "end": n_tokens}]
    versions: list[int] = []
    for span in spans:
        start, end = int(span["start"]), int(span["end"])
        if start != len(versions):
            raise AnswerInvalid(f"{engine}: version spans {spans} leave a gap")
        if end > start:
            versions += [_version(span["version"], engine)] * (end - start)
    if len(versions) != n_tokens:
        raise AnswerInvalid(f"{engine}: version spans {spans} do not cover {n_tokens} tokens")
    return versions


def _version(text: Any, engine: str) -> int:
    if not isinstance(text, str) or not text.isdigit():
        raise AnswerInvalid(f"{engine}: weight version {text!r} is none that was published")
    return int(text)
