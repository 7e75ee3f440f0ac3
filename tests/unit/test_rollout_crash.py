"""Everything is killed in the middle of an asynchronous run: what becomes of each prompt."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from pathlib import Path

import pytest
from rollout_parts import Host, ScriptedServing

from torchtitan_rl_ft.journal.audit import audit
from torchtitan_rl_ft.journal.database import FILE_NAME
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList

GROUPS, STEPS, KILLED_AT, SLOW = 4, 16, 5, 6
SETTINGS = {"mode": "async", "max_policy_age": 2, "groups": GROUPS, "steps": STEPS}


class Counting(ScriptedServing):
    """Counts requests by prompt; the group `SLOW` is answered late."""

    def __init__(self) -> None:
        super().__init__()
        self.by_prompt: Counter[tuple[int, ...]] = Counter()
        self.released = asyncio.Event()

    async def generate(self, request, keep=None):
        self.by_prompt[tuple(request.seeds)] += 1
        found = await super().generate(request)
        if request.request_id == f"group-{SLOW}.0":
            await self.released.wait()
        return found


async def until(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


def in_flight(host: Host) -> int:
    return host.loop.status()["in_flight"]


@pytest.mark.row("E2")
@pytest.mark.row("F10")
@pytest.mark.scenario("L-1")
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "last record cut"])
async def test_every_prompt_is_accounted_for_once(tmp_path: Path, cut: bool) -> None:
    serving = Counting()
    host = Host(tmp_path / "first", serving, **SETTINGS)
    running = asyncio.create_task(host.loop.run())
    host.publish()
    for step in range(1, KILLED_AT + 1):
        await host.batch()
        if step == 4:
            serving.released.set()  # rolled out by version 1: too old for what comes
            await until(lambda: host.kinds("drop"))
        if step == KILLED_AT:
            await until(
                lambda: host.journal.sealed_ahead == 3 and not host.loop.status()["in_flight"]
            )
            serving.held = asyncio.Event()
        await host.train()
    await until(lambda: in_flight(host) == GROUPS)
    assert host.journal.sealed_ahead * GROUPS == 8
    counts = host.journal.counts()
    assert (counts["pending"], counts["accepted"]) == (GROUPS, 0)
    finished = {g for b in host.journal.plan.values() for g in host.journal.prompts(b.batch_id)}
    pending = {g.key for g in host.journal.pending()}
    # As SIGKILL leaves it: the write-ahead log is not folded into the database.
    shutil.copytree(tmp_path / "first" / "journal", tmp_path / "second" / "journal")
    running.cancel()
    await asyncio.wait({running})
    host.close()
    if cut:  # the last record issued what is in flight
        wal = tmp_path / "second" / "journal" / f"{FILE_NAME}-wal"
        wal.write_bytes(wal.read_bytes()[:-1000])

    for _ in range(2):  # replaying it twice changes nothing
        with Journal.open(tmp_path / "second" / "journal", events=EventList()) as journal:
            assert {g.key for g in journal.pending()} == (set() if cut else pending)
            assert journal.sealed_ahead == 2
    asked = serving.by_prompt.copy()
    serving.held = None
    host = Host(tmp_path / "second", serving, **SETTINGS)
    running = asyncio.create_task(host.loop.run())
    for _ in range(KILLED_AT + 1, STEPS + 1):
        batch = await host.train()
        assert batch.meta["policy_age/max"] <= 2
    await until(running.done)
    again = [n for n in serving.by_prompt.values() if n > 1]
    assert again == [2] * GROUPS  # those in flight, once more
    assert sum((serving.by_prompt - asked).values()) == STEPS * GROUPS - len(finished)
    reasons = host.journal.counts()["dropped"]
    assert list(reasons.values()) == [1] and "too old" in next(iter(reasons))
    host.close()
    found = audit(tmp_path / "second" / "journal")
    assert found.problems == [] and len(found.history) == STEPS
    trained = found.counts["trained"]
    assert trained == STEPS * GROUPS == 64


def paused_with(host: Host) -> int | None:
    """Groups that are accepted or sealed and not trained, once nothing more is asked for."""
    if host.loop.status()["phase"] != "waiting_for_trainers" or in_flight(host):
        return None
    counts = host.journal.counts()
    return counts["accepted"] + counts["sealed"]


@pytest.mark.row("M2")
@pytest.mark.row("F10")
@pytest.mark.parametrize(("mode", "stock"), [("async", 12), ("semi_async", 8)])
async def test_without_trainers_it_goes_to_the_bound_and_stays_there(
    tmp_path: Path, mode: str, stock: int
) -> None:
    """Also a role that starts in that state; and what it kept is trained, in time."""
    serving, settings = Counting(), {**SETTINGS, "mode": mode}
    serving.released.set()
    host = Host(tmp_path, serving, **settings)
    running = asyncio.create_task(host.loop.run())
    host.publish()
    for _ in range(2):
        await host.train()
    for _ in range(2):
        await until(lambda host=host: paused_with(host) == stock)
        await asyncio.sleep(0.1)  # it would ask at once
        assert paused_with(host) == stock
        running.cancel()
        await asyncio.wait({running})
        host.close()
        host = Host(tmp_path, serving, **settings)
        running = asyncio.create_task(host.loop.run())
    assert sum(serving.by_prompt.values()) == 2 * GROUPS + stock
    for _ in range(3, STEPS + 1):
        assert (await host.train()).meta["policy_age/max"] <= 2
    await until(running.done)
    assert set(serving.by_prompt.values()) == {1} and len(serving.by_prompt) == STEPS * GROUPS
    assert not host.journal.counts()["dropped"]
    host.close()
