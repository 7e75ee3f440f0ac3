"""A fault that is told twice is one."""

import pytest

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.observability.fault_count import FaultCount

KILLED = (Kind.EXIT, "fault", "trainer-0", "killed by SIGKILL")
BROKEN = (Kind.FAULT, None, "engine-0", "a broken connection")
ENDED = (Kind.EXIT, "fault", "engine-0", "a broken connection")


@pytest.mark.parametrize(
    ("told", "faults"),
    [
        ([KILLED], 1),
        ([KILLED, KILLED], 2),
        ([BROKEN, ENDED], 1),
        ([BROKEN, (Kind.EXIT, "fault", "engine-0", "exit code 1")], 2),
        ([(Kind.FAULT, "wedged", "trainer-0", "no sign of life"), KILLED], 1),
        ([(Kind.FAULT, "wedged", "trainer-0", "no sign of life"), KILLED, KILLED], 2),
        (
            [
                (Kind.FAULT, "wedged", "trainer-0", "no sign of life"),
                (Kind.RESTART, "in_process", "trainer-0", "a rank was killed"),
                KILLED,
            ],
            2,
        ),
        ([(Kind.EXIT, "finished", "trainer-0", "exit code 0")], 0),
    ],
)
def test_how_many_faults_were_there(told, faults):
    count = FaultCount()
    assert sum(count.begins(*one) for one in told) == faults
