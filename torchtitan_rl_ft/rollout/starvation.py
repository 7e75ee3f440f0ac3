"""Tells a pipeline that waits from one that gets nowhere, and says so within bounds."""

from __future__ import annotations

from collections.abc import Callable

from torchtitan_rl_ft.observability.events import EventSink, Kind

FIRST_WARNING_S = 5.0
FLAT_BATCHES = 10
"""In a row, after which batches without a signal are warned of; of the very first one as well."""


class RolloutStalled(Exception):
    """No sample can be had; the message says why."""


class Starvation:
    """Counts what goes wrong in a row; warns at growing distances; `check` ends it.

    Four ways to starve: serving does not answer, every prompt is dropped, nothing is accepted
    whatever the reason (answers that never come, tries that fail), every batch is without a
    signal (all rewards of each group equal).
    """

    def __init__(
        self,
        events: EventSink,
        *,
        unavailable_limit_s: float,
        groups_per_step: int,
        mono_s: Callable[[], float],
        warn_silent_s: float = 60.0,
        max_silent_s: float = 0.0,
        max_dropped_batches: int = 10,
        max_flat_batches: int = 0,
    ) -> None:
        """The limits are those of `[rl]`; 0 is none."""
        self._events, self._mono_s = events, mono_s
        self._first_silent_s, self._max_silent_s = warn_silent_s, max_silent_s
        self._max_dropped = max_dropped_batches * groups_per_step
        self._max_flat_batches = max_flat_batches
        self._silent_since: float | None = None
        self._warn_silent_s = warn_silent_s
        self._in_flight = 0
        self._failure = ""
        self._limit_s = unavailable_limit_s
        self._groups_per_step = groups_per_step
        self._since: float | None = None
        self._warn_after_s = FIRST_WARNING_S
        self._reason = ""
        self._drops = 0
        self._flat_batches = 0
        self._warned_flat_at = 1

    # Serving ----------------------------------------------------------------------------

    def unavailable(self, reason: str) -> None:
        now = self._mono_s()
        self._reason = reason
        if self._since is None:
            self._since, self._warn_after_s = now, FIRST_WARNING_S
        waited_s = now - self._since
        if waited_s >= self._warn_after_s:
            self._warn_after_s = max(2 * self._warn_after_s, waited_s)
            self._warn(f"no generation for {waited_s:.0f} s: {reason}")

    def available(self) -> None:
        self._since = None

    # Prompts ----------------------------------------------------------------------------

    def dropped(self, reason: str) -> None:
        self._drops += 1
        self._reason = reason
        if self._drops == self._groups_per_step:
            self._warn(f"{self._drops} prompt groups in a row were dropped, the last: {reason}")

    def accepted(self) -> None:
        self._drops = 0
        self._silent_since, self._failure = None, ""

    def failed(self, reason: str) -> None:
        """A try to roll a group out has failed, and there will be another one."""
        self._failure = reason

    def working(self, in_flight: int) -> None:
        """So many groups are being rolled out. Called again and again."""
        now = self._mono_s()
        self._in_flight = in_flight
        if not in_flight:
            self._silent_since = None
        elif self._silent_since is None:
            self._silent_since, self._warn_silent_s = now, self._first_silent_s
        elif self._since is None and now - self._silent_since >= self._warn_silent_s:
            self._warn_silent_s *= 2
            self._warn(self._silence(now - self._silent_since))

    def _silence(self, silent_s: float) -> str:
        why = self._failure or self._reason
        last = f"the last failure: {why}" if why else "no answer has come, and none has failed"
        return (
            f"no prompt group was accepted for {silent_s:.0f} s while {self._in_flight} are rolled "
            f"out: {last}"
        )

    # Batches ----------------------------------------------------------------------------

    def sealed(self, signal: bool) -> None:
        """`signal`: some advantage of the batch is not zero."""
        if signal:
            self._flat_batches = 0
            self._warned_flat_at = min(self._warned_flat_at, FLAT_BATCHES)
            return
        self._flat_batches += 1
        if self._flat_batches == self._warned_flat_at:
            self._warned_flat_at *= 10
            which = (
                f"{self._flat_batches} batches in a row" if self._flat_batches > 1 else "a batch"
            )
            self._warn(
                f"{which} without a signal: all rewards of each prompt group are equal or missing, "
                "so the step learns nothing"
            )

    # ------------------------------------------------------------------------------------

    @property
    def reason(self) -> str | None:
        """What the pipeline suffers from now; None when it works."""
        return self._reason if self._since is not None or self._drops else None

    def check(self) -> None:
        """Raises RolloutStalled past a limit."""
        if self._since is not None and self._mono_s() - self._since > self._limit_s:
            raise RolloutStalled(
                f"serving gave no answer for {self._limit_s:g} s, the last error: {self._reason}"
            )
        if self._drops >= self._max_dropped:
            raise RolloutStalled(
                f"{self._drops} prompt groups in a row were dropped, the last: {self._reason}"
            )
        if self._max_silent_s and self._silent_since is not None:
            silent_s = self._mono_s() - self._silent_since
            if silent_s >= self._max_silent_s:
                raise RolloutStalled(f"{self._silence(silent_s)} (rl.max_silent_s)")
        if self._max_flat_batches and self._flat_batches >= self._max_flat_batches:
            raise RolloutStalled(
                f"{self._flat_batches} batches in a row without a signal: all rewards of each "
                "prompt group are equal or missing (rl.max_flat_batches)"
            )

    def _warn(self, cause: str) -> None:
        self._events.emit(Kind.WARN, cause=cause)
