"""One record per fault: what was lost, and how it came back, in phases. A pure function of the
events of a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.observability.events import Event, Kind, first_line
from torchtitan_rl_ft.observability.lives import BEGINNINGS, lives

PHASES = ("detect", "restart", "reconnect", "redo")

ROLES = ("trainer", "engine", "rollout", "serving", "lighthouse", "supervisor")

_NUMBERED = re.compile(r"(trainer|engine)-\d+")

LASTING = frozenset({"stop", "slow", "blackhole"})
"""Injected faults that are over when they are lifted."""

ROLLOUT_WORKS = frozenset({"rollout", "waiting_for_trainers", "waiting_for_policy", "replay"})
"""Phases of a rollout role whose ledger answers."""

OF_A_RANK = frozenset({Kind.PHASE, Kind.QUORUM, Kind.HEAL, Kind.REFUSE})
"""Events that a group's first rank tells itself; others may be its launcher's."""


def role_of(name: str) -> str | None:
    """The role of a process, None for one whose loss stops no work (a standby, the inspector)."""
    if _NUMBERED.fullmatch(name):
        return name.split("-")[0]
    return name if name in ROLES else None


@dataclass
class Outage:
    """A fault of one process, until it does its work again. Times are of the monotonic clock, in
    seconds; None: it has not come to that."""

    role: str
    name: str
    cause: str
    began_s: float  # the injection, where it is known, else the detection
    detected_s: float | None = None
    retired_s: float | None = None  # the process is gone, or out of use
    replaced_s: float | None = None  # the new process is up
    connected_s: float | None = None  # it is known to the others, with their state
    done_s: float | None = None  # it does its work again
    until_s: float = 0.0  # done, or the last moment that is known
    overtaken: bool = False
    """The same process was hit again before it was back: the next record goes on from there."""

    version_before: int | None = None
    version_after: int | None = None
    samples_lost: int = 0  # in no batch any more, because of it
    samples_replayed: int = 0  # trained, or rolled out, again
    injected: str | None = None  # the kind of an injected fault

    @property
    def phase_s(self) -> dict[str, float]:
        """Each at least 0, in sum `until_s - began_s`: `done_s - began_s` when it is over.

        detect: until it is noticed. restart: until the new process is up. reconnect: until it has
        joined the others and holds their state. redo: until it does its work again.
        """
        marks_s = [self.began_s]
        for at_s in (self.detected_s, self.replaced_s, self.connected_s, self.until_s):
            known_s = self.until_s if at_s is None else min(at_s, self.until_s)
            marks_s.append(max(marks_s[-1], known_s))
        return {p: marks_s[i + 1] - marks_s[i] for i, p in enumerate(PHASES)}

    @property
    def total_s(self) -> float:
        return self.until_s - self.began_s

    @property
    def spans(self) -> list[tuple[str, float, float]]:
        """Phase, begin, end; without those that took no time."""
        found, at_s = [], self.began_s
        for phase, phase_s in self.phase_s.items():
            if phase_s > 0:
                found.append((phase, at_s, at_s + phase_s))
            at_s += phase_s
        return found

    def to_json(self) -> dict[str, Any]:
        """All fields, and what is derived of them."""
        return {
            "role": self.role,
            "name": self.name,
            "cause": self.cause,
            "injected": self.injected,
            "began_s": self.began_s,
            "detected_s": self.detected_s,
            "retired_s": self.retired_s,
            "replaced_s": self.replaced_s,
            "connected_s": self.connected_s,
            "done_s": self.done_s,
            "until_s": self.until_s,
            "overtaken": self.overtaken,
            "phase_s": self.phase_s,
            "version_before": self.version_before,
            "version_after": self.version_after,
            "samples_lost": self.samples_lost,
            "samples_replayed": self.samples_replayed,
        }

    def line(self) -> str:
        parts = ", ".join(f"{p} {s:.2f}" for p, s in self.phase_s.items() if s >= 0.005)
        end = "" if self.done_s is not None else ", not over" if not self.overtaken else ", again"
        return f"{self.name}: {first_line(self.cause)}: {self.total_s:.2f} s ({parts}){end}"


def outages(events: Iterable[Event]) -> list[Outage]:
    """Of all lives of a run, in the order in which they began."""
    found = Outages()
    for life in lives(events):
        for event in life.events:
            found.add(event)
    return found.all()


@dataclass
class _Subject:
    """What is known of one process."""

    outage: Outage | None = None
    pid: int | None = None  # of the events it writes itself
    last_s: float = 0.0  # its last own event
    respawned: bool = False  # since the outage began
    lifted: bool = False
    retired_s: float | None = None
    version: int | None = None
    relieved: Outage | None = None  # another engine took its place before its end was told


class Outages:
    """Fed event by event, in the order of the clock within a life."""

    def __init__(self) -> None:
        self._found: list[Outage] = []
        self._subjects: dict[str, _Subject] = {}
        self._place: dict[str, str] = {}  # engine -> the lost one whose place it takes
        self._version: int | None = None  # newest policy
        self._last_s: float | None = None
        self._ended = True  # the life before was ended by its supervisor

    def all(self) -> list[Outage]:
        """So far. Those that last reach to the last event."""
        for outage in self._open():
            outage.until_s = max(outage.began_s, self._last_s or 0.0)
        return sorted(self._found, key=lambda o: o.began_s)

    def add(self, event: Event) -> None:
        if event.kind is Kind.RUN:
            self._run(event)
        self._last_s = event.mono_s
        if event.kind in (Kind.PUBLISH, Kind.INSTALL) and event.version is not None:
            self._version = event.version
        match event.kind:
            case Kind.CHAOS:
                self._chaos(event)
            case Kind.FAULT:
                self._fault(event)
            case Kind.EXIT:
                self._exit(event)
            case Kind.RESTART:
                self._restart(event)
            case Kind.SPAWN:
                self._spawn(event)
            case Kind.PROMOTE:
                self._promote(event)
            case Kind.READY:
                self._ready(event)
            case Kind.TRANSITION:
                self._transition(event)
            case Kind.SUPERSEDE | Kind.DROP | Kind.MOVE | Kind.REFUSE:
                pass
        self._own(event)

    # Begin and end ----------------------------------------------------------------------

    def _open(self) -> list[Outage]:
        return [s.outage for s in self._subjects.values() if s.outage is not None]

    def _subject(self, name: str) -> _Subject:
        return self._subjects.setdefault(name, _Subject())

    def _begin(self, name: str, cause: str, began_s: float, **known: Any) -> Outage:
        """A fault of `name`, or more of the one that it has."""
        subject = self._subject(name)
        if (last := subject.outage) is not None:
            if not subject.respawned:
                return last
            last.overtaken, last.until_s = True, max(last.began_s, began_s)
        outage = Outage(str(role_of(name)), name, cause, began_s, until_s=began_s, **known)
        outage.version_before = self._version if subject.version is None else subject.version
        subject.outage, subject.respawned, subject.lifted = outage, False, False
        self._found.append(outage)
        return outage

    def _done(self, name: str, at_s: float) -> None:
        subject = self._subject(name)
        if (outage := subject.outage) is None:
            return
        outage.done_s = outage.until_s = max(outage.began_s, at_s)
        if outage.connected_s is None:
            outage.connected_s = outage.done_s
        if outage.replaced_s is None:
            outage.replaced_s = outage.connected_s
        if outage.detected_s is None:  # it was over before anybody saw it
            outage.detected_s = outage.replaced_s
        outage.version_after = self._version if subject.version is None else subject.version
        subject.outage = None

    def _run(self, event: Event) -> None:
        if event.phase not in BEGINNINGS:
            self._ended = True
            return
        before_s, ended = self._last_s, self._ended
        for subject in self._subjects.values():
            if (outage := subject.outage) is not None:
                outage.until_s = max(outage.began_s, before_s or 0.0)
        died = self._subjects.get("supervisor")
        known = None if died is None else died.outage
        self._subjects, self._place, self._ended = {}, {}, False
        if before_s is None or ended:
            return
        if known is not None:  # its end was ordered
            self._subjects["supervisor"] = _Subject(outage=known)
        began_s = min(before_s, event.mono_s)
        outage = self._begin("supervisor", "its supervisor was killed", began_s)
        outage.detected_s = outage.retired_s = outage.replaced_s = event.mono_s

    # What is told of others -------------------------------------------------------------

    def _chaos(self, event: Event) -> None:
        name = str(event.data.get("subject", ""))
        if role_of(name) is None:
            return
        if event.phase == "lift":
            subject = self._subject(name)
            subject.lifted = True
            if role_of(name) not in ("trainer", "engine", "rollout"):
                self._done(name, event.mono_s)
            return
        kind = str(event.data.get("fault", ""))
        outage = self._begin(name, f"injected: {event.cause}", event.mono_s)
        if outage.began_s == event.mono_s:
            outage.injected = kind

    def _fault(self, event: Event) -> None:
        name = str(event.data.get("subject", ""))
        if role_of(name) not in ("trainer", "engine"):
            return  # of the others it is their end that counts
        limit_s = event.data.get("limit_s") if event.phase == "wedged" else None
        silent_s = limit_s if isinstance(limit_s, int | float) else 0.0
        cause = first_line(event.cause)
        outage = self._begin(name, cause, event.mono_s - max(0.0, silent_s))
        self._noticed(outage, cause, event.mono_s)

    def _noticed(self, outage: Outage, cause: str, at_s: float) -> None:
        if outage.detected_s is None:
            outage.detected_s = at_s
            if outage.injected is not None and cause not in outage.cause:
                outage.cause = f"{outage.cause}; {cause}"

    def _exit(self, event: Event) -> None:
        name = str(event.data.get("subject", event.name))
        subject = self._subjects.get(name)
        if event.phase != "fault" or role_of(name) is None:
            return
        if subject is not None and subject.outage is None and subject.relieved is not None:
            subject.relieved.retired_s = event.mono_s
            return
        cause = first_line(event.cause)
        retired_s = subject.retired_s if subject is not None else None
        gone_s = event.mono_s if retired_s is None else min(retired_s, event.mono_s)
        outage = self._begin(name, cause, gone_s)
        self._noticed(outage, cause, gone_s)
        outage.retired_s = event.mono_s
        self._subject(name).retired_s = None

    def _restart(self, event: Event) -> None:
        """A group that begins again in its processes; other restarts follow an exit."""
        name = str(event.data.get("subject", event.name))
        if event.phase != "in_process" or role_of(name) is None:
            return
        cause = first_line(event.cause)
        outage = self._begin(name, cause, event.mono_s)
        self._noticed(outage, cause, event.mono_s)
        outage.retired_s = event.mono_s
        self._subject(name).respawned = True

    def _spawn(self, event: Event) -> None:
        name = str(event.data.get("subject", event.name))
        if role_of(name) is None or event.phase == "adopted":
            return
        subject = self._subject(name)
        subject.respawned, subject.relieved = True, None
        if event.phase == "promoted" and subject.outage is not None:
            subject.outage.replaced_s = event.mono_s

    def _promote(self, event: Event) -> None:
        """A warm engine takes the place of a lost one, whose outage is over when it serves."""
        name = str(event.data.get("subject", ""))
        lost = str(event.cause or "").removeprefix("takes the place of ")
        if role_of(name) == "engine" and lost in self._subjects:
            self._place[name] = lost
            subject = self._subject(lost)
            subject.relieved = subject.outage
            if subject.outage is not None:
                subject.outage.replaced_s = event.mono_s

    def _ready(self, event: Event) -> None:
        name = str(event.data.get("subject", event.name))
        outage = self._subject(name).outage if role_of(name) is not None else None
        if outage is None or name in self._place.values():
            return
        if outage.replaced_s is None:
            outage.replaced_s = event.mono_s
        if outage.role == "lighthouse":
            self._done(name, event.mono_s)

    def _transition(self, event: Event) -> None:
        name, new = str(event.data.get("subject", "")), event.data.get("new")
        if role_of(name) != "engine":
            return
        subject = self._subject(name)
        if event.version is not None:
            subject.version = event.version
        if new == "suspect":
            outage = self._begin(name, first_line(event.cause), event.mono_s)
            self._noticed(outage, first_line(event.cause), event.mono_s)
        elif new == "retired":
            subject.retired_s = event.mono_s
        elif new == "standby" and name not in self._place.values():
            self._done(name, event.mono_s)
        elif new in ("stale", "serving"):
            if new == "serving":
                self._serves(name, event.mono_s)
            subject.retired_s = None

    def _serves(self, name: str, at_s: float) -> None:
        place = self._place.pop(name, name)
        if place != name:
            self._subject(place).version = self._subject(name).version
        subject = self._subject(place)
        dark = subject.outage is not None and subject.outage.injected in LASTING | {"kill"}
        if place != name or subject.respawned or subject.lifted or not dark:
            self._done(place, at_s)
        self._done("serving", at_s)

    # What a process tells of itself -----------------------------------------------------

    def _own(self, event: Event) -> None:
        name = event.name
        launcher = event.role == "trainer" and event.kind not in OF_A_RANK
        if event.role not in ("trainer", "rollout") or role_of(name) != event.role or launcher:
            return
        subject = self._subject(name)
        if subject.pid is not None and event.pid != subject.pid:
            self._another(name, subject, event)
        subject.pid, subject.last_s = event.pid, event.mono_s
        if subject.outage is not None:
            if name == "rollout":
                self._rollout(subject, subject.outage, event)
            else:
                self._trainer(subject, subject.outage, event)
        if event.kind is Kind.COMMIT:
            self._done("supervisor", event.mono_s)

    def _another(self, name: str, subject: _Subject, event: Event) -> None:
        """Another process writes in its name. Nobody has to have told of the end of the first."""
        if subject.outage is None:
            self._begin(name, "another process took its place", subject.last_s)
        assert subject.outage is not None
        self._noticed(subject.outage, "another process took its place", event.mono_s)
        subject.respawned = True

    def _trainer(self, subject: _Subject, outage: Outage, event: Event) -> None:
        new = subject.respawned
        if event.kind is Kind.PHASE and new and outage.replaced_s is None:
            outage.replaced_s = event.mono_s
        if event.kind in (Kind.HEAL, Kind.QUORUM) and new:
            outage.connected_s = event.mono_s
        over = new or subject.lifted or outage.injected not in LASTING | {"kill"}
        noticed = outage.injected is not None or outage.detected_s is not None
        if event.kind is Kind.PHASE and event.phase == "report" and over and noticed:
            self._done(event.name, event.mono_s)

    def _rollout(self, subject: _Subject, outage: Outage, event: Event) -> None:
        new = subject.respawned and outage.replaced_s is not None and event.kind is not Kind.READY
        works = event.kind is not Kind.PHASE or event.phase in ROLLOUT_WORKS
        if works and (new or subject.lifted):
            self._done("rollout", event.mono_s)
