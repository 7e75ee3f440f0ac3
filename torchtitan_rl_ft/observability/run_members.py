"""The processes of a run as its events tell of them: roles, engines, the quorum."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from torchtitan_rl_ft.observability.events import Kind, first_line

SERVING = "serving"
ENDS_WITH_SERVING = frozenset({"relay", "gateway"})
"""Its children, of whose end nobody tells when it is killed."""

STARTING = "starting"
BETWEEN_VERSIONS = frozenset({"stale", "installing", "paused"})
"""States of an engine on its way from serving one version to serving the next."""

NOT_UP = frozenset({STARTING, "retired", "ended", "restarting", "lent", "unknown"})
"""States of an engine in which it is of no use yet, or no more."""

MOST_MEMBERS = 4096
"""Processes that are kept apart; names that never come again must not fill the memory."""

MOST_REASON = 300
"""Characters of a reason that are kept."""

_NUMBERED = re.compile(r"(trainer|engine|standby|relay)-\d+")


def kind_of(name: str) -> str:
    """trainer-1 -> trainer; a role of one process is its own kind."""
    found = _NUMBERED.match(name)
    return found.group(1) if found is not None else name


def reason_of(cause: Any) -> str:
    return first_line(cause)[:MOST_REASON]


@dataclass
class Member:
    """One role or one engine, whatever process it is at the moment."""

    name: str
    state: str = STARTING
    """Of a role: starting, up, restarting, ended. Of an engine: as in serving/states.py, or ended,
    restarting, lent, unknown."""

    pid: int | None = None
    phase: str | None = None
    step: int | None = None
    since_mono_s: float = 0.0
    """When its state, or its phase, last changed."""

    restarts: int = 0  # in this life of the run
    reason: str = ""  # of its last end, fault or restart
    version: int | None = None  # of an engine
    proved: bool = False
    """An engine that serves, or takes the next version after having served."""

    @property
    def alive(self) -> bool:
        return self.state in (STARTING, "up")

    def enter(self, state: str, mono_s: float) -> None:
        self.state, self.since_mono_s = state, mono_s

    def to_json(self) -> dict[str, Any]:
        return {k: v for k, v in asdict(self).items() if k != "proved"}


@dataclass
class Quorum:
    """The last one that a trainer told of."""

    quorum_id: int
    members: list[str]
    participants: int
    step: int | None
    since_mono_s: float  # when this id was first seen


@dataclass
class Members:
    """Fed event by event."""

    roles: dict[str, Member] = field(default_factory=dict)
    engines: dict[str, Member] = field(default_factory=dict)
    quorum: Quorum | None = None
    quorum_changes: int = 0  # in all lives, as the next ones
    restarts: Counter[str] = field(default_factory=Counter)  # by kind

    def begin(self, line: Mapping[str, Any], *, reattached: bool) -> None:
        """Another life of the run. Engines outlive the one before only when it says so."""
        kept = self.engines if reattached else {}
        self.roles, self.engines, self.quorum = {}, kept, None
        for engine in kept.values():
            engine.proved, engine.restarts = False, 0
            engine.enter("unknown", line.get("mono_s", 0.0))
        supervisor = self._role(str(line.get("name", "supervisor")))
        supervisor.pid = line.get("pid")
        supervisor.enter("up", line.get("mono_s", 0.0))

    def end(self, mono_s: float) -> None:
        """The supervisor's last word."""
        for role in self.roles.values():
            if role.state != "ended":
                role.enter("ended", mono_s)
                role.pid = None

    def add(self, line: Mapping[str, Any]) -> None:
        kind, mono_s = line.get("kind"), line.get("mono_s", 0.0)
        data = line.get("data", {})
        name = str(data.get("subject", line.get("name", "")))
        match kind:
            case Kind.SPAWN:
                self._spawn(name, line, mono_s)
            case Kind.READY:
                self._ready(name, line, mono_s)
            case Kind.EXIT:
                self._exit(name, line, mono_s)
            case Kind.RESTART:
                self._restart(name, line, mono_s)
            case Kind.FAULT:
                if (member := self._known(name)) is not None:
                    member.reason = reason_of(line.get("cause"))
            case Kind.PHASE:
                self._phase(str(line.get("name", "")), line, mono_s)
            case Kind.TRANSITION:
                self._transition(name, line, mono_s)
            case Kind.INSTALL:
                if name in self.engines:
                    self.engines[name].version = line.get("version")
            case Kind.PROMOTE:
                self.roles.pop(str(data.get("standby", "")), None)  # it has a group's name now
            case Kind.LEND:
                self._lend(name, line, mono_s)
            case Kind.QUORUM:
                self._quorum(line, mono_s)

    # Parts ------------------------------------------------------------------------------

    def _known(self, name: str) -> Member | None:
        """A rank is a part of its group."""
        return self.engines.get(name) or self.roles.get(name.split(".")[0])

    def _role(self, name: str) -> Member:
        name = name.split(".")[0]
        if len(self.roles) >= MOST_MEMBERS and name not in self.roles:
            return Member(name)
        return self.roles.setdefault(name, Member(name))

    def _engine(self, name: str) -> Member:
        if len(self.engines) >= MOST_MEMBERS and name not in self.engines:
            return Member(name)
        return self.engines.setdefault(name, Member(name))

    def _member(self, name: str) -> Member:
        return self._engine(name) if kind_of(name) == "engine" else self._role(name)

    def _spawn(self, name: str, line: Mapping[str, Any], mono_s: float) -> None:
        member = self._member(name)
        member.pid, member.phase, member.step = line.get("data", {}).get("pid"), None, None
        member.version, member.proved = None, False
        member.enter(STARTING, mono_s)
        if line.get("phase") == "promoted":
            member.restarts += 1
            self.restarts[kind_of(name)] += 1

    def _ready(self, name: str, line: Mapping[str, Any], mono_s: float) -> None:
        if kind_of(name) == "engine":
            return  # its states say more
        role = self._role(name)
        if role.pid is None and "subject" not in line.get("data", {}):
            role.pid = line.get("pid")
        role.enter("up", mono_s)

    def _exit(self, name: str, line: Mapping[str, Any], mono_s: float) -> None:
        member = self._member(name)
        member.enter("ended", mono_s)
        member.pid, member.phase, member.proved = None, None, False
        member.reason = reason_of(line.get("cause"))
        if name == SERVING:
            for engine in self.engines.values():
                engine.proved = False
                if engine.state not in ("ended", "restarting"):
                    engine.enter("unknown", mono_s)
            for role in self.roles.values():
                if kind_of(role.name) in ENDS_WITH_SERVING:
                    role.enter("ended", mono_s)
                    role.pid = None

    def _restart(self, name: str, line: Mapping[str, Any], mono_s: float) -> None:
        member = self._member(name)
        member.restarts += 1
        self.restarts[kind_of(name)] += 1
        member.reason = reason_of(line.get("cause"))
        if member.state == "ended":
            member.enter("restarting", mono_s)

    def _phase(self, name: str, line: Mapping[str, Any], mono_s: float) -> None:
        role = self._role(name)
        role.phase, role.step = line.get("phase"), line.get("step")
        role.since_mono_s, role.state = mono_s, "up"
        if "." not in name:
            role.pid = line.get("pid", role.pid)

    def _transition(self, name: str, line: Mapping[str, Any], mono_s: float) -> None:
        if kind_of(name) != "engine":
            return
        engine, new = self._engine(name), str(line.get("data", {}).get("new", ""))
        engine.enter(new, mono_s)
        if line.get("version") is not None:
            engine.version = line.get("version")
        if new == SERVING:
            engine.proved = True
        elif new not in BETWEEN_VERSIONS:
            engine.proved = False
        if new in ("suspect", "retired"):
            engine.reason = reason_of(line.get("cause"))

    def _lend(self, name: str, line: Mapping[str, Any], mono_s: float) -> None:
        if (engine := self.engines.get(name)) is None:
            return
        lent = line.get("phase") == "lend"
        engine.enter("lent" if lent else "restarting", mono_s)
        engine.reason, engine.proved = reason_of(line.get("cause")), False

    def _quorum(self, line: Mapping[str, Any], mono_s: float) -> None:
        data, known = line.get("data", {}), self.quorum
        quorum_id = int(data.get("quorum_id", 0))
        if known is None or known.quorum_id != quorum_id:
            self.quorum_changes += 1
        else:
            mono_s = known.since_mono_s
        members = [str(m) for m in data.get("members", [])][:MOST_MEMBERS]
        participants = int(data.get("participants", len(members)))
        self.quorum = Quorum(quorum_id, members, participants, line.get("step"), mono_s)
