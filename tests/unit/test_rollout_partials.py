"""Unfinished samples: told by serving, kept in the journal, gone on with by the next life."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollout_parts import Host, ScriptedServing

from torchtitan_rl_ft.journal.database import FILE_NAME
from torchtitan_rl_ft.journal.partials import Piece
from torchtitan_rl_ft.journal.store import Journal, NewGroup
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rollout.generation import (
    Generated,
    GenerationFailed,
    Keep,
    ServingUnavailable,
)
from torchtitan_rl_ft.rollout.partials import Unfinished
from torchtitan_rl_ft.serving.progress import Account, Progress, stream_limit
from torchtitan_rl_ft.serving.requests import GenerateRequest, Held

# Serving tells ----------------------------------------------------------------------------------


class Caller:
    """Puts together what it is told."""

    def __init__(self, samples: int) -> None:
        self.unfinished = Unfinished(samples)

    def told(self, news: list[dict]) -> None:
        self.unfinished.take(
            [
                Piece(
                    n["index"], n["start"], n["output_ids"], n["logprobs"], n["versions"],
                    n["finish_reason"],
                )
                for n in news
            ]
        )  # fmt: skip


steps = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.integers(0, 2), st.integers(1, 32)),
        st.tuples(st.just("cut"), st.integers(0, 2), st.integers(0, 60)),
        st.tuples(st.just("revise"), st.integers(0, 2), st.integers(0, 60)),
        st.tuples(st.just("finish"), st.integers(0, 2), st.just(0)),
    ),
    max_size=40,
)


@given(steps, st.integers(1, 200), st.integers(0, 40))
def test_a_caller_has_all_but_less_than_the_interval(
    steps: list[tuple[str, int, int]], interval: int, begun: int
) -> None:
    held = tuple(Held([7] * begun, [-1.0] * begun, [1] * begun) for _ in range(3)) if begun else ()
    request = GenerateRequest("r", [3], 3, {}, None, 1.0, "policy", held, interval)
    progress = Progress(request)
    message_tokens, _ = stream_limit(interval, 32)
    account, caller, counter = Account(progress, request, 32), Caller(3), 0
    caller.unfinished.load([Piece(i, 0, *([*x] for x in
        (h.output_ids, h.logprobs, h.versions))) for i, h in enumerate(held)])  # fmt: skip
    for what, i, n in steps:
        draft = progress.drafts[i]
        if what == "grow":
            n = min(n, message_tokens)  # as an engine that is told how often to stream
            counter += 1
            draft.output_ids += [counter] * n
            draft.logprobs += [-float(counter)] * n
            draft.versions += [counter] * n
        elif what == "cut":
            draft.cut(min(n, len(draft.output_ids)))
        elif what == "revise" and n < len(draft.versions):
            draft.versions[n:] = [v + 1 for v in draft.versions[n:]]
            draft.revised.append(n)
        elif what == "finish":
            draft.finish_reason = "stop"
        if account.due:
            caller.told(account.news())
        for mine, whole in zip(caller.unfinished._drafts, progress.drafts, strict=True):
            assert len(whole.output_ids) - len(mine.output_ids) + message_tokens < max(interval, 2)
            assert mine.output_ids == whole.output_ids[: len(mine.output_ids)]
    caller.told(account.news())
    assert not account.due and not account.news() and not account.lacks
    for mine, whole in zip(caller.unfinished._drafts, progress.drafts, strict=True):
        for name in ("output_ids", "logprobs", "versions", "finish_reason"):
            assert getattr(mine, name) == getattr(whole, name)
    assert progress.untold == 0


# The journal keeps ------------------------------------------------------------------------------


def pieces(*lengths: int, version: int = 1) -> list[Piece]:
    """One growing sample."""
    found, start = [], 0
    for n in lengths:
        found.append(Piece(0, start, list(range(start, start + n)), [-0.5] * n, [version] * n))
        start += n
    return found


@pytest.fixture
def journal(tmp_path: Path):
    with Journal.open(tmp_path / "journal", events=EventList()) as journal:
        journal.issue([NewGroup({"n": i}, f"0:{i}") for i in range(3)], {"position": 3})
        yield journal


def test_partials_go_with_the_end_of_their_group(journal: Journal) -> None:
    three = pieces(3, 4, 5)
    journal.keep_partials({1: three[:2], 2: three})
    journal.keep_partials({1: three[2:]})
    assert journal.partial(1) == journal.partial(2) == three
    journal.accept(1, {"x": np.zeros(1)})
    journal.drop(2, "too old")
    assert journal.partial(1) == journal.partial(2) == []
    journal.keep_partials({1: three, 2: three})  # a writer that was late
    assert journal.partial(1) == journal.partial(2) == []


def test_a_torn_piece_is_discarded_with_what_follows(tmp_path: Path, journal: Journal) -> None:
    journal.keep_partials({1: pieces(3, 4, 5)})
    with sqlite3.connect(tmp_path / "journal" / FILE_NAME) as db:
        db.execute("UPDATE partials SET logprobs = x'00000000' WHERE start = 3")
    unfinished = Unfinished(1)
    unfinished.load(journal.partial(1))
    assert unfinished.held()[0].output_ids == [0, 1, 2]
    unfinished = Unfinished(1)
    unfinished.load([p for p in pieces(3, 4, 5) if p.start != 3])  # a gap
    assert unfinished.held()[0].output_ids == [0, 1, 2]


def test_a_journal_of_before_gets_the_table(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal", events=EventList()) as journal:
        journal.issue([NewGroup({}, "0:0")], {"position": 1})
    with sqlite3.connect(tmp_path / "journal" / FILE_NAME) as db:
        db.execute("DROP TABLE partials")
    with Journal.open(tmp_path / "journal", events=EventList()) as again:
        again.keep_partials({1: pieces(2)})
        assert again.partial(1) == pieces(2)


# Rollout goes on --------------------------------------------------------------------------------


class Growing(ScriptedServing):
    """Gives two tokens of each sample, then nothing more while `stuck`; at the end the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.stuck = asyncio.Event()
        self.told: list[str] = []

    async def generate(self, request, keep: Keep = lambda pieces: None) -> list[Generated]:
        whole = await super().generate(request)
        if request.partial_interval_tokens and not request.held:
            keep(
                [
                    Piece(i, 0, list(g.output_ids[:2]), list(g.logprobs[:2]), list(g.versions[:2]))
                    for i, g in enumerate(whole)
                ]
            )
            self.told.append(request.request_id)
            await self.stuck.wait()
        for held, g in zip(request.held, whole, strict=False):
            assert g.output_ids[:2] == held.output_ids
            g.versions[:2] = held.versions
        return [
            Generated(g.output_ids, g.logprobs, v, "stop", min(v), max(v))
            for g, v in ((g, g.versions) for g in whole)
        ]


async def killed(folder: Path, serving: Growing, **settings) -> None:
    """A life that ends once what it was told is in the journal."""
    host = Host(folder, serving, partial_interval_tokens=1, **settings)
    running = asyncio.create_task(host.loop.run())
    host.publish()
    async with asyncio.timeout(10):
        while not all(host.journal.partial(g) for g in (1, 2, 3)):
            await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait({running})
    host.close()
    serving.stuck.set()


@pytest.mark.row("E2")
@pytest.mark.row("M2")
async def test_the_next_life_asks_for_the_rest_alone(tmp_path: Path) -> None:
    serving = Growing()
    await killed(tmp_path, serving)
    first = serving.requests[:]
    host = Host(tmp_path, serving, partial_interval_tokens=1)
    running = asyncio.create_task(host.loop.run())
    await host.batch()
    again = serving.requests[len(first) :]
    assert [r.seeds for r in again] == [r.seeds for r in first]
    assert all(len(h.output_ids) == 2 for r in again for h in r.held)
    assert [e["tokens"] for e in host.kinds("partial")] == [8, 8, 8]
    assert not any(host.journal.partial(g) for g in (1, 2, 3))
    running.cancel()
    await asyncio.wait({running})
    host.close()


@pytest.mark.row("M2")
@pytest.mark.scenario("C-5")
async def test_what_is_too_old_is_dropped_with_a_reason_and_drawn_anew(tmp_path: Path) -> None:
    serving = Growing()
    await killed(tmp_path, serving)
    host = Host(tmp_path, serving, partial_interval_tokens=1)
    host.publish()  # the same step again, as after a restart: version 2
    before = len(serving.requests)
    running = asyncio.create_task(host.loop.run())
    batch = await host.batch()
    assert set(batch.arrays["versions"].tolist()) == {-1, 2}
    assert not any(r.held for r in serving.requests[before:])
    discards = [e for e in host.kinds("partial") if e["phase"] == "discard"]
    assert {e["cause"] for e in discards} == {"too old: policy age 1, at most 0"}
    assert [e["tokens"] for e in discards] == [8, 8, 8]
    running.cancel()
    await asyncio.wait({running})
    host.close()


@pytest.mark.row("C8")
async def test_a_lost_serving_role_costs_no_token_that_was_told(tmp_path: Path) -> None:
    class Broken(Growing):
        async def generate(self, request, keep: Keep = lambda pieces: None) -> list[Generated]:
            found = await super().generate(request, keep)
            if not request.held:
                raise ServingUnavailable("the answer broke off")
            return found

    serving = Broken()
    serving.stuck.set()
    host = Host(tmp_path, serving, partial_interval_tokens=1)
    running = asyncio.create_task(host.loop.run())
    host.publish()
    await host.batch()
    assert [bool(r.held) for r in serving.requests] == [False] * 3 + [True] * 3
    assert not any(host.journal.partial(g) for g in (1, 2, 3))
    running.cancel()
    await asyncio.wait({running})
    host.close()


async def test_a_failure_starts_anew_where_nothing_came(tmp_path: Path) -> None:
    """What is held may be what serving cannot go on from."""
    serving = Growing()
    await killed(tmp_path, serving)
    serving.fail = lambda request: GenerationFailed("no") if request.held else None
    host = Host(tmp_path, serving, partial_interval_tokens=1)
    before = len(serving.requests)
    running = asyncio.create_task(host.loop.run())
    await host.batch()
    assert [bool(r.held) for r in serving.requests[before:]] == [True] * 3 + [False] * 3
    running.cancel()
    await asyncio.wait({running})
    host.close()
