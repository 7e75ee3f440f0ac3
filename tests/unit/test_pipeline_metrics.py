"""Every step tells how its batch came about, and the counts of a run add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rollout_parts import Host, Running, ScriptedServing

from torchtitan_rl_ft.journal import drop_kinds
from torchtitan_rl_ft.journal.step_metrics import REQUIRED
from torchtitan_rl_ft.journal.store import Journal, NewGroup
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rollout.generation import GenerateRequest, GenerationFailed
from torchtitan_rl_ft.rollout.pipeline import Pipeline


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.mark.row("K3")
async def test_trained_and_dropped_groups_are_those_that_were_admitted(tmp_path: Path) -> None:
    """By kind, and across a batch that the trainers refuse."""

    def fails(request: GenerateRequest) -> Exception | None:
        group = request.request_id.split(".")[0]
        return GenerationFailed("bad prompt") if group in ("group-3", "group-7") else None

    serving = ScriptedServing()
    serving.fail = fails
    filtered = iter([None, "too easy"] + [None] * 1000)
    host = Host(
        tmp_path,
        serving,
        groups=3,
        steps=6,
        max_failures=1,
        group_filter=lambda prompt, rewards: next(filtered),
    )
    async with Running(host) as ended:
        host.publish()
        batch = await host.batch()
        host.journal.drop_batch(batch.batch_id, "refused by all groups: the loss is not finite")
        metas = [(await host.train()).meta for _ in range(6)]
        await ended
        counts = host.journal.counts()
    assert all(set(REQUIRED) <= set(row) for row in rows(tmp_path))
    dropped = {k: sum(m[drop_kinds.PREFIX + k] for m in metas) for k in drop_kinds.KINDS}
    assert dropped["generation_failed"] == 2 and dropped["filtered"] == 1
    assert dropped["refused"] == 3
    assert sum(dropped.values()) == sum(m["dropped_groups"] for m in metas)
    trained = sum(m["groups"] for m in metas)
    assert trained == counts["trained"] == 18
    under_way = counts["pending"] + counts["accepted"] + counts["sealed"]
    assert trained + sum(dropped.values()) + under_way == counts["issued"]
    assert sum(counts["dropped"].values()) == sum(dropped.values())


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.row("K3")
def test_waits_and_transfers_between_two_batches() -> None:
    clock = Clock()
    pipeline = Pipeline(clock)
    pipeline.entered("rollout")
    clock.now_s = 2.0
    pipeline.entered("waiting_for_trainers")
    clock.now_s = 5.0
    pipeline.announced(7, push_s=0.25)
    pipeline.served(7, seen_s=5.5)
    pipeline.failed(2)
    first = pipeline.take(3, 1)
    assert first == {
        "buffer/accepted_groups": 3,
        "buffer/sealed_batches": 1,
        "groups/failures": 2,
        "rollout/blocked_s": 3.0,
        "weights/push_s": 0.25,
        "weights/pull_s": 0.5,
    }
    clock.now_s = 6.0
    pipeline.entered("rollout")
    clock.now_s = 9.0
    pipeline.served(7, seen_s=5.5)  # nothing new
    assert pipeline.take(0, 1)["rollout/blocked_s"] == 1.0
    assert pipeline.take(0, 1)["groups/failures"] == 0


def test_an_engine_may_serve_before_the_trainer_has_said_so() -> None:
    clock = Clock()
    pipeline = Pipeline(clock)
    clock.now_s = 10.0
    pipeline.announced(3, push_s=2.0)  # committed at 8 s
    pipeline.served(3, seen_s=9.5)
    found = pipeline.take(0, 0)
    assert (found["weights/push_s"], found["weights/pull_s"]) == (1.5, 0.0)


def test_a_policy_that_was_skipped_is_forgotten() -> None:
    pipeline = Pipeline(Clock())
    for version in range(1, 100):
        pipeline.announced(version, 0.1)
    pipeline.served(99, seen_s=-1.0)
    assert pipeline.take(0, 0)["weights/pull_s"] == 0.0
    assert not pipeline._announced


def test_kinds_of_all_reasons() -> None:
    assert drop_kinds.kind("too old: policy age 3, at most 1") == "too_old"
    assert drop_kinds.kind("reward failed 3 times, the last one: x") == "reward_failed"
    assert drop_kinds.kind("crashed 3 times, the last one: x") == "crashed"
    assert drop_kinds.kind("the loss is not finite") == "refused"


def test_a_journal_that_told_its_drops_as_one_number_goes_on(tmp_path: Path) -> None:
    with Journal.open(tmp_path, events=EventList()) as journal:
        ids = journal.issue([NewGroup({}), NewGroup({}), NewGroup({})], None)
        for group, reason in zip(ids, ("too old: a", "filter: b", "filter: c"), strict=True):
            journal.drop(group, reason)
        with journal._db.write() as db:
            db.execute("INSERT INTO meta VALUES ('dropped_told', 2)")
        news = drop_kinds.by_kind(journal._dropped()) - journal._dropped_told()
    assert dict(news) == {"filtered": 1}
