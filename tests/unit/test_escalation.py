"""The one table of recovery: which rung, when it is used up, what the page shows."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchtitan_rl_ft.escalation import (
    FIRST_RUNG,
    Fault,
    RestartLimits,
    Rung,
    fault_of_exit,
    next_step,
    tables,
)
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.regroup import RESTARTING
from torchtitan_rl_ft.journal.client import BatchWaitTimeout
from torchtitan_rl_ft.roles.regrouping import JOIN_TIMEOUT_S, RankState, decide
from torchtitan_rl_ft.trainer.group_link import PeerRankFailed
from torchtitan_rl_ft.trainer.inprocess import fault_of
from torchtitan_rl_ft.trainer.refusals import TooManyRefusals
from torchtitan_rl_ft.trainer.stepper import HealFailed, NumericStop

DOCS = Path(__file__).parents[2] / "docs"
TWO = RestartLimits(max_restarts=2, window_s=100.0)
ALL = {Rung.IN_PROCESS: TWO, Rung.ROLE: TWO, Rung.GROUP: TWO}


def test_the_page_shows_the_table():
    assert tables() in (DOCS / "faults.md").read_text()


def test_every_fault_has_a_first_rung():
    assert set(FIRST_RUNG) == set(Fault)


@pytest.mark.parametrize(
    ("fault", "limits", "used", "rung"),
    [
        (Fault.STEP, ALL, {}, Rung.IN_PROCESS),
        (Fault.STEP, ALL, {Rung.IN_PROCESS: [950.0]}, Rung.IN_PROCESS),
        (Fault.STEP, ALL, {Rung.IN_PROCESS: [950.0, 960.0]}, Rung.ROLE),
        (Fault.STEP, ALL, {Rung.IN_PROCESS: [850.0, 960.0]}, Rung.IN_PROCESS),  # one is too old
        (Fault.STEP, ALL, dict.fromkeys((Rung.IN_PROCESS, Rung.ROLE), [950.0, 960.0]), Rung.GROUP),
        (Fault.STEP, ALL, dict.fromkeys(ALL, [950.0, 960.0]), Rung.JOB),
        (Fault.STEP, {Rung.GROUP: TWO}, {}, Rung.GROUP),  # rungs that there are not
        (Fault.STEP, {}, {}, Rung.JOB),
        (Fault.PEER_RANK, ALL, {}, Rung.IN_PROCESS),
        (Fault.PROCESS, ALL, {}, Rung.ROLE),
        (Fault.WEDGED, ALL, {}, Rung.ROLE),
        (Fault.MEMORY, ALL, {}, Rung.ROLE),
        (Fault.DEVICE, ALL, {}, Rung.ROLE),
        (Fault.STARVED, ALL, {}, Rung.ROLE),
        (Fault.CONFIG, ALL, {}, Rung.JOB),
        (Fault.NUMERIC, ALL, {}, Rung.JOB),
    ],
)
def test_next_rung(fault, limits, used, rung):
    step = next_step(fault, limits=limits, restarts_s=used, now_s=1000.0)
    assert step.rung is rung
    assert bool(step.reason) == (rung is Rung.JOB and bool(limits)) or used


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (HealFailed("x"), Fault.STEP),
        (TooManyRefusals("x"), Fault.STEP),
        (TimeoutError("quorum"), Fault.STEP),
        (RuntimeError("Connection closed by peer"), Fault.STEP),
        (PeerRankFailed("x"), Fault.PEER_RANK),
        (dist.DistNetworkError("x"), Fault.PEER_RANK),
        (NumericStop("x"), Fault.NUMERIC),
        (torch.OutOfMemoryError("x"), Fault.MEMORY),
        (torch.AcceleratorError("x"), Fault.DEVICE),
        (BatchWaitTimeout("x"), Fault.STARVED),
    ],
)
def test_what_an_error_out_of_training_is(error, fault):
    assert fault_of(error) is fault


@pytest.mark.parametrize(
    ("returncode", "fault"),
    [
        (ExitCode.CONFIG, Fault.CONFIG),
        (ExitCode.NUMERIC, Fault.NUMERIC),
        (1, Fault.PROCESS),
        (-9, Fault.PROCESS),
        (None, Fault.PROCESS),
    ],
)
def test_what_an_exit_is(returncode, fault):
    assert fault_of_exit(returncode) is fault


DEAD, WORKING = RankState(False), RankState(True, "reduce", 1)
WAITING, COMING = RankState(True, RESTARTING, 1), RankState(True, "starting", 1)
BEHIND = RankState(True, RESTARTING, 0)  # its word from before it was told of this generation


@pytest.mark.parametrize(
    ("ranks", "waited_s", "go", "kill"),
    [
        ([WORKING, WORKING], 0.0, False, []),
        ([WORKING, DEAD], 1.0, False, []),
        ([WAITING, DEAD], 1.0, True, []),
        ([WAITING, WORKING], 1.0, False, []),
        ([WAITING, WAITING], 1.0, True, []),
        ([DEAD, DEAD], 0.0, True, []),
        ([COMING, DEAD], 0.0, False, [0]),  # it would wait for one that is gone
        ([COMING, WAITING], 0.0, False, []),
        ([BEHIND, DEAD], 0.0, False, []),
        ([WORKING, DEAD], JOIN_TIMEOUT_S + 1, False, [0]),
        ([WAITING, WORKING], JOIN_TIMEOUT_S + 1, False, [1]),
    ],
)
def test_the_next_generation_begins_when_every_rank_is_dead_or_waits(ranks, waited_s, go, kill):
    found = decide(dict(enumerate(ranks)), 1, waited_s)
    assert found == (go, frozenset(kill))
