"""Ends ranks that are wedged. It runs outside them (in the supervisor, or in the launcher of a
group that was started by hand): inside a rank nothing can act while the GIL is held or the process
is stopped, and torchft's own beat, from a thread of its own, goes on and would block the quorum of
all others.

What is over its limit is decided in host/phase_limits.py; this file looks and acts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import signal
import time
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.phase_file import PhaseRecord, records
from torchtitan_rl_ft.host.phase_limits import (
    Limits,
    Observed,
    Overdue,
    calculate,
    judge,
    parse_phase_timeouts,
)
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder, write_atomic
from torchtitan_rl_ft.trainer.watch import STACKS_SIGNAL, limits_of

logger = logging.getLogger(__name__)

INTERVAL_S = 0.5

DUMP_S = 1.0
"""Time that a rank gets to write its stacks before it is killed."""

SAVE_INTERVAL_S = 10.0
"""Between two writes of what was learned."""


def job_limits(resolved: Resolved) -> Limits:
    """Of a job, without what was learned."""
    recovery = resolved.sections.recovery
    limits = limits_of(recovery, resolved.sections.fault_tolerance)
    if recovery.enable_ft_package:
        configured_s = parse_phase_timeouts(recovery.phase_timeouts)
        limits = dataclasses.replace(limits, configured_s=configured_s)
    return limits


class Lessons:
    """What the phases of a run took, over all its ranks and starts (phases/limits.json)."""

    def __init__(self, path: Path, layout: dict[str, Any], waiting_s: dict[str, float]) -> None:
        """`layout`: values on which durations depend; what was learned under others is not used."""
        self._path, self._layout, self._waiting_s = path, layout, waiting_s
        self._longest_s: dict[str, float] = {}
        self._counts: dict[str, int] = {}
        self._stretch: dict[str, float] = {}
        self._saved_s = float("-inf")
        self._read()

    @classmethod
    def of(cls, resolved: Resolved) -> Lessons:
        keys = [
            "model.hf_assets_path",
            "fault_tolerance.replica_groups",
            "fault_tolerance.ranks_per_group",
            "parallelism.tensor_parallel_degree",
            "training.local_batch_size",
            "training.seq_len",
            "rl.groups_per_step",
            "rl.samples_per_prompt",
            "rollout.max_response_tokens",
        ]
        layout = {key: resolved.get(key) for key in keys}
        waiting_s = dict(job_limits(resolved).waiting_s)
        return cls(resolved.run_folder.phases / "limits.json", layout, waiting_s)

    def limits_s(self) -> dict[str, float]:
        return calculate(
            self._longest_s, self._counts, waiting=self._waiting_s, stretch=self._stretch
        )

    def observe(self, record: PhaseRecord) -> None:
        for key, seconds in record.longest_s.items():
            self._longest_s[key] = max(seconds, self._longest_s.get(key, 0.0))
            self._counts[key] = max(record.counts.get(key, 0), self._counts.get(key, 0))

    def was_too_short(self, key: str) -> None:
        """A learned limit has ended a rank: the next one is twice as long, so that a phase which
        does take longer today cannot end rank after rank."""
        self._stretch[key] = 2.0 * self._stretch.get(key, 1.0)
        self._saved_s = float("-inf")

    def save(self, now_s: float) -> None:
        """At most every `SAVE_INTERVAL_S`. Raises OSError."""
        if now_s - self._saved_s < SAVE_INTERVAL_S:
            return
        self._saved_s = now_s
        found = {
            "layout": self._layout,
            "longest_s": self._longest_s,
            "counts": self._counts,
            "stretch": self._stretch,
            "limits_s": self.limits_s(),
        }
        write_atomic(self._path, json.dumps(found, indent=1).encode())

    def _read(self) -> None:
        try:
            found = json.loads(self._path.read_bytes())
            if found["layout"] == self._layout:
                names = ("longest_s", "counts", "stretch")
                numbers = [{str(k): float(v) for k, v in found[name].items()} for name in names]
                self._longest_s, counts, self._stretch = numbers
                self._counts = {key: int(count) for key, count in counts.items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as e:
            logger.warning("learned limits are not to be read, they are learned anew: %s", e)


class Watcher:
    """Looks at the phase files of a run's processes on this host."""

    def __init__(
        self,
        folder: RunFolder,
        events: EventSink,
        limits: Limits,
        *,
        lessons: Lessons | None = None,
        only: str | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        """`only`: the name of the one group to watch."""
        self._folder, self._events, self._limits = folder, events, limits
        self._lessons, self._only, self._interval_s = lessons, only, interval_s
        self._seen: dict[ProcessId, Observed] = {}

    async def run(self) -> None:
        """Until cancelled."""
        last_s = time.monotonic()
        while True:
            await asyncio.sleep(self._interval_s)
            now_s = time.monotonic()
            # When this process was held up itself, nobody else is to blame.
            passed_s, last_s = min(now_s - last_s, 2 * self._interval_s), now_s
            try:
                await self.look(passed_s)
            except OSError as e:  # a full disk: looks go on
                logger.warning("a look at the ranks has failed: %s", e)

    async def look(self, passed_s: float) -> None:
        """Once; `passed_s` since the last look."""
        seen: dict[ProcessId, Observed] = {}
        for record in records(self._folder.phases):
            if self._only not in (None, record.name):
                continue
            before = self._seen.get(record.id)
            seen[record.id] = (before or Observed(record)).seen(record, passed_s if before else 0.0)
        self._seen = seen
        self._learn([o.record for o in seen.values()])
        limits = self.limits()
        overdue = [(o, late) for o in seen.values() if (late := judge(o, limits)) is not None]
        # Together: ranks of one group wait for one another, all of them are late.
        await asyncio.gather(*(self._end(o.record, late) for o, late in overdue))

    def limits(self) -> Limits:
        if self._lessons is None:
            return self._limits
        return dataclasses.replace(self._limits, learned_s=self._lessons.limits_s())

    def _learn(self, found: list[PhaseRecord]) -> None:
        if self._lessons is not None:
            for record in found:
                if record.rank.isdigit():
                    self._lessons.observe(record)
            self._lessons.save(time.monotonic())

    async def _end(self, record: PhaseRecord, late: Overdue) -> None:
        self._events.emit(
            Kind.FAULT,
            phase="wedged",
            cause=f"{record.who}: {late.reason}",
            step=record.step,
            subject=record.name,
            rank=record.rank,
            pid=record.pid,
            in_phase=record.phase,
            limit_s=late.limit_s,
            limit_of=late.origin,
        )
        logger.warning("%s (process %d) is ended: %s", record.who, record.pid, late.reason)
        if late.origin == "learned" and self._lessons is not None:
            self._lessons.was_too_short(late.key)
        if record.rank.isdigit():  # it has registered for the signal
            process.kill(record.id, STACKS_SIGNAL)
            await asyncio.sleep(DUMP_S)
        process.kill(record.id, signal.SIGKILL)
