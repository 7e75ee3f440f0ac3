"""Exports what a process tells of itself, from a side thread, whatever becomes of the receiver.

Whoever tells something only appends it to a bounded queue. Where the receiver does not take what is
sent, the oldest is dropped and counted, one WARN event says so, and it is asked again at growing
intervals. The end of the process waits `CLOSE_TIMEOUT_S` for the last export at most.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torchtitan_rl_ft.observability.events import Event, EventSink, Kind, first_line
from torchtitan_rl_ft.observability.spans import Span, SpanFold

logger = logging.getLogger(__name__)

QUEUE_LIMIT = 4096
"""Records of each sort that wait to be exported."""

BATCH_LIMIT = 512
"""Records of a sort in one request."""

WAITS = f"the newest {QUEUE_LIMIT} records wait, it is tried again"

RETRY_MAX_S = 60.0
CLOSE_TIMEOUT_S = 1.0


@dataclass(frozen=True)
class Record:
    """A line of somebody else's stream (torchft's), at Unix time `wall_s`."""

    wall_s: float
    stream: str
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Point:
    """A number as it was at Unix time `wall_s`."""

    name: str
    value: float
    wall_s: float
    step: int | None = None


Item = Event | Record | Span | Point


@dataclass(frozen=True)
class NotTaken:
    """`final`: it is of no use to send that again."""

    cause: str
    final: bool = False


class Sender(Protocol):
    """Sends records of one sort (`logs`, `traces`, `metrics`) in one request."""

    def send(self, sort: str, items: list[Any]) -> NotTaken | None: ...


class Exporter:
    """An events.Listener. `make_sender` and `read_more` are called in the side thread."""

    def __init__(
        self,
        events: EventSink,
        make_sender: Callable[[], Sender],
        *,
        receiver: str,
        interval_s: float,
        read_more: Callable[[SpanFold], Iterable[Point | Span]] = lambda fold: (),
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`receiver`: as the warning calls it. `read_more`: what there is beside the events."""
        self._events, self._make_sender, self._receiver = events, make_sender, receiver
        self._interval_s, self._read_more, self._clock_s = interval_s, read_more, clock_s
        self._told: deque[Event | Record] = deque(maxlen=QUEUE_LIMIT)
        self._waiting: dict[str, deque[Any]] = {
            sort: deque(maxlen=QUEUE_LIMIT) for sort in ("logs", "traces", "metrics")
        }
        self._fold = SpanFold()
        self._failures, self._try_at_s, self._warned = 0, 0.0, False
        self.dropped = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="export", daemon=True)

    def start(self) -> None:
        self._thread.start()
        atexit.register(self.close)

    def take(self, item: Event | Record) -> None:
        """From any thread; costs an append."""
        self._append(self._told, item)

    def close(self) -> None:
        """Export what is left, for a moment. A receiver that took nothing at last is not waited
        for."""
        atexit.unregister(self.close)
        self._closing.set()
        if self._thread.is_alive() and not self._failures:
            self._thread.join(CLOSE_TIMEOUT_S)

    def _append(self, queue: deque[Any], item: Any) -> None:
        self.dropped += len(queue) == queue.maxlen
        queue.append(item)

    # In the side thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._follow()
        except Exception as e:  # the run does not depend on what is shown of it
            logger.exception("nothing more is exported")
            self._warned = False
            self._warn(f"{type(e).__name__}: {e}", "nothing more is exported")

    def _follow(self) -> None:
        sender = self._make_sender()
        while True:  # at once: a receiver that is not there is told at the start
            self._collect()
            if self._clock_s() >= self._try_at_s:
                self._export(sender)
            if self._closing.wait(self._interval_s):
                break
        self._collect()
        for span in self._fold.close(time.time()):
            self._append(self._waiting["traces"], span)
        if not self._failures:
            self._export(sender)

    def _collect(self) -> None:
        while self._told:
            item = self._told.popleft()
            self._append(self._waiting["logs"], item)
            if isinstance(item, Event):
                for span in self._fold.add(item):
                    self._append(self._waiting["traces"], span)
        for more in self._read_more(self._fold):
            self._append(self._waiting["metrics" if isinstance(more, Point) else "traces"], more)

    def _export(self, sender: Sender) -> None:
        """Each sort for itself: a receiver may take traces and nothing else."""
        for sort, queue in self._waiting.items():
            wrong = None
            while queue and wrong is None:
                batch = list(itertools.islice(queue, BATCH_LIMIT))
                wrong = _send(sender, sort, batch)
                if wrong is None or wrong.final:
                    for _ in batch:
                        queue.popleft()
                if wrong is not None:
                    self.dropped += len(batch) if wrong.final else 0
                    self._warn(wrong.cause)
            if wrong is not None and not wrong.final:  # the others would wait for it in vain
                self._failures += 1
                wait_s = min(RETRY_MAX_S, self._interval_s * 2**self._failures)
                self._try_at_s = self._clock_s() + wait_s
                return
        self._failures = 0

    def _warn(self, cause: str, outcome: str = WAITS) -> None:
        if self._warned or self._closing.is_set():  # the events may be closed by then
            return
        self._warned = True
        with contextlib.suppress(OSError):  # a full disk
            self._events.emit(
                Kind.WARN,
                cause=f"{self._receiver} does not take what is exported: {first_line(cause)}. The "
                f"run goes on; {outcome}",
                shared=True,
            )


def _send(sender: Sender, sort: str, batch: list[Any]) -> NotTaken | None:
    try:
        return sender.send(sort, batch)
    except Exception as e:  # of a library that the run does not depend on
        logger.exception("%d %s cannot be exported", len(batch), sort)
        return NotTaken(f"{type(e).__name__}: {e}", final=True)
