"""Whose a session is: attach, detach, admission, orphans, time to live."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import signal
import socket
import subprocess

import pytest
from aiohttp.test_utils import TestClient, TestServer

from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.rpc.server import make_app
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.admission import Admission
from torchtitan_rl_ft.serving.health_times import HealthTimes
from torchtitan_rl_ft.serving.ownership import Claim, NotOwner, Ownership, why_not_attached
from torchtitan_rl_ft.serving.session_routes import SessionRoutes
from torchtitan_rl_ft.session_folder import (
    Owner,
    ServingAt,
    SessionBusy,
    SessionFolder,
    SessionRecord,
    SessionUnreadable,
    Trainer,
)

FROZEN = {"rl.seed": 0, "rollout.engines": 2}
HERE = socket.gethostname()
HEALTH = HealthTimes(1.0, 2.0, 3.0, 2)


def owner(attempt: str, pid: int = 1, host: str = HERE) -> Owner:
    return Owner(pid, 1.0, host, attempt, f"/runs/{attempt}")


def claim(attempt: str, *, ttl_s: float = 60.0, **changed: object) -> Claim:
    return Claim(owner(attempt), "s", "rule", {**FROZEN, **changed}, ttl_s, HEALTH)


SERVING = ServingAt(os.getpid(), ProcessId.current().start_time, HERE, "", "")


class Life:
    """Who is alive, by attempt or name; True unless said otherwise."""

    def __init__(self) -> None:
        self.of: dict[str, bool | None] = {}

    def __call__(self, process) -> bool | None:
        key = getattr(process, "attempt", "serving")
        return self.of.get(key, True)


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def folder(tmp_path) -> SessionFolder:
    return SessionFolder("s", tmp_path)


async def opened(folder: SessionFolder, attempt: str = "a", **more):
    """(ownership, admission, life, events, clock) of a session that `attempt` owns."""
    admission, life, events, clock = Admission(), Life(), EventList(), Clock()
    ownership = Ownership(folder, events, admission, alive=life, clock_boot_s=clock)
    await ownership.open(claim(attempt, **more), SERVING, by_hand=False)
    return ownership, admission, life, events, clock


# Fencing --------------------------------------------------------------------------------------


def record(**changed) -> SessionRecord:
    return dataclasses.replace(
        SessionRecord("s", "rule", SERVING, owner("old"), frozen=dict(FROZEN)), **changed
    )


@pytest.mark.row("F3")
@pytest.mark.parametrize(
    ("before", "alive", "asked", "says"),
    [
        (None, {}, claim("new"), None),
        (record(owner=None), {}, claim("new"), None),
        (record(), {"old": False}, claim("new"), None),
        (record(), {"old": True}, claim("new"), "which is alive"),
        (record(), {"old": None}, claim("new"), "cannot be told"),
        (record(), {"old": True}, claim("old"), None),  # its own, asked again
        (record(owner=None), {}, claim("new", **{"rl.seed": 1}), "rl.seed was 0, is 1"),
        (record(owner=None, by_hand=True), {}, claim("new"), "started by hand"),
        (record(owner=None, by_hand=True), {"serving": False}, claim("new"), None),
        (record(id="t"), {}, claim("new"), "session t, not s"),
        (record(owner=None), {"serving": None}, claim("new"), "end it there"),  # another host's
        (record(owner=None), {"serving": False}, claim("new"), None),
    ],
)
def test_who_may_attach(before, alive, asked, says):
    life = Life()
    life.of = alive
    reason = why_not_attached(before, asked, life)
    assert reason is None if says is None else says in reason


@pytest.mark.row("A4")
def test_a_refusal_names_the_field_alone_and_how_to_mend_it():
    reason = why_not_attached(record(owner=None), claim("new", **{"custom.key": "x"}))
    assert 'custom.key = "x" is new' in reason
    assert "rl.seed" not in reason and "torchtitan stop s" in reason


@pytest.mark.row("F3")
async def test_two_successors_race_and_one_wins(folder):
    ownership, _, life, _, _ = await opened(folder)
    life.of["a"] = False
    names = [f"new-{i}" for i in range(8)]
    results = await asyncio.gather(
        *(ownership.attach(claim(n)) for n in names), return_exceptions=True
    )
    assert [type(r) for r in results].count(NotOwner) == len(names) - 1
    winner = names[results.index(None)]
    assert ownership.record.owner.attempt == winner
    assert folder.read().owner.attempt == winner  # the durable form says the same


@pytest.mark.row("F4")
async def test_a_late_detach_changes_nothing_and_ones_own_may_be_repeated(folder):
    ownership, _, life, _, _ = await opened(folder)
    life.of["a"] = False
    await ownership.attach(claim("b"))
    before = ownership.record
    with pytest.raises(NotOwner, match="/runs/b"):
        await ownership.detach("a")
    assert ownership.record is before
    await ownership.detach("b")
    let_go = ownership.record
    await ownership.detach("b")  # the reply was lost
    assert ownership.record is let_go and let_go.owner is None
    with pytest.raises(NotOwner):
        await ownership.detach("a")


async def test_attaching_again_is_harmless(folder):
    ownership, admission, _, events, _ = await opened(folder)
    await ownership.published("a")
    await ownership.attach(claim("a"))
    assert admission.closed is None and ownership.record.published
    assert [e["phase"] for e in events.events if e["kind"] is Kind.SESSION] == ["attach"]


# Admission ------------------------------------------------------------------------------------


@pytest.mark.row("D7")
async def test_admission_opens_with_the_first_publish_of_each_owner(folder):
    ownership, admission, life, _, _ = await opened(folder)
    assert "not published" in admission.closed and ownership.awaits_publish == "a"
    waiting = asyncio.create_task(admission.opened(10.0))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    await ownership.published("a")
    assert await waiting and ownership.awaits_publish is None

    life.of["a"] = False
    await ownership.attach(claim("b"))
    assert not await admission.opened(0.01) and ownership.awaits_publish == "b"
    await ownership.detach("b")
    assert "no job" in admission.closed and ownership.awaits_publish is None
    await ownership.published("b")  # late, of nobody
    assert admission.closed


@pytest.mark.row("D7")
async def test_a_late_publish_of_the_former_job_opens_nothing_for_its_successor(folder):
    """It was let in while its job was the owner, and engines took their time."""
    ownership, admission, life, _, _ = await opened(folder)
    life.of["a"] = False
    await ownership.attach(claim("b"))
    await ownership.published("a")
    assert admission.closed and ownership.awaits_publish == "b"
    await ownership.published("b")
    assert admission.closed is None


@pytest.mark.row("D7")
async def test_policies_of_a_former_job_are_refused(folder):
    ownership, _, life, _, _ = await opened(folder)
    life.of["a"] = False
    await ownership.attach(claim("b"))
    with pytest.raises(NotOwner):
        ownership.check_publisher("a")
    ownership.check_publisher("b")


async def test_a_role_by_hand_fences_nobody(folder):
    ownership, admission, life, _, _ = await opened(folder)
    life.of["a"] = False
    again = Ownership(folder, EventList(), admission, alive=life)
    changed = claim("me", **{"rollout.engines": 1})
    await again.open(changed, SERVING, by_hand=True)
    assert admission.closed is None
    assert again.record.owner is None and again.record.by_hand


# A serving role that is started again ----------------------------------------------------------


@pytest.mark.row("D2")
async def test_a_restarted_serving_keeps_the_owner_and_what_it_has_published(folder):
    ownership, _, life, _, _ = await opened(folder)
    await ownership.published("a")
    trainer = Trainer(1, 1.0, HERE, "a", "trainer-0.0")
    await ownership.register(trainer)
    admission = Admission()
    again = Ownership(folder, EventList(), admission, alive=life)
    assert await again.open(claim("a"), SERVING, by_hand=False) == "/runs/a"
    assert admission.closed is None and again.record.trainers == (trainer,)

    life.of["a"] = False
    third = Ownership(folder, EventList(), admission, alive=life)
    assert await third.open(claim("b"), SERVING, by_hand=False) == "/runs/a"
    assert admission.closed and third.record.owner.attempt == "b"


async def test_a_session_is_served_once(folder):
    with folder.serving_lock(), pytest.raises(SessionBusy), folder.serving_lock():
        pass
    with folder.serving_lock():
        pass


async def test_a_lock_that_is_just_being_removed_is_nobodys(folder, monkeypatch):
    """Its holder lets go of the session: who holds a file that nobody finds holds nothing."""
    flock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        folder.remove()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    with pytest.raises(SessionBusy, match="just being removed"), folder.serving_lock():
        pass
    monkeypatch.undo()
    with folder.serving_lock():
        assert folder.path.is_dir()


@pytest.mark.row("F3")
async def test_an_unreadable_record_is_nobodys_to_take(folder):
    folder.path.mkdir(exist_ok=True)
    folder.record_file.write_text('{"format": 99}')
    ownership = Ownership(folder, EventList(), Admission())
    with pytest.raises(SessionUnreadable, match=r"session\.json"):
        await ownership.open(claim("a"), SERVING, by_hand=False)
    assert folder.record_file.read_text() == '{"format": 99}'


# Time -----------------------------------------------------------------------------------------


async def test_the_retention_ends(folder):
    ownership, _, _, _, clock = await opened(folder, ttl_s=60.0)
    await ownership.detach("a")
    assert ownership.status()["ttl_left_s"] == 60.0
    clock.now_s += 59.9
    watching = asyncio.create_task(ownership.watch())
    await asyncio.sleep(0.02)
    assert not watching.done()
    clock.now_s += 0.1
    assert "60 s (retain_ttl)" in await asyncio.wait_for(watching, 5.0)


async def test_a_job_that_comes_back_in_time_stops_the_clock(folder):
    ownership, _, _, _, clock = await opened(folder, ttl_s=0.3)
    await ownership.detach("a")
    watching = asyncio.create_task(ownership.watch())
    await asyncio.sleep(0.01)
    me = dataclasses.replace(
        claim("b", ttl_s=0.3), owner=Owner(SERVING.pid, SERVING.start_time, HERE, "b", "/b")
    )
    await ownership.attach(me)
    clock.now_s += 100
    await asyncio.sleep(0.5)
    assert not watching.done()
    watching.cancel()


# Processes ------------------------------------------------------------------------------------


@pytest.fixture
def sleeper():
    started = []

    def start() -> subprocess.Popen:
        started.append(subprocess.Popen(["sleep", "600"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def process_of(started: subprocess.Popen) -> tuple[int, float, str]:
    me = ProcessId.of(started.pid)
    return me.pid, me.start_time, HERE


@pytest.mark.row("F7")
async def test_the_death_of_the_owner_is_noticed_and_its_trainers_are_ended(folder, sleeper):
    """Not a process with a recorded pid that has begun at another time."""
    supervisor, orphan, decoy = sleeper(), sleeper(), sleeper()
    admission, events = Admission(), EventList()
    ownership = Ownership(folder, events, admission)
    mine = Owner(*process_of(supervisor), "a", "/runs/a")
    await ownership.open(dataclasses.replace(claim("a"), owner=mine), SERVING, by_hand=False)
    await ownership.published("a")
    await ownership.register(Trainer(*process_of(orphan), "a", "trainer-0.0"))
    pid, start_time, host = process_of(decoy)
    await ownership.register(Trainer(pid, start_time - 5.0, host, "a", "trainer-1.0"))
    stranger = Trainer(pid, start_time, host, "b", "trainer-2.0")
    with pytest.raises(NotOwner):
        await ownership.register(stranger)

    watching = asyncio.create_task(ownership.watch())
    await asyncio.sleep(0.05)
    supervisor.send_signal(signal.SIGKILL)
    await asyncio.to_thread(orphan.wait, 5.0)
    assert orphan.returncode == -signal.SIGKILL and decoy.poll() is None
    assert ownership.record.owner is None and "no job" in admission.closed
    assert not watching.done()  # kept, for its time
    while not (ended := [e["cause"] for e in events.events if e["kind"] is Kind.WARN]):
        await asyncio.sleep(0.02)
    watching.cancel()
    assert ended == [f"ended trainer-0.0 (process {orphan.pid}): its job is gone"]


@pytest.mark.row("F7")
async def test_orphans_of_a_dead_job_are_ended_when_another_attaches(folder, sleeper):
    supervisor, orphan = sleeper(), sleeper()
    ownership = Ownership(folder, EventList(), Admission())
    mine = Owner(*process_of(supervisor), "a", "/runs/a")
    await ownership.open(dataclasses.replace(claim("a"), owner=mine), SERVING, by_hand=False)
    await ownership.register(Trainer(*process_of(orphan), "a", "trainer-0.0"))
    supervisor.kill()
    supervisor.wait()
    await ownership.attach(claim("b"))
    assert await asyncio.to_thread(orphan.wait, 5.0) == -signal.SIGKILL


async def test_what_a_job_has_borrowed_is_taken_back_after_its_trainers_have_ended(folder, sleeper):
    orphan, heard = sleeper(), []
    ownership, _, life, _, _ = await opened(folder)
    life.of = {"a": True}
    await ownership.register(Trainer(*process_of(orphan), "a", "trainer-0.0"))

    async def handed_over(attempt: str) -> None:
        heard.append((attempt, orphan.poll()))

    ownership.on_handover = handed_over
    assert ownership.borrower("a") == ownership.borrower(None) == "a"
    with pytest.raises(NotOwner, match="not to the sender's job"):
        ownership.borrower("b")
    await ownership.attach(claim("a"))  # again: nothing
    await ownership.detach("a")
    with pytest.raises(NotOwner, match="belongs to no job"):
        ownership.borrower(None)
    await ownership.attach(claim("b"))
    assert heard == [("", -signal.SIGKILL), ("b", -signal.SIGKILL)]


# Routes ---------------------------------------------------------------------------------------


async def test_routes(folder):
    ownership, _, life, _, _ = await opened(folder)
    moved, disposed = [], []

    async def serve(claim: Claim) -> None:
        assert claim.health == HEALTH
        moved.append(claim.owner.run_folder)

    async def dispose() -> None:
        disposed.append(True)

    routes = SessionRoutes(ownership, lambda: 2, lambda: 7, serve, dispose)
    headers = {"Authorization": "Bearer t"}
    async with TestClient(TestServer(make_app("t", routes.table())), headers=headers) as client:

        async def post(path: str, body: object) -> tuple[int, dict]:
            async with client.post(path, json=body) as answer:
                return answer.status, await answer.json()

        new = dataclasses.asdict(claim("b"))
        status, answer = await post("/v1/attach", new)
        assert status == 409 and "which is alive" in answer["error"] and moved == []
        life.of["a"] = False
        assert await post("/v1/attach", new) == (200, {"version": 7, "engines": 2})
        assert moved == ["/runs/b"]
        assert (await post("/v1/attach", {"session": "s"}))[0] == 400
        assert (await post("/v1/attach", [1]))[0] == 400

        trainer = {"attempt": "b", "name": "t", "pid": 1, "start_time": 1.0, "host": "elsewhere"}
        assert await post("/v1/trainers", trainer) == (200, {})
        assert (await post("/v1/trainers", {**trainer, "attempt": "a"}))[0] == 409
        assert (await post("/v1/trainers", {"attempt": "b"}))[0] == 400

        for outcome in ("retain", "dispose"):
            body = {"attempt": "a", "outcome": outcome}
            assert (await post("/v1/detach", body))[0] == 409
        assert (await post("/v1/detach", {"attempt": "b", "outcome": "?"}))[0] == 400
        assert await post("/v1/detach", {"attempt": "b", "outcome": "retain"}) == (200, {})
        assert await post("/v1/detach", {"attempt": "b", "outcome": "dispose"}) == (200, {})
        assert disposed == [True]
