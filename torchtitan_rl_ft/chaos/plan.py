"""The language of faults: one line says what is done to whom, and when.

FAULT  = ("kill" | "stop" | "slow" | "blackhole") TARGET [SHARE "%"] ["for" SECONDS "s"] MOMENT
TARGET = "supervisor" | "lighthouse" | "serving" | "rollout" | "trainer-" G
       | "engine-" N ["." PART] | "any engine" | "any trainer"
PART   = "server" | "scheduler" | "detokenizer"
MOMENT = ("at step" K | "at rollout" K | "at phase" NAME ["of" WHO]) ["plus" SECONDS "s"]
       | "after" SECONDS "s" ["of training"]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.errors import near_miss
from torchtitan_rl_ft.config.resolve import Resolved

EXAMPLE = "kill engine-1 at step 2"
ROLES = ("supervisor", "lighthouse", "serving", "rollout")
ANY = ("any engine", "any trainer")
PARTS = ("server", "scheduler", "detokenizer")


LEFT_OUT = {
    DebugMode.TRAIN_ONLY: ("engine", "serving"),
    DebugMode.ROLLOUT_ONLY: ("trainer", "lighthouse"),
}
"""Roles that a debug mode does without."""


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL; engines and trainers with all their processes
    STOP = "stop"  # SIGSTOP, for a time or for good
    SLOW = "slow"  # SIGSTOP and SIGCONT in turns
    BLACKHOLE = "blackhole"  # connections to it are accepted, nothing comes through


class When(StrEnum):
    STEP = "step"  # after the commit of the step
    ROLLOUT = "rollout"  # when the batch of the step is being rolled out
    PHASE = "phase"  # an event of that kind, phase or new state
    AFTER = "after"  # seconds after the start of the job
    TRAINING = "training"  # seconds after the first commit, in which the job was up


@dataclass(frozen=True)
class Moment:
    when: When
    number: int = 0  # of the step
    phase: str = ""
    of: str = ""  # only events of, or about, this process
    after_s: float = 0.0
    plus_s: float = 0.0  # so long after what is named


@dataclass(frozen=True)
class Fault:
    """One line of the plan. `duration_s` None: for good (kill), or until the job ends."""

    line: str
    kind: FaultKind
    target: str
    moment: Moment
    share: float = 0.0  # of the time that a slowed process is stopped
    duration_s: float | None = None


class FaultInvalid(ValueError):
    """The line cannot be understood; the message says where and how to mend it."""


def parse(line: str) -> Fault:
    """Raises FaultInvalid."""
    return _Line(line).fault()


def problems(resolved: Resolved) -> list[str]:
    """What is wrong with `chaos.faults`, one line each: words that are not understood, victims
    and moments that this job does not have."""
    found = []
    origin = resolved.origins.get("chaos.faults", "default")
    for i, line in enumerate(resolved.sections.chaos.faults):
        try:
            fault = parse(line)
        except FaultInvalid as e:
            problem: str | None = str(e)
        else:
            problem = _misfit(fault, resolved)
        if problem is not None:
            found.append(f"chaos.faults[{i}] = {line!r} ({origin}): {problem}")
    return found


def _misfit(fault: Fault, resolved: Resolved) -> str | None:
    """Why the job can never suffer this fault, or None."""
    sections = resolved.sections
    rollout = sections.rollout
    engines = sum(g.engines for g in rollout.groups) or rollout.engines
    sizes = {
        "engine": engines + rollout.standby_engines + len(rollout.external_urls),
        "trainer": sections.fault_tolerance.replica_groups,
    }
    mode = debug_mode(rollout)
    if any(name in fault.target for name in LEFT_OUT.get(mode, ())):
        return f"rollout.debug_mode {mode} runs no {fault.target}"
    kind, _, number = fault.target.partition(".")[0].partition("-")
    if number and int(number) >= sizes[kind]:
        return f"there is no {kind}-{number} in this job, which has {sizes[kind]} (from {kind}-0)"
    if fault.target == "lighthouse" and not sections.fault_tolerance.enable:
        return "this job has no lighthouse (fault_tolerance.enable = false)"
    steps = resolved.get("training.steps")
    if fault.moment.when in (When.STEP, When.ROLLOUT) and fault.moment.number > steps:
        return f"training.steps = {steps}, so {fault.moment.when} {fault.moment.number} never comes"
    return None


def behind_proxy(faults: Sequence[Fault]) -> bool:
    """Whether engines have to be started behind a proxy for these faults."""
    return any(f.kind is FaultKind.BLACKHOLE and "engine" in f.target for f in faults)


class _Line:
    """The words of a line, taken from the left."""

    def __init__(self, line: str) -> None:
        self._line = line
        # "50%" and "3s" are written by people without a blank.
        spaced = re.sub(r"(?<=\d)(%|s\b)", r" \1", line)
        self._words = spaced.split()

    def fault(self) -> Fault:
        kind = FaultKind(self._one_of(list(FaultKind), "a kind of fault"))
        target = self._target(kind)
        share = self._share() if kind is FaultKind.SLOW else 0.0
        duration_s = self._duration(kind)
        moment = self._moment()
        if self._words:
            raise self._error(f"nothing may follow the moment, found {self._words[0]!r}")
        return Fault(self._line, kind, target, moment, share, duration_s)

    def _target(self, kind: FaultKind) -> str:
        word = self._next("a target")
        if word == "any":
            word = f"any {self._next('engine or trainer')}"
        base, dot, part = word.partition(".")
        known = [*ROLES, *ANY, "engine-0", "trainer-0"]
        if not (base in (*ROLES, *ANY) or re.fullmatch(r"(engine|trainer)-\d+", base)):
            raise self._error(
                f"unknown target {word!r}{near_miss(word, known)} (known: {', '.join(ROLES)}, "
                "trainer-G, engine-N, any engine, any trainer)"
            )
        if dot and (not base.startswith("engine-") or part not in PARTS):
            raise self._error(f"only engines have parts, and {word!r} names none of {PARTS}")
        if kind is FaultKind.BLACKHOLE and (dot or not _has_port(base)):
            raise self._error(f"no client finds {word!r} anew: engines, serving and rollout only")
        return word

    def _share(self) -> float:
        share = self._number("the share of time that it is stopped, like 50 %")
        self._take("%")
        if not 0 < share < 100:
            raise self._error(f"a share is above 0 % and below 100 %, found {share:g} %")
        return share / 100

    def _duration(self, kind: FaultKind) -> float | None:
        if not self._words or self._words[0] != "for":
            if kind is FaultKind.SLOW:
                raise self._error("slow needs a duration, like: for 5 s")
            return None
        if kind is FaultKind.KILL:
            raise self._error("kill has no duration")
        self._take("for")
        return self._seconds()

    def _moment(self) -> Moment:
        if self._one_of(["at", "after"], "a moment") == "after":
            return self._after()
        when = When(self._one_of(["step", "rollout", "phase"], "step, rollout or phase"))
        if when is When.PHASE:
            phase, of = self._next("the name of a phase"), ""
            if self._words[:1] not in ([], ["plus"]):
                self._take("of")
                of = self._next("the name of a process")
            return Moment(when, phase=phase, of=of, plus_s=self._plus())
        word = self._next("a number")
        if not word.isdigit() or int(word) < 1:
            raise self._error(f"{when} is followed by a number from 1, found {word!r}")
        return Moment(when, number=int(word), plus_s=self._plus())

    def _after(self) -> Moment:
        after_s = self._seconds()
        if self._words[:1] != ["of"]:
            return Moment(When.AFTER, after_s=after_s)
        self._take("of")
        self._take("training")
        return Moment(When.TRAINING, after_s=after_s)

    def _plus(self) -> float:
        if self._words[:1] != ["plus"]:
            return 0.0
        self._take("plus")
        return self._seconds()

    def _seconds(self) -> float:
        seconds = self._number("a number of seconds, like 3 s")
        self._take("s")
        if seconds <= 0:
            raise self._error(f"a time is above 0 s, found {seconds:g} s")
        return seconds

    # Words ------------------------------------------------------------------------------

    def _next(self, wanted: str) -> str:
        if not self._words:
            raise self._error(f"the line ends where {wanted} should follow")
        return self._words.pop(0)

    def _take(self, word: str) -> None:
        found = self._next(repr(word))
        if found != word:
            raise self._error(f"expected {word!r}, found {found!r}{near_miss(found, [word])}")

    def _one_of(self, known: Sequence[str], wanted: str) -> str:
        word = self._next(f"{wanted} ({', '.join(known)})")
        if word not in known:
            hint = near_miss(word, known)
            raise self._error(f"{word!r} is not {wanted} ({', '.join(known)}){hint}")
        return word

    def _number(self, wanted: str) -> float:
        word = self._next(wanted)
        if not re.fullmatch(r"\d+(\.\d+)?", word):
            raise self._error(f"expected {wanted}, found {word!r}")
        return float(word)

    def _error(self, message: str) -> FaultInvalid:
        return FaultInvalid(f"{message}; a line reads like {EXAMPLE!r} (docs/faults.md)")


def _has_port(target: str) -> bool:
    """Whether what asks it looks its address up, so that a proxy can take its place."""
    return target in ("serving", "rollout", "any engine") or target.startswith("engine-")
