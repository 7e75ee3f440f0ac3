"""The rollout loop over a real journal: modes, restarts, failures, ends."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from rollout_parts import MEMBER, Host, Running, ScriptedServing

from torchtitan_rl_ft.journal.errors import JournalWriteError
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rollout.generation import GenerationFailed, ServingUnavailable
from torchtitan_rl_ft.rollout.protocols import Prompt
from torchtitan_rl_ft.rollout.starvation import RolloutStalled, Starvation


async def settle() -> None:
    await asyncio.sleep(0.1)


async def test_sync_run_to_the_end(tmp_path):
    host = Host(tmp_path, ScriptedServing(), steps=3, eval_prompts=5)
    async with Running(host) as ended:
        await settle()
        assert host.serving.requests == []  # no policy, no generation
        host.publish()
        for step in range(1, 4):
            batch = await host.train()
            assert batch.n_samples == 12
            assert batch.meta["policy_version"] == step
            assert batch.meta["policy_age/mean"] == 0
            assert 0 < batch.meta["reward/mean"] < 1
        await asyncio.wait_for(ended, 5)
    assert host.ledger.outcome.kind == "done"
    evaluation = json.loads(host.eval_path.read_text())
    assert (evaluation["reward/mean"], evaluation["prompts"]) == (1.0, 5)
    assert evaluation["policy_version"] == 4 and evaluation["step"] == 3
    (event,) = host.kinds("eval")
    assert (event["reward"], event["prompts"], event["version"]) == (1.0, 5, 4)
    greedy = [r for r in host.serving.requests if r.request_id.startswith("eval")]
    assert all(r.n == 1 and r.sampling["temperature"] == 0 for r in greedy)


async def test_sync_does_not_generate_ahead(tmp_path):
    host = Host(tmp_path, ScriptedServing())
    async with Running(host):
        host.publish()
        await host.batch()
        await settle()
        assert len(host.serving.requests) == 3
        await host.train(publish=False)  # committed, not yet published
        await settle()
        assert len(host.serving.requests) == 3
        host.publish()
        assert (await host.batch()).meta["policy_version"] == 2


async def test_async_generates_ahead_within_the_age(tmp_path):
    host = Host(tmp_path, ScriptedServing(), mode="async", max_policy_age=2, steps=10)
    async with Running(host):
        host.publish()
        await host.batch()
        await settle()
        assert host.journal.sealed_ahead == 3  # ages 0, 1, 2
        ages = [host.journal.batch(i).meta["policy_age/max"] for i in (1, 2, 3)]
        assert ages == [0, 1, 2]
        await host.train()
        await settle()
        assert host.journal.sealed_ahead == 3
        assert host.journal.batch(4).meta["policy_age/max"] == 2


async def test_async_never_plans_beyond_the_last_step(tmp_path):
    host = Host(tmp_path, ScriptedServing(), mode="async", max_policy_age=5, steps=2)
    async with Running(host):
        host.publish()
        await host.batch()
        await settle()
        assert len(host.journal.plan) == 2 and len(host.serving.requests) == 6


async def test_semi_async_mixes_prefetched_and_fresh(tmp_path):
    host = Host(tmp_path, ScriptedServing(), mode="semi_async", max_policy_age=1, groups=4)
    async with Running(host):
        host.publish()
        first = await host.batch()
        assert first.meta["policy_age/mean"] == 0
        await settle()
        assert len(host.serving.requests) == 6  # 4, and the half of the next that may be old
        await host.train()
        second = await host.batch()
        assert second.meta["policy_age/mean"] == 0.5
        assert second.meta["min_version"] == 1 and second.meta["max_version"] == 2


@pytest.mark.row("D8")
async def test_too_old_groups_are_dropped_and_counted(tmp_path):
    serving = ScriptedServing()
    host = Host(tmp_path, serving, mode="async", max_policy_age=1, steps=10)
    slow = "group-4."
    gate = asyncio.Event()
    answer = serving.generate

    async def stalled(request, keep=None):
        found = await answer(request)
        if request.request_id.startswith(slow):
            await gate.wait()
        return found

    serving.generate = stalled
    async with Running(host):
        host.publish()
        for _ in range(3):
            await host.train()
        gate.set()
        await settle()
        drops = [e for e in host.kinds("drop") if "too old" in e["cause"]]
        assert [d["group"] for d in drops] == [4]
        metas = [(await host.train()).meta for _ in range(3)]
        assert sum(m["dropped_groups"] for m in metas) >= 1
        assert all(m["policy_age/max"] <= 1 for m in metas)
        counts = host.journal.counts()
        assert sum(counts["dropped"].values()) == 1


@pytest.mark.row("D8")
async def test_an_engine_that_stalls_now_and_then_makes_no_batch_too_old(tmp_path):
    """200 steps; every 20 steps one group takes 5 steps."""
    serving = ScriptedServing()
    steps, every, stall = 200, 20, 5
    host = Host(tmp_path, serving, mode="async", max_policy_age=1, steps=steps, durable=False)
    answer, trained, released = serving.generate, 0, asyncio.Event()
    stalled: dict[str, int] = {}

    async def generate(request, keep=None):
        nonlocal released
        found = await answer(request)
        if trained % every == every // 2 and trained not in stalled.values():
            stalled[request.request_id] = begun = trained
            while trained < begun + stall:
                await released.wait()
        return found

    serving.generate = generate
    async with Running(host) as ended:
        host.publish()
        metas = []
        for trained in range(1, steps + 1):  # noqa: B007  (read by `generate`)
            released.set()
            released = asyncio.Event()
            metas.append((await host.train()).meta)
            await asyncio.sleep(0.005)  # time for the step
        await asyncio.wait_for(ended, 5)
        counts = host.journal.counts()
    assert host.ledger.outcome.kind == "done"
    assert max(m["policy_age/max"] for m in metas) == 1
    drops = host.kinds("drop")
    assert {f"group-{d['group']}.0" for d in drops} >= set(stalled)
    assert len(stalled) >= steps // every - 2
    assert all("too old: policy age" in d["cause"] for d in drops)
    assert sum(m["dropped_groups"] for m in metas) == len(drops)
    assert sum(counts["dropped"].values()) == len(drops)


async def test_restart_reuses_accepted_and_rolls_out_pending(tmp_path):
    serving = ScriptedServing()
    serving.fail = lambda r: (
        None if r.request_id.startswith("group-1.") else ServingUnavailable("engine lost")
    )
    host = Host(tmp_path, serving)
    async with Running(host):
        host.publish()
        await settle()
        assert len(host.journal.accepted()) == 1 and len(host.journal.pending()) == 2
    again = ScriptedServing()
    again.served = serving.served
    host = Host(tmp_path, again)
    async with Running(host):
        batch = await host.batch()
    assert sorted(set(batch.arrays["group_ids"].tolist())) == [1, 2, 3]
    assert sorted(r.request_id for r in again.requests) == ["group-2.0", "group-3.0"]
    seeds = {r.request_id: r.seeds for r in serving.requests}
    assert all(r.seeds == seeds[r.request_id] for r in again.requests)


async def test_restart_continues_the_order_of_prompts(tmp_path):
    async def keys(folder, restart_after: set[int]) -> list[str]:
        serving = ScriptedServing()
        host = Host(folder, serving, steps=6)
        running = Running(host)
        await running.__aenter__()
        host.publish()
        for step in range(1, 6):
            await host.train()
            if step in restart_after:
                await running.__aexit__()
                host = Host(folder, serving, steps=6)
                running = Running(host)
                await running.__aenter__()
        await host.batch()
        rows = host.journal._db.all("SELECT key FROM groups ORDER BY id")
        await running.__aexit__()
        return [key for (key,) in rows]

    undisturbed = await keys(tmp_path / "a", set())
    assert await keys(tmp_path / "b", {1, 3, 4}) == undisturbed
    assert len(set(undisturbed)) == len(undisturbed) == 18


async def test_failing_prompt_is_dropped_with_a_reason(tmp_path):
    serving = ScriptedServing()
    serving.fail = lambda r: (
        GenerationFailed("status 400: no") if r.request_id.startswith("group-2.") else None
    )
    host = Host(tmp_path, serving, max_failures=2)
    async with Running(host):
        host.publish()
        batch = await host.batch()
    assert 2 not in batch.arrays["group_ids"] and batch.n_samples == 12
    (drop,) = host.kinds("drop")
    assert drop["cause"] == "generation failed 2 times, the last one: status 400: no"
    assert batch.meta["dropped_groups"] == 1
    assert sum(r.request_id.startswith("group-2.") for r in serving.requests) == 2


async def test_failing_reward_is_the_prompts_failure(tmp_path):
    def picky(prompt, response):
        if prompt.index % 2:
            raise RuntimeError("no verdict")
        return 1.0 if response.text == prompt.answer else 0.0

    host = Host(tmp_path, ScriptedServing(), reward=picky, max_failures=1)
    async with Running(host):
        host.publish()
        await host.batch()
    assert all("reward failed" in d["cause"] for d in host.kinds("drop"))


@pytest.mark.row("C10")
async def test_a_group_whose_task_crashed_is_rolled_out_again(tmp_path):
    serving = ScriptedServing()
    crashes = iter([ZeroDivisionError("once"), KeyError("twice")])
    serving.fail = lambda r: next(crashes, None) if r.request_id.startswith("group-2.") else None
    host = Host(tmp_path, serving)
    async with Running(host):
        host.publish()
        batch = await host.batch()
    assert 2 in batch.arrays["group_ids"]
    assert batch.n_samples == 12
    assert host.kinds("drop") == []
    first, second = [w["cause"] for w in host.kinds("warn")]
    assert first.startswith("group 2 crashed 1 times, the last one: ZeroDivisionError: once (")
    assert second.startswith("group 2 crashed 2 times, the last one: KeyError: 'twice' (")


@pytest.mark.row("C10")
async def test_a_group_that_always_crashes_is_dropped_and_no_other(tmp_path):
    serving = ScriptedServing()
    serving.fail = lambda r: KeyError("bug") if r.request_id.startswith("group-2.") else None
    host = Host(tmp_path, serving)
    async with Running(host):
        host.publish()
        batch = await host.batch()
    assert 2 not in batch.arrays["group_ids"]
    assert batch.n_samples == 12
    (drop,) = host.kinds("drop")
    assert drop["cause"].startswith("crashed 3 times, the last one: KeyError: 'bug' (")


async def test_unavailable_serving_costs_no_prompt(tmp_path):
    serving = ScriptedServing()
    down = True
    serving.fail = lambda r: ServingUnavailable("no engine serves") if down else None
    host = Host(tmp_path, serving, max_failures=1)
    async with Running(host):
        host.publish()
        await settle()
        assert host.loop.status()["trouble"] == "no engine serves"
        down = False
        await host.batch()
        assert host.loop.status()["trouble"] is None
    assert host.kinds("drop") == []


async def test_unavailable_serving_ends_the_role_in_time(tmp_path):
    serving = ScriptedServing()
    serving.fail = lambda r: ServingUnavailable("no engine serves")
    host = Host(tmp_path, serving, unavailable_limit_s=0.3)
    async with Running(host) as ended:
        host.publish()
        with pytest.raises(RolloutStalled, match="no engine serves"):
            await asyncio.wait_for(ended, 5)


async def test_all_prompts_dropped_ends_the_role(tmp_path):
    host = Host(tmp_path, ScriptedServing(), max_prompt_tokens=2)
    async with Running(host) as ended:
        host.publish()
        with pytest.raises(RolloutStalled, match="prompt too long: 3 tokens, at most 2"):
            await asyncio.wait_for(ended, 5)
    assert len(host.kinds("warn")) == 1


async def test_filter_drops_groups(tmp_path):
    seen = []

    def drop_first(prompt: Prompt, rewards) -> str | None:
        seen.append(prompt)
        return "not today" if len(seen) == 1 else None

    host = Host(tmp_path, ScriptedServing(), group_filter=drop_first)
    async with Running(host):
        host.publish()
        await host.batch()
    assert [d["cause"] for d in host.kinds("drop")] == ["filter: not today"]


async def test_batches_without_signal_warn_once(tmp_path):
    host = Host(tmp_path, ScriptedServing(), reward=lambda p, r: 0.5, steps=6)
    async with Running(host):
        host.publish()
        for _ in range(5):
            batch = await host.train()
            assert not batch.arrays["advantages"].any()
    (warning,) = host.kinds("warn")
    assert "without a signal" in warning["cause"]


def test_batches_without_signal_between_others_warn_once(tmp_path):
    events = EventList()
    starvation = Starvation(events, unavailable_limit_s=1.0, groups_per_step=1, mono_s=lambda: 0.0)
    for batches in (1, 3, 12):
        starvation.sealed(True)
        for _ in range(batches):
            starvation.sealed(False)
    assert [e["cause"].split(" without")[0] for e in events.events] == [
        "a batch",
        "10 batches in a row",
    ]


async def test_exhausted_source_is_a_clear_end(tmp_path):
    class Five:
        def __init__(self):
            self.given = 0

        def next(self, n):
            first, self.given = self.given, min(5, self.given + n)
            return [Prompt(f"{i}{i}>", f"{i}{i}", 0, i) for i in range(first, self.given)]

        def state_dict(self):
            return {"given": self.given}

        def load_state_dict(self, state):
            self.given = state["given"]

    host = Host(tmp_path, ScriptedServing(), source=Five())
    async with Running(host) as ended:
        host.publish()
        await host.train()
        with pytest.raises(RolloutStalled, match="no more prompts"):
            await asyncio.wait_for(ended, 5)


async def test_failing_source_is_a_clear_end(tmp_path, caplog):
    class Broken:
        def next(self, n):
            raise OSError("the data set is gone")

    host = Host(tmp_path, ScriptedServing(), source=Broken())
    async with Running(host) as ended:
        host.publish()
        with pytest.raises(RolloutStalled) as failure:
            await asyncio.wait_for(ended, 5)
    said = "the data source failed: OSError: the data set is gone (test_rollout_loop.py:"
    assert str(failure.value).startswith(said)
    assert 'raise OSError("the data set is gone")' in caplog.text  # the traceback, for the log


async def test_drain_accepts_what_is_in_flight(tmp_path):
    serving = ScriptedServing()
    serving.held = asyncio.Event()
    host = Host(tmp_path, serving)
    async with Running(host) as ended:
        host.publish()
        await settle()
        host.loop.drain("maintenance")
        await settle()
        assert host.ledger.outcome is None
        serving.held.set()
        await asyncio.wait_for(ended, 5)
        assert len(host.journal.accepted()) == 3
    assert (host.ledger.outcome.kind, host.ledger.outcome.reason) == ("drained", "maintenance")


async def test_drain_is_bounded(tmp_path):
    serving = ScriptedServing()
    serving.held = asyncio.Event()
    host = Host(tmp_path, serving)
    async with Running(host) as ended:
        host.publish()
        await settle()
        host.loop.drain("maintenance")
        await asyncio.wait_for(ended, 5)  # its limit is 2 s
        assert len(host.journal.pending()) == 3


@pytest.mark.row("H8")
async def test_asked_to_exit_it_starts_and_seals_nothing_and_journals_what_comes_in(tmp_path):
    serving = ScriptedServing()
    host = Host(tmp_path, serving, mode="async", max_policy_age=1, steps=10)
    async with Running(host) as ended:
        host.publish()
        await host.batch()
        await settle()
        tip = host.journal.tip
        host.ledger.attach(MEMBER)
        assert host.ledger.next_now(tip.step, MEMBER.uuid, tip.token)["status"] == "ready"
        serving.held = asyncio.Event()
        host.journal.drop_batch(host.journal.plan[2].batch_id, "to have some in flight")
        host.loop.wake()
        await settle()
        before = len(serving.requests)
        host.ledger.ask_exit("SIGTERM")
        serving.held.set()
        await settle()
        assert host.ledger.outcome is None, "a step is under way"
        assert len(serving.requests) == before
        assert (len(host.journal.plan), len(host.journal.accepted())) == (1, 3)
        await host.train(publish=False)
        await asyncio.wait_for(ended, 5)
        assert host.ledger.outcome.kind == "requeue"
        accepted = {g.group_id for g in host.journal.accepted()}
    again = Host(tmp_path, ScriptedServing(), mode="async", max_policy_age=1, steps=10)
    async with Running(again):
        again.publish()
        assert set((await again.batch()).arrays["group_ids"].tolist()) == accepted


@pytest.mark.row("F10")
async def test_a_role_that_is_killed_while_it_is_paused_stays_paused(tmp_path):
    """Queue and position are the journal's; another job on the folder starts again."""
    serving = ScriptedServing()
    serving.held = asyncio.Event()
    host = Host(tmp_path, serving)
    async with Running(host):
        host.publish()
        await settle()
        host.loop.drain("maintenance")
        asked, position = len(serving.requests), host.journal.cursor()
        queued = [g.key for g in host.journal.pending()]
    host = Host(tmp_path, serving)
    async with Running(host) as ended:
        await asyncio.wait_for(ended, 5)
        assert (host.ledger.outcome.kind, host.ledger.outcome.reason) == ("drained", "maintenance")
        assert len(serving.requests) == asked
        assert [g.key for g in host.journal.pending()] == queued and len(queued) == 3
    host = Host(tmp_path, serving, attempt="the next job")
    async with Running(host):
        serving.held.set()
        batch = await host.batch()
        assert sorted(set(batch.arrays["group_ids"].tolist())) == [1, 2, 3]
        assert host.journal.cursor() == position


async def test_full_disk_ends_the_loop(tmp_path, monkeypatch):
    def full(self, *args, **kwargs):
        raise JournalWriteError("cannot write the journal: No space left on device")

    host = Host(tmp_path, ScriptedServing())
    monkeypatch.setattr(Journal, "accept", full)
    async with Running(host) as ended:
        host.publish()
        with pytest.raises(JournalWriteError, match="No space left"):
            await asyncio.wait_for(ended, 5)


async def test_final_policy_must_be_served(tmp_path):
    host = Host(tmp_path, ScriptedServing(), steps=1)
    host.loop._settings = host.loop._settings.__class__(
        **{**vars(host.loop._settings), "final_policy_timeout_s": 0.2}
    )
    async with Running(host) as ended:
        host.publish()
        await host.train(publish=False)
        with pytest.raises(RolloutStalled, match="the policy of the last step"):
            await asyncio.wait_for(ended, 5)


async def test_rewind_makes_the_next_policy_count(tmp_path):
    """After a rewind nothing is rolled out by the policy of the superseded history."""
    host = Host(tmp_path, ScriptedServing(), steps=5)
    async with Running(host):
        host.publish()
        await host.train()
        await host.train()
        await host.batch()
        planned, asked = len(host.journal.plan), len(host.serving.requests)
        host.journal.rewind(1, reason="all holders died", member="uuid-0")
        await host.train(publish=False)  # step 2 again: another token than the served policy's
        await host.train(publish=False)  # step 3, sealed before the rewind
        await settle()
        assert len(host.journal.plan) == planned and len(host.serving.requests) == asked
        host.publish()
        batch = await host.batch()
        assert batch.meta["policy_age/max"] == 0
        assert np.isfinite(batch.arrays["logprobs"]).all()
