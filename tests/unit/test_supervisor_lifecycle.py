"""What an exit means, as a table."""

import pytest

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.process import describe
from torchtitan_rl_ft.roles.lifecycle import Action, Duty, RestartLimits, after_exit

LIMITS = RestartLimits(max_restarts=3, window_s=100.0, backoff_s=1.0, backoff_max_s=3.0)


def verdict(duty, returncode, restarts_s=(), ending=False, now_s=1000.0):
    return after_exit(
        duty, returncode, ending=ending, now_s=now_s, restarts_s=restarts_s, limits=LIMITS
    )


@pytest.mark.parametrize(
    ("duty", "returncode", "ending", "action"),
    [
        (Duty.DRIVER, 0, False, Action.DONE),
        (Duty.WORKER, 0, False, Action.FINISHED),
        (Duty.SERVICE, 0, False, Action.RESTART),
        (Duty.DRIVER, 1, False, Action.RESTART),
        (Duty.WORKER, -9, False, Action.RESTART),
        (Duty.SERVICE, -11, False, Action.RESTART),
        (Duty.WORKER, ExitCode.CONFIG, False, Action.FAIL),
        (Duty.SERVICE, ExitCode.CONFIG, False, Action.FAIL),
        (Duty.WORKER, ExitCode.NUMERIC, False, Action.FAIL),
        (Duty.WORKER, ExitCode.WRONG_RESULT, False, Action.EXPELLED),
        (Duty.WORKER, 0, True, Action.FINISHED),
        (Duty.WORKER, 1, True, Action.STOPPED),
        (Duty.WORKER, ExitCode.CONFIG, True, Action.STOPPED),
        (Duty.SERVICE, 0, True, Action.STOPPED),
        (Duty.DRIVER, 0, True, Action.STOPPED),
    ],
)
def test_action(duty, returncode, ending, action):
    assert verdict(duty, returncode, ending=ending).action is action


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.NUMERIC])
def test_code_that_no_restart_mends_becomes_the_exit_code_of_the_run(code):
    assert verdict(Duty.WORKER, code).exit_code == code


@pytest.mark.parametrize(
    ("restarts_s", "action", "delay_s"),
    [
        ([], Action.RESTART, 0.0),
        ([999.0], Action.RESTART, 1.0),
        ([990.0, 999.0], Action.RESTART, 2.0),
        ([980.0, 990.0, 999.0], Action.FAIL, 0.0),
        ([100.0, 200.0, 300.0, 999.0], Action.RESTART, 1.0),  # old ones do not count
        ([900.0], Action.RESTART, 1.0),  # exactly as old as the window
        ([899.9], Action.RESTART, 0.0),
    ],
)
def test_restarts_are_bounded_by_count_and_time_and_slow_down(restarts_s, action, delay_s):
    found = verdict(Duty.SERVICE, 1, restarts_s)
    assert (found.action, found.delay_s) == (action, delay_s)


def test_backoff_has_a_ceiling():
    assert [LIMITS.delay_s(n) for n in range(6)] == [0.0, 1.0, 2.0, 3.0, 3.0, 3.0]


def test_used_up_budget_is_named():
    found = verdict(Duty.SERVICE, 1, [980.0, 990.0, 999.0])
    assert found.reason == "3 restarts within 100 s are used up"
    assert found.exit_code == ExitCode.FAILED


@pytest.mark.parametrize(
    ("returncode", "text"),
    [
        (0, "exit code 0"),
        (7, "exit code 7"),
        (-9, "killed by SIGKILL"),
        (-99, "killed by signal 99"),
    ],
)
def test_describe(returncode, text):
    assert describe(returncode) == text
