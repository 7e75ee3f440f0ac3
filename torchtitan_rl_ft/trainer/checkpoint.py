"""Checkpoints that are one commit with the journal.

A checkpoint counts when its `commit.json` is there, written last, and the ledger has been told.
Which one is loaded is the ledger's decision: it knows which histories its checkpoints belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torchtitan.components.checkpoint import AsyncMode, CheckpointManager

from torchtitan_rl_ft.journal.checkpoints import MARKER, write_marker


class SaveDuty(Protocol):
    """Who may save, and who is told (the trainer)."""

    def may_save(self, step: int) -> bool: ...

    def saved(self, step: int, token: str, path: str) -> None: ...

    @property
    def token(self) -> str: ...

    @property
    def is_writer(self) -> bool: ...


class RLCheckpointManager(CheckpointManager):
    """TorchTitan's DCP checkpoints, saved by one replica group at a time, loaded by decree."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def __init__(self, config: Config, *, ft_manager: Any = None, **kwargs: Any) -> None:
        # TorchTitan's fault-tolerant trainer hands its manager over; healing does not go
        # through checkpoints here, so switching them off does not switch healing off.
        super().__init__(config, **kwargs)
        self._duty: SaveDuty | None = None
        self._decreed_step = -1
        self._restoring = False
        self._in_flight: tuple[int, str] | None = None
        self._saves_last = True
        self._exiting = False

    def bind(self, duty: SaveDuty, *, saves_last: bool = True) -> None:
        """`saves_last`: also off the interval, the natural last step is saved."""
        self._duty, self._saves_last = duty, saves_last

    def save_for_exit(self, step: int) -> None:
        """Save the state of `step` as one to go on from: whole, whatever the last save of a run
        leaves out, and durable on return. Nothing to do when that step is saved."""
        self._exiting = True
        try:
            self.save(step)
            self.finish(wait=True)
        finally:
            self._exiting = False

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        if self._exiting:
            return not self.load_only
        return super()._should_save(curr_step, last_step)

    def restore(self, step: int) -> None:
        """Load checkpoint `step`; -1: what `initial_load_path` names. Raises FileNotFoundError."""
        self._decreed_step, self._restoring = step, True
        try:
            self.load(step=step)
        finally:
            self._restoring = False

    def _load(self, step: int = -1) -> bool:
        """The base trainer's own load at start comes after the ledger's decree: nothing to do."""
        return super()._load(step) if self._restoring else False

    def _find_load_step(self, folder: str = "") -> int:
        """Stock picks the highest folder number, complete or not, of whatever history."""
        return self._decreed_step

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        self.finish(wait=False)
        last_step = last_step and self._saves_last
        if self._duty is None or not self._should_save(curr_step, last_step):
            return False
        if not self._duty.may_save(curr_step):
            return False
        token = self._duty.token
        if self._duty.is_writer:
            # A folder of a superseded history must not look complete while it is overwritten.
            (Path(self._create_checkpoint_id(curr_step)) / MARKER).unlink(missing_ok=True)
        saved = super()._save(curr_step, last_step)
        if saved:
            self._in_flight = (curr_step, token)
            self.finish(wait=self.async_mode == AsyncMode.DISABLED or last_step)
        return saved

    def finish(self, wait: bool) -> None:
        """Mark and report a save that has become durable; `wait` for it if it has not."""
        if not self.enable or self._in_flight is None or self._duty is None:
            return
        if self.save_future is not None:
            if not wait and not self.save_future.done():
                return
            self.maybe_wait_for_saving()
        step, token = self._in_flight
        self._in_flight = None
        path = self._create_checkpoint_id(step)
        if self._duty.is_writer:
            write_marker(path, step, token)
        self._duty.saved(step, token, path)
