"""Events that are worth a line of their own, and how often the same line is said: once, then
counted."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.observability.events import Kind, first_line

LAST_LINES = 2
"""Of a dead process's log, in the line that tells of its end."""

LAST_CHARS = 300

_NUMBER = re.compile(r"\d+(\.\d+)?")


def notice(line: Mapping[str, Any]) -> str | None:
    """An event worth a line of its own, else None."""
    data, cause = line.get("data", {}), first_line(line.get("cause"))
    subject = data.get("subject", line.get("name"))
    kind = line.get("kind")
    if kind == Kind.EXIT and line.get("phase") == "fault":
        return _death(subject, cause, data)
    if kind == Kind.RESTART:
        return f"{subject} is started again, attempt {data.get('attempt')}"
    if kind == Kind.STOP:
        who = "the job" if data.get("replica_id") is None else f"trainer-{data['replica_id']}"
        return f"{who} stops after step {line.get('step')}: {cause}"
    if kind == Kind.PROMOTE and "standby" in data:
        return f"{data['standby']} takes the place of {subject}"
    if kind == Kind.CHAOS:
        return f"chaos: {line.get('phase')}: {cause} ({subject})"
    if kind == Kind.REFUSE:
        failing = ", ".join(map(str, data.get("failing") or ())) or "no group known to be dead"
        return f"step {line.get('step')} refused, seen by {line.get('name')}: {failing}: {cause}"
    if kind == Kind.QUORUM and data.get("left"):
        return f"step {line.get('step')} goes on without {', '.join(map(str, data['left']))}"
    if kind in (Kind.FAULT, Kind.WARN):
        return f"{'fault' if kind == Kind.FAULT else 'warning'}: {subject}: {cause}"
    return None


def _death(subject: Any, cause: str, data: Mapping[str, Any]) -> str:
    """How it ended, which process it was, how long it lived, and what it said last."""
    code, signum = data.get("returncode"), data.get("signal")
    how = cause
    if isinstance(signum, int) and "signal" not in cause and "killed by" not in cause:
        how += f" (signal {signum})"
    elif isinstance(code, int) and code >= 0 and "exit code" not in cause:
        how += f" (exit code {code})"
    about = []
    if (pid := data.get("pid")) is not None:
        about.append(f"process {pid}")
    if isinstance(uptime_s := data.get("uptime_s"), int | float):
        about.append(f"up {uptime_s:.1f} s")
    about.append(f"log: {data.get('log', '?')}")
    said = " | ".join(str(t).strip() for t in (data.get("last_lines") or [])[-LAST_LINES:])
    if len(said) > LAST_CHARS:
        said = f"...{said[-LAST_CHARS:]}"
    tail = f"; it said last: {said}" if said else ""
    return f"{subject} ended: {how} ({', '.join(about)}){tail}"


@dataclass
class _Said:
    key: tuple[Any, ...]
    text: str
    more: int = 0


class Notices:
    """Says a line once. What is the same but for its numbers, of the same process or step, is
    counted; the count is said when something else happens to it, or at the end. A warning that all
    processes may tell of (`shared`) is said once for them."""

    def __init__(self) -> None:
        self._last: dict[tuple[Any, ...], _Said] = {}

    def of(self, line: Mapping[str, Any]) -> list[str]:
        """What to show of the next event."""
        kind, step = line.get("kind"), line.get("step")
        if kind == Kind.COMMIT:
            return self._over(("step",))
        if (text := notice(line)) is None:
            return []
        if kind in (Kind.REFUSE, Kind.QUORUM):
            # All groups tell of the same one.
            about, key = ("step", kind), (step,)
        else:
            subject = str(line.get("data", {}).get("subject", line.get("name")))
            about, key = ("process", subject), (kind, _NUMBER.sub("#", text))
            if line.get("data", {}).get("shared") is True:
                about = key = ("shared", kind, _NUMBER.sub("#", first_line(line.get("cause"))))
        last = self._last.get(about)
        if last is not None and last.key == key and kind in _MAY_REPEAT:
            last.more += 1
            return []
        before = [] if last is None else _count(last)
        self._last[about] = _Said(key, text)
        return [*before, text]

    def end(self) -> list[str]:
        """The counts that are still to be said."""
        return self._over(())

    def _over(self, about: tuple[Any, ...]) -> list[str]:
        found = [a for a in self._last if a[: len(about)] == about]
        return [text for a in found for text in _count(self._last.pop(a))]


_MAY_REPEAT = frozenset({Kind.REFUSE, Kind.QUORUM, Kind.WARN, Kind.FAULT})
"""Of the others each is a change of its own."""


def _count(said: _Said) -> list[str]:
    return [f"({said.more} more like: {said.text[:100]})"] if said.more else []
