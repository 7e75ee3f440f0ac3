"""When a job stops early, at a step boundary, to be started again.

The ledger decides it, once for all ranks: what one rank's clock or signal says is only asked of
it. `decide_exit` is the pure rule; `Exits` keeps what was asked, and by whom.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl_ft.config.recovery import RecoverySection
from torchtitan_rl_ft.run_folder import write_atomic

REQUEUE, LEFT = "requeue", "left"
"""Outcomes of `next` that mean: start again. The job stops; this group alone leaves."""

AUTORESUME_FILE = "autoresume.request"


@dataclass(frozen=True)
class ExitRules:
    """None: no such rule."""

    duration_s: float | None = None
    interval: int | None = None
    autoresume_interval: int | None = None
    min_replica_size: int = 1
    """Groups that must stay when one leaves; else the whole job stops."""

    @classmethod
    def of(cls, recovery: RecoverySection, min_replica_size: int) -> ExitRules:
        minutes = recovery.exit_duration_in_mins
        return cls(
            duration_s=None if minutes is None else 60.0 * minutes,
            interval=recovery.exit_interval,
            autoresume_interval=(
                recovery.adlr_autoresume_interval if recovery.adlr_autoresume else None
            ),
            min_replica_size=min_replica_size,
        )


def decide_exit(
    rules: ExitRules,
    *,
    step: int,
    last_step: int | None,
    elapsed_s: float,
    asked: str | None,
    requested: Callable[[], bool],
) -> str | None:
    """Why the job stops at the boundary after commit `step`; None: it goes on.

    `elapsed_s`: since the job's start, by the one clock of the ledger's host. `asked`: the reason
    of who has asked. `requested`: is there a request to stop; called only at the steps that look
    for one. After the last step nothing is left to start again for: only who has asked is heard.
    """
    if asked is not None:
        return asked
    if last_step is not None and step >= last_step:
        return None
    if rules.duration_s is not None and elapsed_s >= rules.duration_s:
        return f"{elapsed_s / 60:.2f} of {rules.duration_s / 60:g} minutes are over"
    if rules.interval is not None and step % rules.interval == 0:
        return f"step {step}: every {rules.interval} steps"
    interval = rules.autoresume_interval
    if interval is not None and step % interval == 0 and requested():
        return f"a request to stop was found at step {step}"
    return None


class RequestFile:
    """A request to stop that a scheduler leaves as a file. It counts once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def there(self) -> bool:
        return self._path.exists()

    def take(self) -> None:
        """It is honoured: the job that goes on does not find it again."""
        if self.there():
            os.replace(self._path, self._path.with_name(self._path.name + ".taken"))


@dataclass(frozen=True)
class ExitNote:
    """The decision, durable: a ledger that is killed between it and the job's end goes on with
    it, and the supervisor reads it. Only the job `attempt` heeds it."""

    path: Path
    attempt: str

    def write(self, step: int, reason: str) -> None:
        data = {"attempt": self.attempt, "step": step, "reason": reason}
        write_atomic(self.path, json.dumps(data).encode() + b"\n")

    def read(self) -> tuple[int, str] | None:
        """The step and the reason of this job's exit."""
        try:
            data = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        if data["attempt"] != self.attempt:
            return None
        return int(data["step"]), str(data["reason"])


def never() -> bool:
    return False


class Exits:
    """What was asked, who leaves, and who is in the middle of a step."""

    def __init__(
        self,
        rules: ExitRules | None = None,
        *,
        elapsed_s: Callable[[], float] = lambda: 0.0,
        request: RequestFile | None = None,
        note: ExitNote | None = None,
    ) -> None:
        self.rules = rules or ExitRules()
        self.asked: str | None = None
        self._elapsed_s, self._request, self._note = elapsed_s, request, note
        self._leaving: dict[str, str] = {}  # uuid -> reason
        self._in_step: set[str] = set()  # uuids that were given a batch and are not back yet
        self._has_trained = False

    def settled(self) -> str | None:
        """Why this very job was stopped in an earlier life of the ledger."""
        found = self._note.read() if self._note is not None else None
        return found[1] if found is not None else None

    def due(self, step: int, last_step: int | None) -> str | None:
        """`decide_exit` after the commit of `step`."""
        self._has_trained = True
        return decide_exit(
            self.rules,
            step=step,
            last_step=last_step,
            elapsed_s=self._elapsed_s(),
            asked=self.asked,
            requested=self._request.there if self._request is not None else never,
        )

    def due_between_steps(self, step: int, last_step: int | None) -> str | None:
        """Why the job stops while nobody is in the middle of a step: it was asked to, or its time
        is over. The latter not before a first step, so that a job that is started again and again
        gets on."""
        duration_s = self.rules.duration_s if self._has_trained else None
        return decide_exit(
            ExitRules(duration_s=duration_s),
            step=step,
            last_step=last_step,
            elapsed_s=self._elapsed_s(),
            asked=self.asked,
            requested=never,
        )

    def settle(self, step: int, reason: str) -> None:
        """Make the decision durable. Raises OSError."""
        if self._note is not None:
            self._note.write(step, reason)
        if self._request is not None:
            self._request.take()

    def ask(self, reason: str) -> None:
        """The first reason stays."""
        self.asked = self.asked or reason

    def ask_leave(
        self, uuids: Collection[str], stay: Mapping[int, Collection[str]], reason: str
    ) -> bool:
        """The processes `uuids` of one group want to leave. `stay`: by replica id, the processes
        of other groups that hold the state. False when too few would be left."""
        left = [g for g, others in stay.items() if not set(others) <= self._leaving.keys()]
        if len(left) < max(1, self.rules.min_replica_size):
            return False
        for uuid in uuids:
            self._leaving.setdefault(uuid, reason)
        return True

    def leaves(self, uuid: str) -> str | None:
        """Why this process, which is at a boundary, leaves; None: it stays."""
        return self._leaving.get(uuid)

    def begins(self, uuid: str) -> None:
        self._in_step.add(uuid)

    def rests(self, uuid: str) -> None:
        """It is at a step boundary."""
        self._in_step.discard(uuid)

    def idle(self, living: Collection[str]) -> bool:
        """Nobody who lives is in the middle of a step."""
        self._in_step &= set(living)
        return not self._in_step
