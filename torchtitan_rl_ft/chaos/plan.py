"""The language of faults: one line says what is done to whom, and when.

FAULT  = DEED MOMENT
DEED   = "kill" TARGET
       | ("stop" | "blackhole") TARGET ["for" SECONDS "s"]
       | "slow" TARGET SHARE "%" "for" SECONDS "s"
       | "fail" TARGET "all-reduce" ["for" SECONDS "s"]
       | "fill" "disk" "of" TARGET "for" SECONDS "s"
TARGET = "supervisor" | "lighthouse" | "serving" | "gateway" | "rollout" | "inspector"
       | "trainer-" G | "standby-" N | "relay-" N | "engine-" N ["." PART]
       | "any engine" | "any trainer" | "any standby" | "any relay"
       | "source of" ("trainer-" G ["." RANK] | "any trainer")
PART   = "server" | "scheduler" | "detokenizer"
MOMENT = ("at step" K | "at rollout" K | "at phase" NAME ["of" WHO]) ["plus" SECONDS "s"]
       | "after" SECONDS "s" ["of training"]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from torchtitan_rl_ft.config.errors import near_miss

EXAMPLE = "kill engine-1 at step 2"
ROLES = ("supervisor", "lighthouse", "serving", "gateway", "rollout", "inspector")
NUMBERED = ("engine", "trainer", "standby", "relay")
SOURCE_OF = "source of "
ANY = tuple(f"any {kind}" for kind in NUMBERED)
PARTS = ("server", "scheduler", "detokenizer")
LOOKED_UP = ("serving", "rollout", "inspector")
"""Roles whose address clients look up anew, so that a proxy can take their place."""


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL; engines and trainers with all their processes
    STOP = "stop"  # SIGSTOP, for a time or for good
    SLOW = "slow"  # SIGSTOP and SIGCONT in turns
    BLACKHOLE = "blackhole"  # connections to it are accepted, nothing comes through
    FAIL = "fail"  # its part in a sum over the groups fails
    FILL = "fill"  # the disk that it writes to is full


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


NOW = Moment(When.AFTER)


@dataclass(frozen=True)
class Fault:
    """One line of the plan. `duration_s` None: for good (kill), once (fail), or until the job
    ends."""

    line: str
    kind: FaultKind
    target: str
    moment: Moment
    share: float = 0.0  # of the time that a slowed process is stopped
    duration_s: float | None = None

    def deed(self, target: str | None = None) -> str:
        """The line without its moment, for another target where one is given."""
        whom = target or self.target
        words = {
            FaultKind.FAIL: f"fail {whom} all-reduce",
            FaultKind.FILL: f"fill disk of {whom}",
            FaultKind.SLOW: f"slow {whom} {100 * self.share:g} %",
        }.get(self.kind, f"{self.kind} {whom}")
        return words if self.duration_s is None else f"{words} for {self.duration_s:g} s"


class FaultInvalid(ValueError):
    """The line cannot be understood; the message says where and how to mend it."""


def parse(line: str) -> Fault:
    """A deed and its moment. Raises FaultInvalid."""
    return _Line(line).fault()


def parse_deed(line: str) -> Fault:
    """A deed alone: its moment is `NOW`. Raises FaultInvalid."""
    return _Line(line, "kill any trainer").deed()


def parse_command(line: str) -> Fault:
    """A deed, now or at the moment that is named. Raises FaultInvalid."""
    return _Line(line, "kill engine-1").command()


class _Line:
    """The words of a line, taken from the left."""

    def __init__(self, line: str, example: str = EXAMPLE) -> None:
        self._line, self._example = line, example
        # "50%" and "3s" are written by people without a blank.
        spaced = re.sub(r"(?<=\d)(%|s\b)", r" \1", line)
        self._words = spaced.split()

    def fault(self) -> Fault:
        return self._with_moment(self._deed())

    def _with_moment(self, deed: Fault) -> Fault:
        found = replace(deed, moment=self._moment())
        if self._words:
            raise self._error(f"nothing may follow the moment, found {self._words[0]!r}")
        return found

    def deed(self) -> Fault:
        found = self._deed()
        if self._words:
            raise self._error(f"no moment belongs here, found {' '.join(self._words)!r}")
        return found

    def command(self) -> Fault:
        found = self._deed()
        return self._with_moment(found) if self._words else found

    def _deed(self) -> Fault:
        kind = FaultKind(self._one_of(list(FaultKind), "a kind of fault"))
        if kind is FaultKind.FILL:
            self._take("disk")
            self._take("of")
        target = self._target(kind)
        if kind is FaultKind.FAIL:
            self._take("all-reduce")
        share = self._share() if kind is FaultKind.SLOW else 0.0
        return Fault(self._line, kind, target, NOW, share, self._duration(kind))

    def _target(self, kind: FaultKind) -> str:
        word = self._next("a target")
        if word == "source":
            return self._source(kind)
        if word == "any":
            word = f"any {self._next('engine, trainer, standby or relay')}"
        base, dot, part = word.partition(".")
        known = [*ROLES, *ANY, *(f"{kind}-0" for kind in NUMBERED)]
        if not (base in (*ROLES, *ANY) or re.fullmatch(rf"({'|'.join(NUMBERED)})-\d+", base)):
            raise self._error(
                f"unknown target {word!r}{near_miss(word, known)} (known: {', '.join(ROLES)}, "
                f"trainer-G, standby-N, relay-N, engine-N, {', '.join(ANY)}, source of trainer-G)"
            )
        if dot and (not base.startswith("engine-") or part not in PARTS):
            raise self._error(f"only engines have parts, and {word!r} names none of {PARTS}")
        if kind is FaultKind.BLACKHOLE and (dot or not _has_port(base)):
            raise self._error(
                f"no client finds {word!r} anew: engines, standbys and {', '.join(LOOKED_UP)} only"
            )
        if kind is FaultKind.FAIL and kind_of(word) != "trainer":
            raise self._error(f"{word!r} takes part in no sum over the groups: trainers only")
        return word

    def _source(self, kind: FaultKind) -> str:
        if kind not in (FaultKind.KILL, FaultKind.STOP, FaultKind.SLOW):
            raise self._error(f"a source can be killed, stopped and slowed, not: {kind}")
        self._take("of")
        word = self._next("a trainer")
        if word == "any":
            self._take("trainer")
            word = "any trainer"
        elif not re.fullmatch(r"trainer-\d+(\.\d+)?", word):
            raise self._error(f"trainers have sources, like trainer-1 or trainer-1.0, not {word!r}")
        return SOURCE_OF + word

    def _share(self) -> float:
        share = self._number("the share of time that it is stopped, like 50 %")
        self._take("%")
        if not 0 < share < 100:
            raise self._error(f"a share is above 0 % and below 100 %, found {share:g} %")
        return share / 100

    def _duration(self, kind: FaultKind) -> float | None:
        if not self._words or self._words[0] != "for":
            if kind in (FaultKind.SLOW, FaultKind.FILL):
                raise self._error(f"{kind} needs a duration, like: for 5 s")
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
        return FaultInvalid(f"{message}; a line reads like {self._example!r} (docs/faults.md)")


def kind_of(target: str) -> str:
    """`engine` of `engine-1.server` and of `any engine`; a role's own name."""
    if target.startswith(SOURCE_OF):
        return "source"
    return target.removeprefix("any ").partition(".")[0].partition("-")[0]


def _has_port(target: str) -> bool:
    return target in LOOKED_UP or kind_of(target) in ("engine", "standby")
