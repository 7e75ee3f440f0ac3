"""Writes the dumps of sealed batches beside the rollout loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from torchtitan_rl_ft.config.debug_mode import dump_path
from torchtitan_rl_ft.journal.dump_files import DumpInvalid, DumpWriteError
from torchtitan_rl_ft.journal.errors import JournalStateError
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.rollout.dumps import ModelIdentity, Origin, check_dump, make_dump, save_dump

MAX_BACKLOG = 4
"""Sealed batches that wait to be written before sealing waits for the disk."""


@dataclass(frozen=True)
class DumpSettings:
    template: str
    run_folder: Path
    model: ModelIdentity
    run_seed: int
    required: bool
    """The dumps are what the job is for: one that cannot be written ends it. Else it is told, and
    training goes on."""

    def path(self, step: int) -> Path:
        return dump_path(self.template, self.run_folder, step)


class DumpWriter:
    """One dump after the other, in a thread, in the order of their steps."""

    def __init__(
        self,
        journal: Journal,
        tokenizer: Tokenizer,
        settings: DumpSettings,
        events: EventSink,
        on_written: Callable[[], None],
    ) -> None:
        self._journal, self._tokenizer = journal, tokenizer
        self._settings, self._events = settings, events
        self._on_written = on_written
        self._waiting: deque[int] = deque()
        self._writing = False
        self._sealed = asyncio.Event()

    @property
    def full(self) -> bool:
        return len(self._waiting) >= MAX_BACKLOG

    @property
    def idle(self) -> bool:
        """Everything that was sealed is written, or was told to have failed."""
        return not self._waiting and not self._writing

    def sealed(self, step: int) -> None:
        """The batch of `step` is in the journal."""
        self._waiting.append(step)
        self._sealed.set()

    def take_up(self) -> None:
        """After a restart: what was sealed and not dumped is dumped now. Call it before `run`."""
        for step in range(self._journal.freed_through + 1, len(self._journal.plan) + 1):
            self.sealed(step)

    async def run(self) -> None:
        """Never returns; cancel it. Raises DumpWriteError when a required dump is not written."""
        while True:
            await self._sealed.wait()
            self._sealed.clear()
            while self._waiting:
                self._writing = True
                step = self._waiting.popleft()
                try:
                    told = await asyncio.to_thread(self._write, step)
                except (DumpWriteError, JournalStateError) as e:
                    if self._settings.required:
                        raise
                    self._events.emit(Kind.WARN, cause=f"no dump of step {step}: {e}", step=step)
                else:
                    self._events.emit(Kind.DUMP, step=step, **told)
                self._writing = False
                self._on_written()

    def _write(self, step: int) -> dict[str, Any]:
        """Write the dump unless it is there; what the event says."""
        path, ref = self._settings.path(step), self._journal.plan[step]
        if not self._is_there(path, step, ref.digest):
            origin = Origin(
                step, ref.digest, self._journal.uuid, self._settings.model, self._settings.run_seed
            )
            payload = self._journal.batch_bytes(ref.batch_id)
            prompts = self._journal.prompts(ref.batch_id)
            save_dump(path, make_dump(origin, payload, prompts, self._tokenizer))
        meta, samples, tokens = self._journal.batch_info(ref.batch_id)
        return {
            "path": str(path),
            "samples": samples,
            "tokens": tokens,
            "digest": ref.digest,
            "reward": meta.get("reward/mean"),
        }

    def _is_there(self, path: Path, step: int, digest: str) -> bool:
        try:
            return check_dump(path, step, self._settings.model).digest == digest
        except DumpInvalid:  # not there yet, or of another run
            return False
