"""One budget for all clean-up."""

from __future__ import annotations

import asyncio
import time

import pytest

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.roles.cleanup import Cleanup
from torchtitan_rl_ft.roles.outcome import Outcome, with_leftovers

BUDGET_S = 1.0


async def fails(_: float) -> None:
    raise OSError("no such device")


async def hangs(_: float) -> None:
    await asyncio.sleep(600)


async def works(_: float) -> None:
    await asyncio.sleep(0.01)


@pytest.mark.row("F8")
@pytest.mark.parametrize(
    ("steps", "broken"),
    [
        ([works] * 6, []),
        ([works, fails, works, hangs, works, works], [1, 3]),
        ([works, hangs, works, hangs, works, works], [1, 3]),
        ([hangs] * 6, [0, 1, 2, 3, 4, 5]),
        ([fails] * 6, [0, 1, 2, 3, 4, 5]),
    ],
)
async def test_every_step_is_attempted_within_the_budget(steps, broken):
    cleanup, limits = Cleanup(BUDGET_S, len(steps)), []
    started_s = time.monotonic()
    for i, step in enumerate(steps):

        async def noted(limit_s: float, step=step) -> None:
            limits.append(limit_s)
            await step(limit_s)

        await cleanup.step(f"step {i}", noted)
    assert time.monotonic() - started_s < BUDGET_S + 0.5
    assert len(limits) == len(steps) and all(limit_s > 0 for limit_s in limits)
    assert [e.step for e in cleanup.errors] == [f"step {i}" for i in broken]


async def test_what_is_late_and_what_fails_is_told():
    cleanup = Cleanup(0.1, 2)
    await cleanup.step("first", hangs)
    await cleanup.step("second", fails)
    late, failed = map(str, cleanup.errors)
    assert late.startswith("clean-up: first: not done within 0.") and "cleanup_timeout" in late
    assert failed == "clean-up: second: OSError: no such device"


@pytest.mark.row("F8")
@pytest.mark.parametrize(
    ("exit_code", "cause"),
    [
        (ExitCode.DONE, "clean-up: step: OSError: no such device"),
        (ExitCode.FAILED, "trainer-0: killed"),
        (ExitCode.INTERRUPTED, "trainer-0: killed"),
    ],
)
async def test_the_jobs_own_error_comes_first(exit_code, cause):
    cleanup = Cleanup(1.0, 1)
    await cleanup.step("step", fails)
    told = with_leftovers(Outcome(exit_code, "trainer-0: killed"), cleanup, [], kept=False)
    assert (told.exit_code, told.cause) == (exit_code or ExitCode.FAILED, cause)
