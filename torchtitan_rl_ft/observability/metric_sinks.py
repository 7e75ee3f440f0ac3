"""TensorBoard and W&B get what `metrics.jsonl` gets, by one writer: the rollout role.

Each sink follows the file from a side thread, and remembers in a small file beside its own how far
it has come. So a restart or a resumed job goes on where the last one stopped, and what a rewind has
undone is taken back before it is written anew. What a sink fails by is a warning, and it is tried
again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from torchtitan_rl_ft.observability.events import EventSink, Kind, first_line
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.observability.metric_rows import committed_rows, read_metrics, read_row
from torchtitan_rl_ft.run_folder import write_atomic

POLL_S = 0.5
RETRY_MAX_S = 60.0
CLOSE_TIMEOUT_S = 10.0

TITAN_NAMES = {
    "loss": "loss_metrics/global_avg_loss",
    "time/step_s": "time_metrics/end_to_end(s)",
    "time/wait_batch_s": "time_metrics/data_loading(s)",
}
"""Keys that TorchTitan writes as well, as it spells them."""

_COUNTERS = ("step", "commit", "batch")


History = Callable[[], list[dict[str, Any]]]


class MetricSink(Protocol):
    """Where numbers by step go. Raises whatever its library raises."""

    name: str

    def begin(self, step: int, rewinds: int, history: History | None) -> None:
        """What follows is `step` and later: what was written of these is void. `rewinds`: how often
        the history has gone back. `history`: it has done so now; the lines before `step` that
        stand."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def titan_values(line: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a line of `metrics.jsonl`, TorchTitan's own under its names."""
    found = {
        TITAN_NAMES.get(key, key): float(value)
        for key, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and key not in _COUNTERS
    }
    tokens, step_s = line.get("tokens"), line.get("time/step_s")
    if isinstance(tokens, int | float) and isinstance(step_s, int | float) and step_s > 0:
        found["throughput(tps)"] = tokens / step_s
    return found


class Follower:
    """Brings one sink up to the end of `metrics.jsonl`."""

    def __init__(
        self, path: Path, cursor: Path, make_sink: Callable[[], MetricSink], log_freq: int = 1
    ) -> None:
        """`log_freq`: only the first step and those that it divides are written."""
        self._path, self._cursor, self._make_sink = path, cursor, make_sink
        self._log_freq = log_freq
        self._sink: MetricSink | None = None
        self._begun = False
        self._offset, self._step, self._rewinds = _read_cursor(cursor)

    def follow(self) -> None:
        """Raises what the sink raises; the same lines come again then."""
        if self._offset and self._size() < self._offset:  # of a run that was here before
            self._offset, self._step, self._begun = 0, sys.maxsize, False
        tail = JsonlTail(self._path, offset=self._offset, parse=read_row)
        lines = tail.read()
        if not lines:
            return
        self._sink = self._sink or self._make_sink()
        begun, self._begun = self._begun, False
        last, rewinds = self._step, self._rewinds
        for line in lines:
            step = line["step"]
            goes_back = step <= last
            if goes_back or not begun:
                rewinds += goes_back
                history = functools.partial(standing, self._path, step) if goes_back else None
                self._sink.begin(step, rewinds, history)
            begun, last = True, step
            if step == 1 or step % self._log_freq == 0:
                self._sink.write(step, titan_values(line))
        self._sink.flush()
        self._offset, self._step, self._rewinds = tail.offset, last, rewinds
        told = {"offset": self._offset, "step": last, "rewinds": rewinds}
        write_atomic(self._cursor, json.dumps(told).encode())
        self._begun = True

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def close(self) -> None:
        if self._sink is not None:
            self._sink.close()


def standing(path: Path, before: int) -> list[dict[str, Any]]:
    """The lines of the steps before `before` that no rewind has undone."""
    return [dict(line) for line in committed_rows(read_metrics(path)) if line["step"] < before]


def _read_cursor(path: Path) -> tuple[int, int, int]:
    """Offset, last step, rewinds; of a damaged file too, as if nothing had been written."""
    try:
        told = json.loads(path.read_bytes())
        return int(told["offset"]), int(told["step"]), int(told["rewinds"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, 0, 0


class MetricSinks:
    """The side thread that follows for all sinks."""

    def __init__(self, followers: Mapping[str, Follower], events: EventSink) -> None:
        self._followers, self._events = followers, events
        self._closing = threading.Event()
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="metric-sinks", daemon=True)

    def start(self) -> None:
        if self._followers:
            self._thread.start()

    def close(self) -> None:
        """Once the last line is in the file."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        pause_s = POLL_S
        while not self._closing.wait(pause_s):
            fine = [self._guarded(name, f.follow) for name, f in self._followers.items()]
            pause_s = POLL_S if all(fine) else min(2 * pause_s, RETRY_MAX_S)
        for name, follower in self._followers.items():
            if self._guarded(name, follower.follow):
                self._guarded(name, follower.close)

    def _guarded(self, name: str, act: Callable[[], None]) -> bool:
        try:
            act()
        except Exception as e:  # of a library that the run does not depend on
            if name not in self._warned:
                self._warned.add(name)
                cause = (
                    f"{name} lacks metrics, the run goes on: {type(e).__name__}: {first_line(e)}"
                )
                with contextlib.suppress(OSError):  # a full disk
                    self._events.emit(Kind.WARN, cause=cause)
            return False
        return True
