"""Rollout dumps: a sealed batch in a file, with the prompts and answers as text.

A dump holds the very arrays that were sealed, so what is loaded has the digest of what was live.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from torchtitan_rl_ft.journal.dump_files import (
    DumpInvalid,
    from_json_array,
    read_dump,
    read_head,
    to_json_array,
    write_dump,
)
from torchtitan_rl_ft.journal.records import ARRAYS, SealedBatch, digest
from torchtitan_rl_ft.rollout.generation import sample_seed

KIND = "rollout"
_GROUPS, _RESPONSES = "groups_json", "responses_json"


@dataclass(frozen=True)
class ModelIdentity:
    """What samples and model must have in common."""

    model_type: str
    vocab_size: int
    vocabulary_sha256: str

    @classmethod
    def of(cls, model_path: Path, tokenizer: Tokenizer) -> ModelIdentity:
        """Of an HF directory. Raises OSError, ValueError, KeyError."""
        config = json.loads((model_path / "config.json").read_bytes())
        entries = sorted(tokenizer.get_vocab(with_added_tokens=True).items())
        return cls(
            str(config["model_type"]),
            int(config["vocab_size"]),
            hashlib.sha256(json.dumps(entries).encode()).hexdigest(),
        )


@dataclass(frozen=True)
class Origin:
    """What a dump says of itself."""

    rollout_id: int
    """The step that the batch was sealed for."""

    digest: str
    """Of the sealed batch."""

    journal: str
    """Journal.uuid: dumps of one history have the same."""

    model: ModelIdentity
    run_seed: int

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Origin:
        """Raises KeyError, TypeError."""
        return cls(
            data["rollout_id"],
            data["digest"],
            data["journal"],
            ModelIdentity(**data["model"]),
            data["run_seed"],
        )


@dataclass(frozen=True)
class DumpedSample:
    """One sample of a dump. Lists are per output token; `mask` is 1 where it is trained on."""

    index: int
    group_id: int
    prompt: dict[str, Any]  # text, answer, epoch, index
    seed: int
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    mask: list[int]
    reward: float
    advantage: float
    response: str


@dataclass(frozen=True)
class RolloutDump:
    """`prompts` are JSON by group."""

    batch: SealedBatch
    prompts: Mapping[int, dict[str, Any]]
    responses: list[str]
    origin: Origin

    @property
    def digest(self) -> str:
        return self.origin.digest

    @property
    def rollout_id(self) -> int:
        return self.origin.rollout_id

    def samples(self) -> Iterator[DumpedSample]:
        """In the order of the batch; a sample's index is its place in it."""
        a, visits = self.batch.arrays, dict.fromkeys(self.prompts, 0)
        for i in range(self.batch.n_samples):
            group_id = int(a["group_ids"][i])
            prompt, n = self.prompts[group_id], visits[group_id]
            visits[group_id] += 1
            start, end = (int(x) for x in a["sample_offsets"][i : i + 2])
            answer = start + int(a["prompt_lens"][i])
            yield DumpedSample(
                index=i,
                group_id=group_id,
                prompt=prompt,
                seed=sample_seed(self.origin.run_seed, prompt["epoch"], prompt["index"], n),
                prompt_ids=a["tokens"][start:answer].tolist(),
                output_ids=a["tokens"][answer:end].tolist(),
                logprobs=a["logprobs"][answer:end].tolist(),
                versions=a["versions"][answer:end].tolist(),
                mask=a["loss_mask"][answer:end].tolist(),
                reward=float(a["rewards"][i]),
                advantage=float(a["advantages"][i]),
                response=self.responses[i],
            )


def make_dump(
    origin: Origin, payload: bytes, prompts: Mapping[int, dict[str, Any]], tokenizer: Tokenizer
) -> RolloutDump:
    """Of the bytes of a sealed batch. Raises records.BatchCorrupt."""
    batch = SealedBatch.from_bytes(payload, origin.digest)
    a = batch.arrays
    starts = a["sample_offsets"][:-1] + a["prompt_lens"]
    answers = [
        a["tokens"][start:end].tolist()
        for start, end in zip(starts, a["sample_offsets"][1:], strict=True)
    ]
    responses = tokenizer.decode_batch(answers, skip_special_tokens=True)
    return RolloutDump(batch, prompts, responses, origin)


def save_dump(path: Path, dump: RolloutDump) -> None:
    """Raises DumpWriteError."""
    groups = [{"group_id": i, "prompt": prompt} for i, prompt in dump.prompts.items()]
    texts = {_GROUPS: to_json_array(groups), _RESPONSES: to_json_array(dump.responses)}
    head = {
        **asdict(dump.origin),
        "batch_id": dump.batch.batch_id,
        "meta": dump.batch.meta,
        "longest_tokens": int(dump.batch.lengths().max(initial=0)),
    }
    write_dump(path, KIND, head, {**dump.batch.arrays, **texts})


def load_dump(path: Path) -> RolloutDump:
    """Raises DumpInvalid, also when the batch is not the one that was dumped."""
    head, arrays = read_dump(path, KIND)
    try:
        groups = from_json_array(arrays.pop(_GROUPS))
        responses = from_json_array(arrays.pop(_RESPONSES))
        if set(arrays) != set(ARRAYS):
            raise DumpInvalid(f"{path} is a dump of another format: it holds {sorted(arrays)}")
        batch = SealedBatch(head["batch_id"], arrays, head["meta"])
        prompts = {int(g["group_id"]): g["prompt"] for g in groups}
        dump = RolloutDump(batch, prompts, responses, Origin.from_json(head))
    except (KeyError, TypeError, ValueError) as e:
        raise DumpInvalid(f"{path} is no whole dump: {type(e).__name__}: {e}") from e
    if digest(batch.to_bytes()) != dump.digest:
        raise DumpInvalid(f"{path} is damaged: its samples do not match their digest")
    return dump


def check_dump(
    path: Path, rollout_id: int, model: ModelIdentity, seq_len: int | None = None
) -> Origin:
    """Look at a dump's head alone. Raises DumpInvalid when it is of another rollout, of samples
    that `model` cannot have made, or of longer ones than a row of `seq_len` tokens takes."""
    head = read_head(path, KIND)
    try:
        origin, longest = Origin.from_json(head), int(head["longest_tokens"])
    except (KeyError, TypeError) as e:
        raise DumpInvalid(f"{path} is no whole dump: {type(e).__name__}: {e}") from e
    if origin.rollout_id != rollout_id:
        raise DumpInvalid(f"{path} holds rollout {origin.rollout_id}, not {rollout_id}")
    if origin.model != model:
        differs = next(k for k, v in asdict(model).items() if getattr(origin.model, k) != v)
        raise DumpInvalid(
            f"{path} was sampled from another model: {differs} {getattr(origin.model, differs)}, "
            f"the model of this job has {getattr(model, differs)}"
        )
    if seq_len is not None and longest - 1 > seq_len:  # the last token is a target only
        raise DumpInvalid(
            f"{path} holds a sample of {longest} tokens, training.seq_len = {seq_len} takes "
            f"{seq_len + 1}"
        )
    return origin
