"""All outages of a run: a pure function of its events."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torchtitan_rl_ft.observability.event_data import number
from torchtitan_rl_ft.observability.event_data import subject as subject_of
from torchtitan_rl_ft.observability.events import Event, Kind, first_line
from torchtitan_rl_ft.observability.lives import BEGINNINGS, lives
from torchtitan_rl_ft.observability.outage import Outage, role_of
from torchtitan_rl_ft.observability.outage_samples import Samples

LASTING = frozenset({"stop", "slow", "blackhole", "fill"})
"""Injected faults that are over when they are lifted."""

ROLLOUT_WORKS = frozenset({"rollout", "waiting_for_trainers", "waiting_for_policy", "replay"})
"""Phases of a rollout role whose ledger answers."""

OF_A_RANK = frozenset({Kind.PHASE, Kind.QUORUM, Kind.HEAL, Kind.REFUSE})
"""Events that a group's first rank tells itself; others may be its launcher's."""

COMPUTES = frozenset({"forward_backward", "reduce", "commit"})
"""Phases of a trainer in which a fault costs the work of the step."""


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
    lifted_s: float | None = None  # an injected fault was
    retired_s: float | None = None
    version: int | None = None
    computes: int | None = None  # a trainer: the step that it is in
    relieved: Outage | None = None  # another engine took its place before its end was told


class Outages:
    """Fed event by event, in the order of the clock within a life."""

    def __init__(self) -> None:
        self._found: list[Outage] = []
        self._subjects: dict[str, _Subject] = {}
        self._lasting: dict[str, Outage] = {}  # by name, in the order in which they began
        self._samples = Samples()
        self._place: dict[str, str] = {}  # engine -> the lost one whose place it takes
        self._version: int | None = None  # newest policy
        self._last_s: float | None = None
        self._ended = True  # the life before was ended by its supervisor

    def all(self) -> list[Outage]:
        """So far: copies, which no later event changes. Those that last reach to the last event."""
        for outage in self._lasting.values():
            outage.until_s = max(outage.began_s, self._last_s or 0.0)
        return [replace(o) for o in sorted(self._found, key=lambda o: o.began_s)]

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
            case _:
                self._samples.add(event, list(self._lasting.values()))
        self._own(event)

    # Begin and end ----------------------------------------------------------------------

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
        subject.outage, subject.respawned, subject.lifted_s = outage, False, None
        self._found.append(outage)
        self._lasting.pop(name, None)
        self._lasting[name] = outage
        self._samples.hit(outage, subject.computes)
        return outage

    def _done(self, name: str, at_s: float) -> None:
        subject = self._subject(name)
        if (outage := subject.outage) is None:
            return
        outage.done_s = outage.until_s = max(outage.began_s, at_s)
        if outage.connected_s is None:
            outage.connected_s = outage.done_s
        if outage.detected_s is None:  # it was over before anybody saw it
            outage.detected_s = outage.done_s if subject.lifted_s is None else subject.lifted_s
        if outage.replaced_s is None:  # by nothing, or nobody has told when
            respawned = outage.connected_s if subject.respawned else outage.detected_s
            outage.replaced_s = respawned
        outage.version_after = self._version if subject.version is None else subject.version
        subject.outage = None
        del self._lasting[name]

    def _run(self, event: Event) -> None:
        if event.phase not in BEGINNINGS:
            self._ended = True
            return
        before_s, ended = self._last_s, self._ended
        for outage in self._lasting.values():
            outage.until_s = max(outage.began_s, before_s or 0.0)
        known = self._lasting.get("supervisor")
        self._subjects, self._lasting, self._place, self._ended = {}, {}, {}, False
        if before_s is None or ended:
            return
        if known is not None:  # its end was ordered
            self._subjects["supervisor"] = _Subject(outage=known)
            self._lasting["supervisor"] = known
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
            subject.lifted_s = event.mono_s
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
        silent_s = (number(event, "limit_s") or 0.0) if event.phase == "wedged" else 0.0
        cause = first_line(event.cause)
        outage = self._begin(name, cause, event.mono_s - max(0.0, silent_s))
        self._noticed(outage, cause, event.mono_s)

    def _noticed(self, outage: Outage, cause: str, at_s: float) -> None:
        if outage.detected_s is None:
            outage.detected_s = at_s
            if outage.injected is not None and cause not in outage.cause:
                outage.cause = f"{outage.cause}; {cause}"

    def _exit(self, event: Event) -> None:
        name = subject_of(event)
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
        ended_by = _signal_of(event) if outage.role == "engine" else ""
        if ended_by not in outage.cause:  # a connection that broke was seen before
            outage.cause = f"{outage.cause}; ended by {ended_by}"
        outage.retired_s = event.mono_s
        self._subject(name).retired_s = None

    def _restart(self, event: Event) -> None:
        """A group that begins again in its processes; other restarts follow an exit."""
        name = subject_of(event)
        if event.phase != "in_process" or role_of(name) is None:
            return
        cause = first_line(event.cause)
        outage = self._begin(name, cause, event.mono_s)
        self._noticed(outage, cause, event.mono_s)
        outage.retired_s = event.mono_s
        self._subject(name).respawned = True

    def _spawn(self, event: Event) -> None:
        name = subject_of(event)
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
        name = subject_of(event)
        outage = self._subject(name).outage if role_of(name) is not None else None
        if outage is None or name in self._place.values():
            return
        if outage.replaced_s is None:
            outage.replaced_s = event.mono_s
        if outage.role in ("lighthouse", "gateway"):
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
        self._samples.serves(name)
        if place != name:
            self._subject(place).version = self._subject(name).version
        subject = self._subject(place)
        dark = subject.outage is not None and subject.outage.injected in LASTING | {"kill"}
        if place != name or subject.respawned or subject.lifted_s is not None or not dark:
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
        if event.kind is Kind.PHASE:
            subject.computes = event.step if event.phase in COMPUTES else None
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
        if subject.outage.replaced_s is None:
            subject.outage.replaced_s = event.mono_s

    def _trainer(self, subject: _Subject, outage: Outage, event: Event) -> None:
        new = subject.respawned
        if event.kind is Kind.PHASE and new and outage.replaced_s is None:
            outage.replaced_s = event.mono_s
        if event.kind in (Kind.HEAL, Kind.QUORUM) and outage.detected_s is not None:
            outage.connected_s = event.mono_s
        if event.kind is Kind.REFUSE:
            self._noticed(outage, first_line(event.cause), event.mono_s)
        stays = outage.detected_s is not None and outage.injected not in LASTING | {"kill"}
        if event.phase == "report" and (new or subject.lifted_s is not None or stays):
            self._done(event.name, event.mono_s)

    def _rollout(self, subject: _Subject, outage: Outage, event: Event) -> None:
        new = subject.respawned and outage.replaced_s is not None and event.kind is not Kind.READY
        works = event.kind is not Kind.PHASE or event.phase in ROLLOUT_WORKS
        if works and (new or subject.lifted_s is not None):
            self._done("rollout", event.mono_s)


def _signal_of(event: Event) -> str:
    """Name of the signal that an engine ended by before it was ended, or nothing."""
    told = number(event, "signal")
    try:
        return "" if told is None else signal.Signals(int(told)).name
    except ValueError:
        return ""
