"""Keeps the state of a run up with its files, for all who look at it in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import chain
from typing import Any

from torchtitan_rl_ft.observability.events import read_event
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.observability.metric_rows import read_row
from torchtitan_rl_ft.observability.run_state import RunState
from torchtitan_rl_ft.run_folder import RunFolder

Listener = Callable[[dict[str, Any]], None]


class RunFollower:
    """Folds what was appended since the last `poll` into `state`. The first one takes in what
    earlier lives of the run have left."""

    def __init__(self, folder: RunFolder, state: RunState) -> None:
        self.folder, self.state = folder, state
        self.caught_up = False
        self._foreign = 0  # events whose data is of another version
        self._events = JsonlTail(folder.events, may_begin_anew=True, parse=read_event)
        self._metrics = JsonlTail(folder.metrics, may_begin_anew=True, parse=read_row)
        self._on_event: list[Listener] = []
        self._on_metrics: list[Listener] = []

    @property
    def unreadable(self) -> int:
        """Lines that are no events of this version, or torn."""
        return self._foreign + self._events.unreadable

    def listen(self, on_event: Listener, on_metrics: Listener) -> None:
        """Have each new line told once it is part of the state."""
        self._on_event.append(on_event)
        self._on_metrics.append(on_metrics)

    async def catch_up(self) -> None:
        """Take in what is in the files by now, with room for others between two megabytes. Nobody
        polls meanwhile. Raises OSError."""
        for tail, take in ((self._events, self._event), (self._metrics, self._row)):
            for block in tail.blocks(until=tail.size()):
                for line in block:
                    take(line)
                await asyncio.sleep(0)
        self.caught_up = True

    def poll(self) -> None:
        """Raises OSError."""
        for line in chain.from_iterable(self._events.blocks()):
            self._event(line)
        for row in chain.from_iterable(self._metrics.blocks()):
            self._row(row)

    def _event(self, line: dict[str, Any]) -> None:
        try:
            self.state.add_event(line)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self._foreign += 1
            return
        for told in self._on_event:
            told(line)

    def _row(self, row: dict[str, Any]) -> None:
        self.state.add_metrics(row)
        for told in self._on_metrics:
            told(row)
