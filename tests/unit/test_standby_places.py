"""Borrowed places of standby trainers, and what `check` says of standby keys."""

import asyncio
import os
from socket import gethostname

import pytest

from torchtitan_rl_ft.config.checks import check
from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.config.rules.job import Machine
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.roles.loans import BorrowedPlaces
from torchtitan_rl_ft.roles.standby import NoPlace, Standbys
from torchtitan_rl_ft.rpc.client import RoleRefused, RoleUnreachable
from torchtitan_rl_ft.run_folder import RoleAddress, RunFolder

pytestmark = pytest.mark.row("M3")


class Serving:
    """Lends slot 1; answers are replaced by errors by a test."""

    def __init__(self, devices=()):
        self.asked, self.devices = [], list(devices)
        self.errors = {}

    def post(self, path, body, *, deadline_s):
        self.asked.append((path, body))
        if path in self.errors:
            raise self.errors[path]
        return {"slot": 1, "devices": self.devices} if path == "/v1/lend" else {}

    @property
    def paths(self):
        return [path for path, _ in self.asked]


def places(serving, ranks=1):
    events = EventList()
    return BorrowedPlaces(serving, "attempt-a", ranks, events), events


def test_a_place_without_devices_is_returned_at_the_first_commit():
    serving = Serving()
    borrowed, _ = places(serving)
    assert asyncio.run(borrowed.take("trainer-1")) is None
    path, body = serving.asked[0]
    assert path == "/v1/lend"
    assert (body["borrower"], body["attempt"]) == ("trainer-1", "attempt-a")
    asyncio.run(borrowed.settle("trainer-1"))
    assert serving.asked[1] == ("/v1/return", {"slot": 1, "attempt": "attempt-a"})
    asyncio.run(borrowed.settle("trainer-1"))
    assert serving.paths == ["/v1/lend", "/v1/return"]


def test_devices_stay_with_the_process_on_them_and_are_returned_at_its_end():
    serving = Serving([4, 5])
    borrowed, _ = places(serving, ranks=2)
    assert asyncio.run(borrowed.take("trainer-1")) == [4, 5]
    asyncio.run(borrowed.settle("trainer-1"))
    assert serving.paths == ["/v1/lend"]
    with pytest.raises(NoPlace, match="its own"):
        asyncio.run(borrowed.take("trainer-1"))
    assert serving.paths == ["/v1/lend", "/v1/return"]


def test_a_place_that_is_too_small_is_returned_at_once():
    serving = Serving([4])
    borrowed, _ = places(serving, ranks=2)
    with pytest.raises(NoPlace, match="a group takes 2"):
        asyncio.run(borrowed.take("trainer-0"))
    assert serving.paths == ["/v1/lend", "/v1/return"]


@pytest.mark.parametrize("error", [RoleRefused(409, "min_engines"), RoleUnreachable("no answer")])
def test_no_engine_to_spare_is_no_place(error):
    serving = Serving()
    serving.errors["/v1/lend"] = error
    borrowed, _ = places(serving)
    with pytest.raises(NoPlace, match="no engine's place"):
        asyncio.run(borrowed.take("trainer-0"))


def test_a_return_that_fails_is_told_and_tried_again_when_the_group_is_lost_again():
    serving = Serving()
    borrowed, events = places(serving)
    asyncio.run(borrowed.take("trainer-0"))
    serving.errors["/v1/return"] = RoleUnreachable("no answer")
    asyncio.run(borrowed.settle("trainer-0"))
    assert [e["kind"] for e in events.events] == [Kind.WARN]
    serving.errors.clear()
    with pytest.raises(NoPlace):
        asyncio.run(borrowed.take("trainer-0"))
    assert serving.paths[-1] == "/v1/return"


@pytest.mark.parametrize("devices", [[], [4]])
def test_a_standby_that_dies_before_it_comes_leaves_no_place_borrowed(
    tmp_path, monkeypatch, devices
):
    monkeypatch.setenv("TORCHTITAN_RL_FT_TOKEN", "t")
    serving = Serving(devices)
    borrowed, events = places(serving)
    folder = RunFolder(tmp_path)

    async def lose_both() -> object:
        child = process.spawn(["sleep", "60"], log=tmp_path / "log", env=dict(os.environ))
        standbys = Standbys(folder, events, borrowed)
        standbys.started("standby-0", 1, child)
        closed = "http://127.0.0.1:9"
        folder.announce(
            RoleAddress("standby-0", closed, child.pid, child.id.start_time, 1, gethostname())
        )
        promoted = await standbys.promote("trainer-1", "killed by SIGKILL")
        await child.wait()
        return promoted

    assert asyncio.run(lose_both()) is None
    assert serving.paths == ["/v1/lend", "/v1/return"]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--recovery.standby=spare", "--recovery.standby_groups=0"], "must be positive"),
        (["--recovery.standby=spare", "--rollout.debug_mode=rollout_only"], "nobody trains"),
        (["--recovery.standby=spare", "--rollout.placement=colocated"], "colocated trainers"),
        (["--recovery.standby=from_rollout", "--rollout.min_engines=2"], "is lent only while"),
        (["--recovery.standby=from_rollout", "--rollout.debug_mode=train_only"], "no engines in"),
        (["--recovery.standby=spare"], None),
        (["--recovery.standby=from_rollout"], None),
    ],
)
def test_what_does_not_fit_a_standby_is_refused(tmp_path, flags, problem):
    flags = [f"--job.dump_folder={tmp_path}", "--rollout.engines=2", *flags]
    problems = check(resolve(flags), Machine(has_module=lambda _: True)).problems
    found = [p for p in problems if "standby" in p]
    assert bool(found) == (problem is not None)
    assert problem is None or any(problem in p for p in found), found
