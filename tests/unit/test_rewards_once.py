"""Rewards and filter run once for each accepted prompt group, wherever the role is killed."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rollout_parts import MEMBER, Host, ScriptedServing

from torchtitan_rl_ft.journal.ledger_report import LedgerReport
from torchtitan_rl_ft.journal.protocol import SAVE
from torchtitan_rl_ft.rollout.tasks.sorting import reward

STEPS, GROUPS, SAMPLES = 4, 3, 4
POINTS = {  # where the role is killed: (method, call, before or after it)
    "samples and rewards accepted": ("accept", GROUPS + 2, "after"),
    "batch made": ("seal", 2, "before"),
    "batch in the journal": ("seal", 2, "after"),
    "reply to the trainer lost": ("commit", 2, "after"),
}


class Hooks:
    """A reward and a filter that leave a file for each call; the filter's may be made once only."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def reward(self, prompt, response) -> Any:
        name = f"rewards-{prompt.epoch}-{prompt.index}"
        with open(self._folder / name, "a") as f:
            f.write(".")
        return reward(prompt, response)

    def keep(self, prompt, rewards) -> None:
        name = self._folder / f"filter-{prompt.epoch}-{prompt.index}"
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))


def killed_at(called: Callable[..., Any], call: int, when: str) -> Callable[..., Any]:
    """`called`, whose process is killed at its `call`-th call."""
    calls = 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        answer = called(*args, **kwargs)
        if calls == call and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return answer

    return watched


async def live(folder: Path, point: str | None, gc: bool) -> None:
    """One life of the role, with a trainer beside it; what is trained goes to trained.jsonl."""
    hooks, serving = Hooks(folder / "hooks"), ScriptedServing()
    host = Host(
        folder, serving, steps=STEPS, groups=GROUPS, reward=hooks.reward, group_filter=hooks.keep
    )
    if point is not None:
        method, call, when = POINTS[point]
        setattr(host.journal, method, killed_at(getattr(host.journal, method), call, when))
    running = asyncio.create_task(host.loop.run())
    host.publish()
    while host.journal.tip.step < STEPS:
        batch = await host.batch(20)
        ids, rewards = (batch.arrays[k].tolist() for k in ("group_ids", "rewards"))
        with open(folder / "trained.jsonl", "a") as f:
            f.write(json.dumps({"batch": batch.batch_id, "groups": ids, "rewards": rewards}) + "\n")
        await host.train()
        if gc:
            host.ledger.duty(MEMBER, SAVE, host.journal.tip)
            path = f"step-{host.journal.tip.step}"
            host.ledger.duty_done(MEMBER, SAVE, host.journal.tip, {"path": path})
    await asyncio.wait_for(running, 20)
    host.close()


def life(folder: Path, point: str | None, gc: bool) -> int:
    """In a process of its own; its exit code."""
    fork = multiprocessing.get_context("fork")
    process = fork.Process(target=lambda: asyncio.run(live(folder, point, gc)))
    process.start()
    process.join(60)
    assert process.exitcode is not None
    return process.exitcode


def trained(folder: Path) -> dict[int, dict[str, Any]]:
    lines = (folder / "trained.jsonl").read_text().splitlines()
    found = {}
    for line in map(json.loads, lines):
        assert found.setdefault(line["batch"], line) == line
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert life(folder, None, gc=False) == 0
    return trained(folder)


@pytest.mark.row("E4")
@pytest.mark.parametrize("gc", [True, False], ids=["batches freed", "batches kept"])
@pytest.mark.parametrize("point", POINTS)
def test_once_per_accepted_group(
    tmp_path: Path, undisturbed: dict[int, dict[str, Any]], point: str, gc: bool
) -> None:
    assert life(tmp_path, point, gc) == -signal.SIGKILL
    before = LedgerReport.of(tmp_path / "journal")
    assert before.audit.ok and len(before.audit.history) < STEPS
    assert life(tmp_path, None, gc) == 0

    report = LedgerReport.of(tmp_path / "journal")
    assert report.audit.ok and report.audit.counts["trained"] == STEPS * GROUPS
    assert trained(tmp_path) == undisturbed
    assert len(list((tmp_path / "hooks").glob("filter-*"))) == STEPS * GROUPS
    accepted = {g.group_id for g in before.groups if g.state != "pending"}
    for group in report.groups:
        calls = (tmp_path / "hooks" / f"rewards-{group.key.replace(':', '-')}").stat().st_size
        # One that was judged and not accepted before the kill is judged again.
        assert calls == SAMPLES or (group.group_id not in accepted and calls <= 2 * SAMPLES)
    groups = [g for batch in undisturbed.values() for g in set(batch["groups"])]
    assert len(groups) == len(set(groups)) == STEPS * GROUPS
