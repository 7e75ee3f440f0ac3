"""How a run ended, and what of it may stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.roles.cleanup import Cleanup
from torchtitan_rl_ft.run_folder import ProcessId


@dataclass(frozen=True)
class Outcome:
    """How a run ended. `detail` are further lines for people (last lines of a log)."""

    exit_code: int
    cause: str
    detail: list[str] = field(default_factory=list)
    kept: bool = False
    """Its session stays for another job."""


class Kept(Protocol):
    """What may stay when the run has ended (session.py: Session)."""

    def processes(self) -> set[ProcessId]: ...

    def may_be_kept(self, exit_code: int) -> bool: ...

    async def release(self, limit_s: float) -> None: ...

    async def dispose(self, limit_s: float) -> None: ...


class Nothing:
    """A run without a session."""

    def processes(self) -> set[ProcessId]:
        return set()

    def may_be_kept(self, exit_code: int) -> bool:
        return False

    async def release(self, limit_s: float) -> None:
        pass

    async def dispose(self, limit_s: float) -> None:
        pass


def with_leftovers(outcome: Outcome, cleanup: Cleanup, left: Sequence[str], kept: bool) -> Outcome:
    """The run's own error comes first; what went wrong in the clean-up counts when there is
    none."""
    exit_code, cause, detail = outcome.exit_code, outcome.cause, list(outcome.detail)
    if cleanup.errors and exit_code == ExitCode.DONE:
        exit_code, cause = ExitCode.FAILED, str(cleanup.errors[0])
    if left:
        exit_code = exit_code or ExitCode.FAILED
        detail += ["left behind:", *(f"  {line}" for line in left)]
    return Outcome(exit_code, cause, detail, kept)
