"""ETTR and outages of a run that goes on, for those who look: read when somebody asks, in a side
thread, never more often than is worth it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.observability.ettr import Ettr, EttrSample
from torchtitan_rl_ft.observability.events import as_event, read_line
from torchtitan_rl_ft.observability.jsonl import JsonlTail
from torchtitan_rl_ft.observability.life_accounts import LifeAccounts
from torchtitan_rl_ft.observability.life_offset import last_life_offset

logger = logging.getLogger(__name__)

LEAST_INTERVAL_S = 1.0
REST = 20.0
"""Pause between two looks, as a multiple of what the last one took: 5 % of a core at most."""

MOST_SAMPLES = 200
LEAST_KEPT_S = 10.0
"""What is older than this, and than two samples, is summed up."""


@dataclass(frozen=True)
class Measured:
    """As of one look."""

    ettr: Ettr | None = None  # None: no step was committed
    samples: list[EttrSample] = field(default_factory=list)
    start_s: float | None = None  # of the life, on the monotonic clock
    window_s: float = 0.0  # of the samples
    problem: str | None = None  # why there is nothing newer


class LiveEttr:
    """`measured` is the newest result; `look` has a newer one made."""

    def __init__(
        self,
        events: Path,
        *,
        window_s: float,
        every_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = events
        self._tail: JsonlTail | None = None  # none before the first look
        self._window_s, self._every_s, self._clock_s = window_s, every_s, clock_s
        self._life = LifeAccounts(max(LEAST_KEPT_S, 2 * every_s), least_s=every_s)
        self._due_s = float("-inf")
        self._thread: threading.Thread | None = None
        self.measured = Measured()

    @property
    def looking(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def look(self) -> None:
        """Begin to measure unless that is under way, or was done a moment ago."""
        if not self.looking and self._clock_s() >= self._due_s and self.measured.problem is None:
            # Not an executor's thread: the end of the job must not wait for it.
            self._thread = threading.Thread(target=self._run, name="ettr", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        began_s = self._clock_s()
        try:
            self.measured = self.measure()
        except OSError as e:  # the next look may do better
            logger.warning("ETTR was not measured: %s", e)
        except Exception as e:  # the supervisor's loop is next door
            logger.exception("ETTR is no longer measured")
            self.measured = Measured(problem=f"{type(e).__name__}: {e}")
        now_s = self._clock_s()
        self._due_s = now_s + max(LEAST_INTERVAL_S, REST * (now_s - began_s))

    def measure_all(self) -> Measured:
        """Once, up to the last line."""
        self.measure()
        return self.measure()

    def measure(self) -> Measured:
        """Take in what was appended, and tell what it came to. The last events are kept back until
        the next time, unless nothing was appended since this one."""
        if self._tail is None:
            offset = last_life_offset(self._path)
            self._tail = JsonlTail(self._path, may_begin_anew=True, offset=offset, parse=read_line)
        grown = False
        for lines in self._tail.blocks():
            grown = True
            for event in filter(None, map(as_event, lines)):
                self._life.add(event)
        if not grown:
            self._life.rest()
        if (settled := self._life.settled()) is None:
            return Measured(start_s=self._life.start_s)
        every_s = max(self._every_s, (settled.end_s - settled.start_s) / MOST_SAMPLES)
        samples = settled.samples(self._window_s, every_s)
        return Measured(settled.ettr(), samples, self._life.start_s, self._window_s)


def measured_json(found: Measured, most_outages: int = 100) -> dict[str, Any]:
    """For the status page. Times of outages and samples: seconds since the start of the life."""
    ettr, start_s = found.ettr, found.start_s or 0.0
    if ettr is None:
        return {"ettr": None, "samples": [], "outages": [], "problem": found.problem}
    told = ettr.to_json()
    del told["outages"], told["slots"]
    outages = [o.to_json() for o in ettr.outages[-most_outages:]]
    for outage in outages:
        outage["cause"] = str(outage["cause"])[:300]
        outage |= {"at_s": outage["began_s"] - start_s, "end_s": outage["until_s"] - start_s}
    return {
        "ettr": told | {"outages": len(ettr.outages)},
        "samples": [
            (s.at_s, s.strict, s.paper, s.strict_window, s.paper_window) for s in found.samples
        ],
        "outages": outages,
        "problem": found.problem,
    }
