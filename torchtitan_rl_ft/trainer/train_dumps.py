"""Train dumps: what was trained, sample by sample, beside the rollout dump of the same step.

Every group holds the numbers of all samples, because they are summed over the groups with the
proof of the step. Each writes the file before it reports the commit, unless it is there already,
so a file is missing only when nobody has committed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from torchtitan_rl_ft.config.debug_mode import dump_path
from torchtitan_rl_ft.journal.dump_files import (
    SAMPLE_INDICES,
    DumpInvalid,
    DumpWriteError,
    read_dump,
    read_head,
    write_dump,
)
from torchtitan_rl_ft.journal.records import CommitRecord, SealedBatch
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.trainer.policy_loss import MAX_LOG_RATIO

KIND = "train"
COPIED = ("group_ids", "sample_offsets", "prompt_lens", "advantages", "loss_mask", "weights")
"""Arrays taken over from the batch."""


@dataclass(frozen=True)
class TrainDump:
    """`arrays`: COPIED as in the batch, and

    `index` int64 [N]: the sample's place in the rollout dump of this step;
    `policy_logprobs`, `behaviour_logprobs`, `ratio` float32 [T]: of the policy that was trained, of
    the engine, and their truncated importance ratio; 0 where the token is not trained.
    """

    step: int
    token: str
    batch_digest: str
    metrics: dict[str, float]
    arrays: dict[str, np.ndarray]


def load_train_dump(path: Path) -> TrainDump:
    """Raises DumpInvalid."""
    head, arrays = read_dump(path, KIND)
    try:
        return TrainDump(
            head["rollout_id"], head["token"], head["batch_digest"], head["metrics"], arrays
        )
    except KeyError as e:
        raise DumpInvalid(f"{path} is no whole dump: it lacks {e}") from e


class TrainDumps:
    """Writes one file per committed step."""

    def __init__(
        self, template: str, run_folder: Path, ratio_cap: float, events: EventSink
    ) -> None:
        self._template, self._run_folder = template, run_folder
        self._ratio_cap, self._events = ratio_cap, events

    def write(
        self,
        batch: SealedBatch,
        record: CommitRecord,
        logprobs: np.ndarray,
        metrics: dict[str, float],
    ) -> None:
        """`logprobs` [T] are the policy's. A disk error is told and training goes on."""
        path = dump_path(self._template, self._run_folder, record.step)
        if _token_in(path) == record.token:
            return
        head = {
            "rollout_id": record.step,
            "token": record.token,
            "batch_id": record.batch_id,
            "batch_digest": record.digest,
            "metrics": metrics,
        }
        try:
            write_dump(path, KIND, head, _arrays(batch, logprobs, self._ratio_cap))
        except DumpWriteError as e:
            self._events.emit(Kind.WARN, cause=str(e), step=record.step)


def _token_in(path: Path) -> str | None:
    try:
        return read_head(path, KIND).get("token")
    except DumpInvalid:
        return None


def _arrays(batch: SealedBatch, logprobs: np.ndarray, ratio_cap: float) -> dict[str, np.ndarray]:
    a = batch.arrays
    trained = a["weights"] > 0
    behaviour = np.where(trained, a["logprobs"], 0.0)
    # As in the loss (trainer/policy_loss.py).
    log_ratio = np.clip(logprobs - behaviour, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio = np.where(trained, np.minimum(np.exp(log_ratio), ratio_cap), 0.0)
    index = batch.meta.get(SAMPLE_INDICES) or range(batch.n_samples)
    return {name: a[name] for name in COPIED} | {
        "index": np.asarray(index, dtype=np.int64),
        "policy_logprobs": logprobs.astype(np.float32),
        "behaviour_logprobs": behaviour.astype(np.float32),
        "ratio": ratio.astype(np.float32),
    }
