"""Progress of a run in the terminal, derived from events.jsonl and metrics.jsonl alone."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from torchtitan_rl_ft.host.writable import MOST_CHARS, writable
from torchtitan_rl_ft.observability.notices import Notices
from torchtitan_rl_ft.observability.reward_curve import sparkline
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.observability.run_state import RunState

REFRESH_S = 0.25
PHASE_REPEAT_S = 10.0
"""How often a phase that lasts is printed again when lines are printed."""


MOST_LINES = 1000
"""That wait to be shown."""


def step_line(view: RunState) -> str:
    """The step that was committed last in one line."""
    parts = [f"step {view.metrics.get('step', view.step)}/{view.total_steps}"]
    for label, key, form in (
        ("reward", "reward/mean", ".3f"),
        ("policy age", "policy_age/mean", ".1f"),
        ("loss", "loss", "z.4f"),
    ):
        if isinstance(value := view.metrics.get(key), int | float):
            parts.append(f"{label} {value:{form}}")
    # Who took part, also a group that was started by hand: no supervisor tells of that one.
    took_part = view.metrics.get("participants")
    groups = int(took_part) if isinstance(took_part, int | float) else view.groups_alive
    parts.append(f"groups {groups}/{view.groups}")
    if view.engines:
        parts.append(f"engines {view.engines_serving}/{view.engines}")
    if isinstance(step_s := view.metrics.get("time/step_s"), int | float):
        parts.append(f"{step_s:.2f} s")
    return "  ".join(parts)


def dump_line(line: Mapping[str, Any], total: int) -> str:
    """A dumped rollout in one line."""
    data = line.get("data", {})
    parts = [f"rollout {line.get('step')}/{total}"]
    if isinstance(reward := data.get("reward"), int | float):
        parts.append(f"reward {reward:.3f}")
    parts.append(f"{data.get('samples')} samples  {data.get('tokens')} tokens")
    return "  ".join(parts)


class PlainReporter:
    """A line per committed step, per phase and per notice, for logs and pipes. What nobody reads
    waits, and the oldest of it goes."""

    def __init__(
        self,
        write: Callable[[str], None],
        clock: Callable[[], float],
        may_write: Callable[[], bool] = lambda: True,
    ) -> None:
        self._print, self._clock, self._may_write = write, clock, may_write
        self._waiting: deque[str] = deque(maxlen=MOST_LINES)
        self._phase, self._phase_since_s, self._said_s = "", 0.0, 0.0

    def update(self, view: RunState, notices: list[str], steps: list[str]) -> None:
        for text in [*notices, *steps]:
            self._write(text)
        self._tell_phase(view)
        while self._waiting and self._may_write():
            self._print(self._waiting.popleft())

    def _write(self, text: str) -> None:
        pieces = range(0, max(1, len(text)), MOST_CHARS)
        self._waiting.extend(text[i : i + MOST_CHARS] for i in pieces)

    def _tell_phase(self, view: RunState) -> None:
        if view.under_way:
            return
        now_s, phase = self._clock(), view.phase()
        if phase != self._phase:
            self._phase, self._phase_since_s, self._said_s = phase, now_s, now_s
            self._write(phase)
        elif now_s - self._said_s >= PHASE_REPEAT_S:
            self._said_s = now_s
            self._write(f"{phase} {now_s - self._phase_since_s:.0f} s")

    def close(self) -> None:
        pass


class LiveReporter:
    """A panel that is redrawn in place, with notices above it."""

    def __init__(self, console: Console, clock: Callable[[], float]) -> None:
        self._console, self._clock = console, clock
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()
        self._waiting: deque[str] = deque(maxlen=MOST_LINES)
        self._phase, self._phase_since_s = "", clock()

    def update(self, view: RunState, notices: list[str], steps: list[str]) -> None:
        self._waiting.extend(notices)
        if (phase := view.phase()) != self._phase:
            self._phase, self._phase_since_s = phase, self._clock()
        while self._waiting and writable(self._console.file):
            self._console.print(Text(self._waiting.popleft()[:MOST_CHARS], style="yellow"))
        if writable(self._console.file):
            self._live.update(self._panel(view), refresh=True)

    def _panel(self, view: RunState) -> Group:
        now_s = self._clock()
        head = Table.grid(padding=(0, 2))
        unit, done = ("step", view.step) if view.groups else ("rollout", len(view.dumped))
        head.add_row(
            Text(f"{unit} {done}/{view.total_steps}", style="bold"),
            ProgressBar(total=max(1, view.total_steps), completed=done, width=40),
            f"{view.elapsed_s(now_s):.0f} s",
        )
        state = f"{self._phase} {now_s - self._phase_since_s:.0f} s"
        if view.commits > 0:
            state = step_line(view).split("  ", 1)[1]
        width = max(10, min(60, self._console.width - 12))
        return Group(head, Text(state), Text(sparkline(view.rewards, width), style="cyan"))

    def close(self) -> None:
        if writable(self._console.file):
            self._live.stop()


class ProgressConsole:
    """Follows the files of a run from now on until it is told to stop."""

    def __init__(
        self,
        follower: RunFollower,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._follower, self._view = follower, follower.state
        self._told = Notices()
        self._notices: deque[str] = deque(maxlen=MOST_LINES)
        self._steps: deque[str] = deque(maxlen=MOST_LINES)
        self._reporter: PlainReporter | LiveReporter
        if console.is_terminal:
            self._reporter = LiveReporter(console, clock)
        else:
            self._reporter = PlainReporter(
                lambda text: print(text, flush=True), clock, lambda: writable(sys.stdout)
            )
        if not follower.caught_up:
            follower.poll()  # what earlier lives of the run have left is known, not shown
        self._dumped = len(self._view.dumped)
        follower.listen(self._on_event, self._on_metrics)

    def poll(self) -> None:
        """Take in what was written since the last call and show it."""
        self._follower.poll()
        notices, steps = list(self._notices), list(self._steps)
        self._notices.clear()
        self._steps.clear()
        self._reporter.update(self._view, notices, steps)

    def say(self, text: str) -> None:
        """Show a line with the next poll."""
        self._notices.append(text)

    def _on_event(self, line: Mapping[str, Any]) -> None:
        self._notices.extend(self._told.of(line))
        known, self._dumped = self._dumped, len(self._view.dumped)
        if not self._view.groups and self._dumped > known:  # a restarted role tells of them again
            self._steps.append(dump_line(line, self._view.total_steps))

    def _on_metrics(self, row: Mapping[str, Any]) -> None:
        self._steps.append(step_line(self._view))

    async def follow(self) -> None:
        """Poll until cancelled."""
        try:
            while True:
                self.poll()
                await asyncio.sleep(REFRESH_S)
        finally:
            try:
                self.poll()
                self._notices.extend(self._told.end())
                self.poll()
            finally:
                self._reporter.close()
