"""`metrics.jsonl`: one object per commit, exactly once, also across restarts."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.journal.drop_kinds import KINDS, PREFIX
from torchtitan_rl_ft.journal.errors import JournalWriteError
from torchtitan_rl_ft.journal.history import Commit
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability import json_text

# Keys that each line has; null where neither the report nor the batch told a value.
REQUIRED = (
    "step",
    "loss",
    "grad_norm",
    "reward/mean",
    "reward/std",
    "policy_version",
    "policy_age/mean",
    "policy_age/max",
    "participants",
    "tokens",
    "time/step_s",
    "time/wait_batch_s",
    "logprob_diff/mean",
    "buffer/accepted_groups",
    "buffer/sealed_batches",
    "rollout/blocked_s",
    "weights/push_s",
    "weights/pull_s",
    "groups",
    "groups/failures",
    "dropped_groups",
    *(PREFIX + kind for kind in KINDS),
)


class StepMetrics:
    """Appends what the journal has and the file lacks.

    The journal's commit rows are the truth; a line carries its row's number as `commit`, so a
    line is never written twice and one lost in a crash is written at the next open. After a
    rewind a step gets a second line: the last one of a step counts.
    """

    def __init__(
        self, path: Path, journal: Journal, of_run: Callable[[], Mapping[str, Any]] = dict
    ) -> None:
        """`of_run` tells, at once, what each line says of the whole run. Raises
        JournalWriteError."""
        self._path, self._journal, self._of_run = path, journal, of_run
        self._told = self._mend()
        if self._told > journal.last_commit_id():
            self._told = 0  # the file is older than this journal

    def _mend(self) -> int:
        """Cut a torn last line off; return the last line's commit number."""
        try:
            with open(self._path, "a+b") as f:
                f.seek(0)
                told = end = 0
                for line in f:
                    if not line.endswith(b"\n"):
                        break
                    end += len(line)
                    told = _commit_of(line) or told
                f.truncate(end)
        except OSError as e:
            raise JournalWriteError(f"cannot open {self._path}: {e.strerror}") from e
        except ValueError as e:
            raise JournalWriteError(
                f"{self._path} has a line that is not JSON ({e}): move it away"
            ) from e
        return told

    def flush(self, final: bool = False) -> None:
        """Append the lines of new commits. The newest commit, when its report was lost, waits
        for another group's report; `final` waits no longer. Raises JournalWriteError."""
        commits = self._journal.commits_after(self._told)
        for i, commit in enumerate(commits):
            if commit.metrics is None and i == len(commits) - 1 and not final:
                return
            self._append(json.dumps(self._line(commit)).encode() + b"\n")
            self._told = commit.commit_id

    def _line(self, commit: Commit) -> dict[str, Any]:
        record = commit.record
        meta, samples, tokens = self._journal.batch_info(record.batch_id)
        found = {**_scalars(meta), **_scalars(commit.metrics or {})}
        fixed = {
            "step": record.step,
            "participants": record.participants,
            "tokens": tokens,
            "samples": samples,
            "batch": record.batch_id,
            "commit": commit.commit_id,
        }
        return {**dict.fromkeys(REQUIRED), **_scalars(self._of_run()), **found, **fixed}

    def _append(self, line: bytes) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            try:
                written = os.write(fd, line)
                if written != len(line):
                    raise OSError(28, "No space left on device")
            except OSError as e:
                os.ftruncate(fd, size)
                raise JournalWriteError(f"cannot append to {self._path}: {e.strerror}") from e
        finally:
            os.close(fd)


def _commit_of(line: bytes) -> int | None:
    """Raises ValueError when the line is no object of JSON."""
    row = json_text.parse(line)
    if not isinstance(row, dict):
        raise ValueError("no object")
    commit = row.get("commit")
    return commit if isinstance(commit, int) else None


def _scalars(values: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers, texts and flags; a number that JSON cannot carry (NaN) becomes null."""
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v
        for k, v in values.items()
        if v is None or isinstance(v, int | float | str | bool)
    }
