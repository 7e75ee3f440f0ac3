"""What engines stream of a sample, checked message by message and put together."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan_rl_ft.serving.requests import Held
from torchtitan_rl_ft.serving.sample_times import LegTimes

ABORTED = "abort"

FROZEN_VERSION = 0
"""Of what frozen engines hold: no version of the policy, which count from 1."""


class AnswerInvalid(Exception):
    """An engine's answer lacks what a sample needs; it is not used."""


@dataclass(frozen=True)
class Sample:
    """One answer. `logprobs` and `versions` are per output token; a sample may span versions.
    `engine` is the one that finished it. A sample of a frozen group has version 0 throughout,
    which is none of the policy's."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str  # "stop" or "length"
    engine: str
    min_version: int
    max_version: int
    legs: list[list[Any]] = field(default_factory=list)
    """Which engine worked on it when (`sample_times.py`), for a request that is traced."""

    def to_json(self) -> dict[str, Any]:
        """Without versions when it is not the policy's: nobody can train on it by mistake."""
        shown = asdict(self)
        if not self.legs:
            del shown["legs"]
        if self.max_version == FROZEN_VERSION:
            shown |= {"versions": None, "min_version": None, "max_version": None}
        return shown


@dataclass
class Draft:
    """A sample in work: what engines have given of it so far. The lists have one length."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    engine: str = ""
    version: int = 0
    """The newest version that was seen: that of a sample without tokens."""

    legs: list[list[Any]] = field(default_factory=list)
    revised: list[int] = field(default_factory=list)
    """Lengths up to which it stayed as it was, each time that its end was changed."""

    @classmethod
    def of(cls, held: Held) -> Draft:
        return cls(
            list(held.output_ids), list(held.logprobs), list(held.versions), held.finish_reason
        )

    def cut(self, length: int) -> int:
        """Forget the end, and that it was finished; returns the number of tokens forgotten."""
        forgotten = len(self.output_ids) - length
        if forgotten or self.finish_reason is not None:
            self.revised.append(length)
        for values in (self.output_ids, self.logprobs, self.versions):
            del values[length:]
        self.finish_reason = None
        return forgotten

    def sample(self) -> Sample:
        assert self.finish_reason is not None
        seen = self.versions or [self.version]
        return Sample(
            self.output_ids,
            self.logprobs,
            self.versions,
            self.finish_reason,
            self.engine,
            min(seen),
            max(seen),
            self.legs,
        )


class Leg:
    """One engine's share of a draft: appends what the engine streams.

    SGLang says which version sampled which token in the last message only. Until then a message
    names the version that the engine has now; the first one that names another may begin with
    tokens from before, so all of its tokens are given the older version. They keep it only when
    the engine dies before the last message.
    """

    def __init__(self, draft: Draft, engine: str, version: int) -> None:
        """`version` is the one that the engine serves: it answers with no older one. A frozen
        engine answers with none."""
        self.draft, self.engine = draft, engine
        self._start = len(draft.output_ids)
        self._oldest = self._newest = version
        self.ended = False
        """The engine has said its last word: finished or aborted."""
        self.times: LegTimes | None = None

    @property
    def tokens(self) -> int:
        """Tokens that this engine gave."""
        return len(self.draft.output_ids) - self._start

    def take(self, message: dict[str, Any]) -> int:
        """Append one message; returns the number of new tokens. Nothing is appended of a message
        that is wrong. Raises AnswerInvalid."""
        try:
            return self._take(message)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as e:
            cause = f"answer not understood: {type(e).__name__}: {e}"
            raise AnswerInvalid(f"{self.engine}: {cause}") from e

    def undo(self) -> int:
        """Forget what this engine gave; returns the number of tokens."""
        return self.draft.cut(self._start)

    def _take(self, message: dict[str, Any]) -> int:
        draft, meta = self.draft, message["meta_info"]
        if self.ended:
            raise AnswerInvalid(f"{self.engine}: a sample goes on after its end")
        finish = meta["finish_reason"]
        reason = None if finish is None else str(finish["type"])
        ids, logprobs = self._new_tokens(message, aborted=reason == ABORTED)
        newest = self._version(meta.get("weight_version"))
        spans: list[dict[str, Any]] | None = meta.get("weight_versions")
        if spans is None:
            draft.versions += [min(newest, self._newest)] * len(ids)
        else:
            self._correct(self._spanned(spans, self.tokens + len(ids)))
        draft.output_ids += ids
        draft.logprobs += logprobs
        draft.version = self._newest = newest
        draft.engine = self.engine
        draft.finish_reason = reason if reason != ABORTED else None
        self.ended = reason is not None
        return len(ids)

    def _correct(self, versions: list[int]) -> None:
        """Replace the leg's versions by those that SGLang names at its end."""
        draft, start = self.draft, self._start
        known = draft.versions[start:]
        wrong = (i for i, (a, b) in enumerate(zip(known, versions, strict=False)) if a != b)
        if (first := next(wrong, None)) is not None:
            draft.revised.append(start + first)
        draft.versions[start:] = versions

    def _new_tokens(
        self, message: dict[str, Any], *, aborted: bool
    ) -> tuple[list[int], list[float]]:
        """The tokens beyond those held, with log-probs. A message has the new tokens or all of
        the leg; that of an abort in SGLang's queue has all log-probs and repeats a token."""
        meta = message["meta_info"]
        held, total = self.tokens, int(meta["completion_tokens"])
        new = total - held
        given, triples = message["output_ids"], meta["output_token_logprobs"]
        if new < 0 or len(triples) < new:
            raise AnswerInvalid(
                f"{self.engine}: tokens {held} to {total} have {len(triples)} log-probs"
            )
        triples = triples[len(triples) - new :]
        ids = [int(t[1]) for t in triples]
        whole = len(given) == total and given == self.draft.output_ids[self._start :] + ids
        if not (given == ids or whole or (aborted and given[:new] == ids)):
            raise AnswerInvalid(f"{self.engine}: log-probs are not those of the output tokens")
        logprobs = [float(t[0]) for t in triples]
        if not all(map(math.isfinite, logprobs)):
            raise AnswerInvalid(f"{self.engine}: a log-prob is not finite")
        return ids, logprobs

    def _spanned(self, spans: list[dict[str, Any]], total: int) -> list[int]:
        """Policy version of each of the leg's `total` tokens."""
        versions: list[int] = []
        for span in spans:
            start, end = int(span["start"]), int(span["end"])
            if start != len(versions):
                raise AnswerInvalid(f"{self.engine}: version spans {spans} leave a gap")
            if end > start:
                versions += [self._version(span["version"])] * (end - start)
        if len(versions) != total:
            raise AnswerInvalid(f"{self.engine}: version spans {spans} do not cover {total} tokens")
        return versions

    def _version(self, text: Any) -> int:
        if self._oldest == FROZEN_VERSION:
            if not isinstance(text, str) or text.isdigit():
                raise AnswerInvalid(f"{self.engine} is frozen and answers with version {text!r}")
            return FROZEN_VERSION
        if not isinstance(text, str) or not text.isdigit():
            raise AnswerInvalid(
                f"{self.engine}: weight version {text!r} is none that was published"
            )
        if int(text) < self._oldest:
            raise AnswerInvalid(f"{self.engine}: weight version {text} of before {self._oldest}")
        return int(text)
