"""Train-only: batches come from rollout dumps, nothing is generated."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl_ft.config.debug_mode import dump_path
from torchtitan_rl_ft.journal.dump_files import DumpInvalid
from torchtitan_rl_ft.journal.errors import JournalStateError
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.rollout.dumps import ModelIdentity, check_dump, load_dump
from torchtitan_rl_ft.rollout.subsampling import subsample

AHEAD = 2
"""Batches that are loaded before they are asked for."""

TICK_S = 1.0


@dataclass(frozen=True)
class DumpSource:
    """Where batches come from, and what is taken of them."""

    template: str
    run_folder: Path
    total_steps: int
    share: float
    seed: int
    loss_norm: Literal["token", "sample"]
    seq_len: int

    def path(self, step: int) -> Path:
        return dump_path(self.template, self.run_folder, step)

    def check(self, model: ModelIdentity) -> None:
        """Every dump is there, of its step, of one run, of this model's vocabulary and of samples
        that fit a row; contents are checked when they are loaded. Raises DumpInvalid."""
        journals = set()
        for step in range(1, self.total_steps + 1):
            if not self.path(step).exists():
                raise DumpInvalid(
                    f"there is no dump {self.path(step)} for step {step} of {self.total_steps}: "
                    "set rollout.load_debug_rollout_data to the dumps' template"
                    + (f", or training.steps to {step - 1}" if step > 1 else "")
                )
            journals.add(check_dump(self.path(step), step, model, self.seq_len).journal)
            if len(journals) > 1:
                raise DumpInvalid(f"{self.path(step)} is of another run than {self.path(1)}")


class DumpReplay:
    """Seals dumped batches for the trainers until all steps are committed."""

    def __init__(self, ledger: Ledger, source: DumpSource, events: EventSink) -> None:
        self._ledger, self._journal = ledger, ledger.journal
        self._source, self._events = source, events
        self._wake = asyncio.Event()
        self._draining: str | None = None
        self._journal.on_change(self._wake.set)

    def drain(self, reason: str) -> None:
        """End the run as drained, now."""
        self._draining = self._draining or reason
        self._wake.set()

    def status(self) -> dict[str, Any]:
        return {
            "phase": "replay",
            "step": self._journal.tip.step,
            "total_steps": self._source.total_steps,
            "sealed_ahead": self._journal.sealed_ahead,
            "draining": self._draining,
            "counts": self._journal.counts(),
        }

    async def run(self) -> None:
        """Until the ledger has an outcome. Raises DumpInvalid, JournalError."""
        self._events.emit(Kind.PHASE, phase="replay", step=self._journal.tip.step)
        total = self._source.total_steps
        while self._ledger.outcome is None:
            self._wake.clear()
            planned = len(self._journal.plan)
            if self._draining is not None:
                self._ledger.set_outcome("drained", self._draining)
            elif self._journal.tip.step >= total:
                self._ledger.set_outcome("done", f"all {total} steps are committed")
            elif planned < min(total, self._journal.tip.step + AHEAD):
                await self._seal(planned + 1)
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        await self._wake.wait()

    async def _seal(self, step: int) -> None:
        source = self._source
        dump = await asyncio.to_thread(load_dump, source.path(step))
        batch = subsample(
            dump.batch, source.share, seed=source.seed, step=step, loss_norm=source.loss_norm
        )
        kept = set(batch.arrays["group_ids"].tolist())
        try:
            self._journal.import_batch(batch, {i: p for i, p in dump.prompts.items() if i in kept})
        except JournalStateError as e:
            raise DumpInvalid(
                f"{source.path(step)} is of another run than the dumps before it: {e}"
            ) from e
