"""The watcher on real processes: it ends those that hang, shows their stacks, and no others."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.escalation import RestartLimits
from torchtitan_rl_ft.host.loop_beats import beating
from torchtitan_rl_ft.host.phase_file import PhaseRecord, records
from torchtitan_rl_ft.host.phase_limits import Limits
from torchtitan_rl_ft.observability.events import EventList, EventLog, Kind
from torchtitan_rl_ft.roles import inspector
from torchtitan_rl_ft.roles.job import role_specs
from torchtitan_rl_ft.roles.lifecycle import Action, Duty, after_exit
from torchtitan_rl_ft.roles.watcher import Lessons, Watcher
from torchtitan_rl_ft.rpc.server import make_app, start
from torchtitan_rl_ft.run_folder import TOKEN_ENV, RunFolder

FAKE = Path(__file__).parents[1] / "fakes" / "watched_rank.py"
LIMITS = Limits(
    default_s=2.0, silence_s=4.0, waiting_s={"waiting_for_batch": 600.0, "standby": 600.0}
)


class Rank:
    def __init__(self, folder: RunFolder, rank: int, manner: str) -> None:
        env = {**os.environ, "RANK": str(rank), "TORCHTITAN_RL_FT_REPLICA_ID": "1"}
        self.log = folder.path / f"{manner}.log"
        command = [sys.executable, str(FAKE), str(folder.phases), manner]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    async def returncode(self, timeout_s: float) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), timeout_s)


@pytest.fixture
def run(tmp_path):
    folder, ranks = RunFolder(tmp_path), []

    def start(*manners):
        ranks.extend(Rank(folder, i, manner) for i, manner in enumerate(manners))
        end = time.monotonic() + 40
        while not all(b"entered" in r.log.read_bytes() for r in ranks):
            assert time.monotonic() < end, [r.log.read_text() for r in ranks]
            time.sleep(0.02)
        return folder, ranks

    yield start
    for rank in ranks:
        rank.process.kill()
        rank.process.wait()


@pytest.mark.timeout(120)
async def test_what_hangs_is_ended_with_its_stacks_and_what_works_or_waits_is_not(run):
    folder, ranks = run("sleeps", "holds", "works", "waits", "waits")
    sleeps, holds, works, waits, stopped = ranks
    stopped.process.send_signal(signal.SIGSTOP)
    events = EventList()
    watcher = asyncio.create_task(Watcher(folder, events, LIMITS, interval_s=0.2).run())
    try:
        codes = [await r.returncode(60) for r in (sleeps, holds, stopped)]
    finally:
        watcher.cancel()
    assert codes == [-signal.SIGKILL] * 3
    assert works.process.poll() is None and waits.process.poll() is None
    assert "in main" in sleeps.log.read_text()
    assert "in hold_the_interpreter" in holds.log.read_text()  # though nothing in it could run
    told = {e["pid"]: e for e in events.events if e["phase"] == "wedged"}
    assert set(told) == {r.process.pid for r in (sleeps, holds, stopped)}
    assert told[sleeps.process.pid]["limit_of"] == "recovery.phase_timeout_s"
    assert "no sign of life" in told[stopped.process.pid]["cause"]
    assert told[stopped.process.pid]["in_phase"] == "waiting_for_batch"


async def test_a_watcher_that_was_held_up_itself_accuses_nobody(run):
    folder, (works,) = run("works")
    events = EventList()
    watcher = Watcher(folder, events, LIMITS, interval_s=0.2)
    task = asyncio.create_task(watcher.run())
    await asyncio.sleep(0.5)
    works.process.send_signal(signal.SIGSTOP)
    time.sleep(LIMITS.silence_s + 1)  # the loop of the watcher stands still as well
    works.process.send_signal(signal.SIGCONT)
    await asyncio.sleep(0.5)
    task.cancel()
    assert works.process.poll() is None and not events.events


async def test_only_the_group_that_it_is_told_to_is_looked_at(run):
    folder, (sleeps,) = run("sleeps")
    events = EventList()
    watcher = Watcher(folder, events, LIMITS, only="trainer-0")
    for _ in range(5):
        await watcher.look(10.0)
    assert sleeps.process.poll() is None and not events.events


async def test_an_event_loop_beats_while_it_runs(tmp_path):
    async with beating(tmp_path, "rollout"):
        (before,) = records(tmp_path)
        await asyncio.sleep(1.3)
        (after,) = records(tmp_path)
    assert after.marks > before.marks and after.name == "rollout"
    assert not list(tmp_path.iterdir())


def seen(longest_s, counts):
    fields = {"name": "trainer-0", "rank": "0", "pid": 1, "start_time": 1.0, "host": "h"}
    return PhaseRecord(**fields, phase="reduce", longest_s=longest_s, counts=counts)


def test_what_was_learned_is_used_by_the_next_start_of_the_same_layout(tmp_path):
    path = tmp_path / "phases" / "limits.json"
    lessons = Lessons(path, {"ranks": 2}, {"quorum": 300.0})
    lessons.observe(seen({"reduce": 3.0, "first_reduce": 9.0}, {"reduce": 5, "first_reduce": 1}))
    lessons.observe(
        seen({"reduce": 4.0, "quorum": 1.0}, {"reduce": 2, "quorum": 9})
    )  # another rank
    lessons.save(100.0)
    expected = {"reduce": 20.0, "first_reduce": 45.0}
    assert lessons.limits_s() == json.loads(path.read_text())["limits_s"] == expected
    again = Lessons(path, {"ranks": 2}, {"quorum": 300.0})
    assert again.limits_s() == expected
    again.was_too_short("reduce")
    again.save(101.0)
    assert Lessons(path, {"ranks": 2}, {}).limits_s()["reduce"] == 40.0
    assert Lessons(path, {"ranks": 4}, {}).limits_s() == {}
    whole = json.loads(path.read_text())
    for damaged in (
        "{",
        "[]",
        "null",
        json.dumps({**whole, "counts": None}),
        json.dumps({**whole, "longest_s": {"reduce": "long"}}),
        json.dumps({**whole, "counts": {"reduce": float("inf")}}),
    ):
        path.write_text(damaged)
        assert Lessons(path, {"ranks": 2}, {}).limits_s() == {}


@pytest_asyncio.fixture
async def ask(tmp_path, monkeypatch):
    """GET on an inspector of the run in `tmp_path`."""
    monkeypatch.setenv(TOKEN_ENV, "secret")
    resolved = resolve([f"--job.dump_folder={tmp_path}", "--fault_tolerance.enable"])
    url, runner = await start(make_app("secret", inspector.routes(resolved)))
    async with aiohttp.ClientSession() as http:

        async def get(path, token="secret"):
            headers = {"Authorization": f"Bearer {token}"}
            async with http.get(url + path, headers=headers) as answer:
                return answer.status, await answer.json()

        yield get
    await runner.cleanup()


@pytest.mark.timeout(120)
async def test_the_inspector_shows_phases_stacks_of_what_hangs_and_events(run, ask):
    folder, (holds, stopped) = run("holds", "waits")
    stopped.process.send_signal(signal.SIGSTOP)
    status, body = await ask("/v1/phases")
    assert status == 200
    ranks = {r["rank"]: r for r in body["ranks"]}
    assert ranks["trainer-1.0"]["phase"] == "reduce" and ranks["trainer-1.0"]["in_phase_s"] > 0
    assert ranks["trainer-1.0"]["limit_of"] == "recovery.phase_timeout_s"
    assert ranks["trainer-1.1"]["state"] == "stopped"
    status, body = await ask("/v1/stacks?rank=trainer-1.0")
    assert status == 200 and "in hold_the_interpreter" in body["stacks"], body
    assert holds.process.poll() is None
    status, body = await ask("/v1/stacks?rank=trainer-1.1")
    assert status == 409 and "is stopped" in body["error"]
    status, body = await ask("/v1/stacks?rank=supervisor")
    assert status == 404 and "trainer-1.0, trainer-1.1" in body["error"]
    events = EventLog(folder.events, run="r", role="trainer", name="trainer-1")
    for step in range(5):
        events.emit(Kind.PHASE, phase="reduce", step=step)
    events.close()
    status, body = await ask("/v1/events?last=2")
    assert [e["step"] for e in body["events"]] == [3, 4]
    assert (await ask("/v1/events?last=x"))[0] == 400
    assert (await ask("/v1/phases", token="wrong"))[0] == 401


def test_the_run_has_an_inspector_when_asked_and_goes_on_without_it(tmp_path):
    folder = RunFolder(tmp_path)
    sections = resolve([f"--job.dump_folder={tmp_path}", "--fault_tolerance.enable"]).sections
    assert "inspector" not in [s.name for s in role_specs(sections, folder)]
    sections.recovery.run_workload_inspector_server = True
    assert "inspector" in [s.name for s in role_specs(sections, folder)]
    limits = RestartLimits(max_restarts=1, window_s=100.0)
    times = {"ending": False, "now_s": 10.0, "limits": limits}
    assert after_exit(Duty.HELPER, 1, restarts_s=[], **times).action is Action.RESTART
    assert after_exit(Duty.HELPER, 1, restarts_s=[9.0], **times).action is Action.STOPPED
