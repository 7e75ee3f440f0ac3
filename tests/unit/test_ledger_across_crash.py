"""A crash of trainers and rollout in the middle of asynchronous training: every prompt is accounted
for, what was finished is used without a new request, and nothing is trained twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest
from journal_cases import member
from rollout_parts import MEMBER, Host, ScriptedServing

from torchtitan_rl_ft.journal.database import FILE_NAME
from torchtitan_rl_ft.journal.ledger_report import LedgerReport
from torchtitan_rl_ft.journal.protocol import SAVE, State
from torchtitan_rl_ft.journal.records import Decision

GROUPS, STEPS, SAVED, KILLED = 6, 11, 3, 5
STALE = 8  # a prompt group that is slow until its policy is too old
LAST_ANSWERED = (KILLED + 1) * GROUPS + 1 + 2  # two beyond the sealed batches; one is dropped
SHAPE = {"mode": "async", "max_policy_age": 2, "groups": GROUPS, "steps": STEPS}


class SlowServing(ScriptedServing):
    """Groups for which `waits` is true get their answers only later."""

    def __init__(self) -> None:
        super().__init__()
        self.stale_waits, self.last_answered = True, LAST_ANSWERED

    def waits(self, group: int) -> bool:
        return group > self.last_answered or (group == STALE and self.stale_waits)

    async def generate(self, request, *args):
        answer = await super().generate(request, *args)
        while self.waits(group_of(request)):
            await asyncio.sleep(0.01)
        return answer


def group_of(request) -> int:
    return int(request.request_id.removeprefix("group-").split(".")[0])


async def until(condition, timeout_s: float = 20.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def crash(folder: Path, copy: Path) -> SlowServing:
    """Train up to step KILLED, whose policy is not published any more, and leave in `copy` what is
    on disk at that moment."""
    serving = SlowServing()
    host = Host(folder, serving, **SHAPE)
    running = asyncio.create_task(host.loop.run())
    host.publish()
    for step in range(1, KILLED):
        await host.train()
        if step == SAVED:
            host.ledger.duty(MEMBER, SAVE, host.journal.tip)
            host.ledger.duty_done(MEMBER, SAVE, host.journal.tip, {"path": "saved"})
    serving.stale_waits = False
    await until(lambda: host.journal.counts()["dropped"])
    await host.train(publish=False)
    await until(lambda: host.journal.sealed_ahead == 1 and len(host.journal.accepted()) == 2)
    await until(lambda: len(host.journal.pending()) == GROUPS - 2)
    shutil.copytree(folder, copy)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    host.close()
    return serving


async def go_on(folder: Path) -> tuple[Host, ScriptedServing]:
    """New processes: the trainer loads its checkpoint, rollout goes on, to the end."""
    serving = ScriptedServing()
    host = Host(folder, serving, **SHAPE)
    newcomer = member("newcomer")
    checkpoint = host.ledger.attach(newcomer).checkpoint
    assert checkpoint is not None and checkpoint.step == SAVED
    verdict = host.ledger.begin(
        newcomer,
        State(checkpoint.step, checkpoint.token),
        None,
        participants=1,
        quorum_id=1,
    )
    assert verdict.decision is Decision.GO
    running = asyncio.create_task(host.loop.run())
    host.publish()
    while host.journal.tip.step < STEPS:
        await host.train()
    await asyncio.wait_for(running, 10)
    host.close()
    return host, serving


@pytest.fixture
async def crashed(tmp_path: Path) -> tuple[Path, LedgerReport, SlowServing]:
    serving = await crash(tmp_path / "first", tmp_path / "crashed")
    return tmp_path / "crashed", LedgerReport.of(tmp_path / "crashed" / "journal"), serving


@pytest.mark.row("E11")
@pytest.mark.row("E6")
@pytest.mark.row("F10")
@pytest.mark.scenario("L-1")
async def test_every_prompt_is_accounted_for_across_a_crash(crashed) -> None:
    folder, before, serving = crashed
    states = Counter(g.state for g in before.groups)
    assert states == {
        "trained": KILLED * GROUPS,
        "sealed": GROUPS,  # finished, not trained
        "accepted": 2,
        "pending": GROUPS - 2,  # in flight
        "dropped": 1,
    }
    (stale,) = [g for g in before.groups if g.state == "dropped"]
    assert stale.group_id == STALE and "too old" in stale.reason

    _, again = await go_on(folder)
    after = LedgerReport.of(folder / "journal")
    assert after.audit.problems == []
    assert after.audit.counts == {
        "pending": 0,
        "accepted": 0,
        "sealed": 0,
        "trained": STEPS * GROUPS,
        "dropped": 1,
    }
    # What was trained and lost is trained again from the same sealed batches.
    assert [(s.step, s.to_step) for s in after.superseded] == [(4, SAVED), (5, SAVED)]
    digests = [c.digest for c in after.audit.history]
    assert digests[:KILLED] == [c.digest for c in before.audit.history]
    # No request for what was finished; one more for what was in flight; one for the rest.
    in_flight = {g.group_id for g in before.groups if g.state == "pending"}
    known = {g.group_id for g in before.groups} - in_flight
    asked = Counter(group_of(r) for r in again.requests)
    assert not set(asked) & known and set(asked.values()) == {1}
    assert in_flight <= set(asked)
    assert Counter(group_of(r) for r in serving.requests)[STALE] == 1


def contents(journal: Path, copy: Path) -> list[str]:
    """All rows, of a copy: reading must not touch what was left by the crash."""
    shutil.copytree(journal, copy)
    with contextlib.closing(sqlite3.connect(copy / FILE_NAME)) as db:
        return list(db.iterdump())


@pytest.mark.scenario("L-1")
async def test_a_record_that_was_cut_is_left_out_and_the_rest_counts(
    crashed, tmp_path: Path
) -> None:
    folder, before, _ = crashed
    whole = contents(folder / "journal", tmp_path / "whole")
    log = folder / "journal" / f"{FILE_NAME}-wal"
    os.truncate(log, log.stat().st_size - 100)
    assert contents(folder / "journal", tmp_path / "cut") != whole, "the last record is gone"
    cut = LedgerReport.of(folder / "journal")
    assert cut.audit.problems == []
    assert [c.digest for c in cut.audit.history] == [c.digest for c in before.audit.history][
        : len(cut.audit.history)
    ]
    await go_on(folder)
    after = LedgerReport.of(folder / "journal")
    assert after.audit.ok and after.audit.counts["trained"] == STEPS * GROUPS


@pytest.mark.scenario("L-1")
async def test_reading_the_journal_again_and_again_changes_nothing(crashed) -> None:
    folder, before, _ = crashed
    told = json.dumps(before.to_json())
    for _ in range(2):
        Host(folder, ScriptedServing(), **SHAPE).close()
        assert json.dumps(LedgerReport.of(folder / "journal").to_json()) == told
