from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from journal_cases import make_ledger, record, seal

from torchtitan_rl_ft.journal.client import LedgerClient, LiveBeats, Offer, Ready, Stop
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.protocol import State
from torchtitan_rl_ft.journal.records import GENESIS, Decision, Member
from torchtitan_rl_ft.journal.service import routes
from torchtitan_rl_ft.journal.step_metrics import REQUIRED
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused
from torchtitan_rl_ft.rpc.server import make_app, start

TOKEN = "secret"


@dataclass
class Served:
    ledger: Ledger
    journal: Journal
    events: EventList
    url: str
    folder: Path

    def client(self, name: str, replica_id: int = 0) -> LedgerClient:
        rpc = RoleClient("rollout", lambda: self.url, TOKEN)
        return LedgerClient(rpc, Member(replica_id, name, 1, 0.0, "elsewhere"), deadline_s=5.0)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    events = EventList()
    with Journal.open(tmp_path / "journal", events=events) as journal:
        ledger = make_ledger(journal, tmp_path, events)
        url, runner = await start(make_app(TOKEN, routes(ledger)))
        yield Served(ledger, journal, events, url, tmp_path)
        await runner.cleanup()


async def test_one_step_over_http(served: Served) -> None:
    a, b = served.client("a", 0), served.client("b", 1)
    start_answer, tip = await asyncio.to_thread(a.attach)
    assert (start_answer.start, tip) == ("fresh", State(0, GENESIS))
    await asyncio.to_thread(b.attach)

    # The initial policy is to be published: offered to who waits, granted to one.
    assert await asyncio.to_thread(a.next_batch, 0, 5.0) == Offer(("publish",))
    assert await asyncio.to_thread(a.duty, "publish", tip) == (True, "granted")
    assert await asyncio.to_thread(b.duty, "publish", tip) == (False, "held by a")
    await asyncio.to_thread(a.duty_done, "publish", tip, {"version": 1})
    assert served.journal.published() == (1, tip)

    waiting = asyncio.create_task(asyncio.to_thread(a.next_batch, 0, 5.0))
    await asyncio.sleep(0.1)
    info = seal(served.journal)
    ready = await waiting
    assert ready == Ready(1, info.ref)
    batch = await asyncio.to_thread(a.batch, ready.batch)
    assert batch.batch_id == info.batch_id and batch.n_samples == 4

    for client in (a, b):
        answer = await asyncio.to_thread(
            lambda c=client: c.begin(tip, None, participants=2, quorum_id=7)
        )
        assert (answer.decision, answer.batch) == (Decision.GO, info.ref)

    done = record(served.journal)
    metrics = {"loss": 0.25, "grad_norm": float("nan"), "time/step_s": 0.1}
    first = await asyncio.to_thread(a.committed, done, metrics)
    assert (first.status, first.duties) == ("committed", ("publish",))
    second = await asyncio.to_thread(b.committed, done, metrics)
    assert (second.status, second.duties) == ("confirmed", ())

    lines = [json.loads(s) for s in (served.folder / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 1 and set(REQUIRED) <= set(lines[0])
    assert lines[0]["step"] == 1 and lines[0]["loss"] == 0.25 and lines[0]["grad_norm"] is None
    assert lines[0]["participants"] == 2 and lines[0]["reward/mean"] == 0.5
    kinds = [e["kind"] for e in served.events.events]
    assert kinds == [Kind.PUBLISH, Kind.SEAL, Kind.COMMIT, Kind.CONFIRM]

    status = await asyncio.to_thread(a.status)
    assert status["tip"]["step"] == 1 and status["counts"]["trained"] == 2

    served.ledger.set_outcome("done", "all steps are trained")
    assert await asyncio.to_thread(b.next_batch, 1, 5.0) == Stop("done", "all steps are trained")


async def test_errors_name_what_is_wrong(served: Served) -> None:
    client = served.client("a")
    rpc = RoleClient("rollout", lambda: served.url, TOKEN)
    with pytest.raises(RoleRefused, match="there is no batch 9") as gone:
        await asyncio.to_thread(lambda: rpc.get_bytes("/v1/batches/9", deadline_s=2))
    assert gone.value.status == 409
    with pytest.raises(RoleRefused, match="KeyError: 'member'"):
        await asyncio.to_thread(lambda: rpc.post("/v1/ledger/attach", {}, deadline_s=2))
    with pytest.raises(RoleRefused, match="'version'"):
        await asyncio.to_thread(client.duty_done, "publish", State(0, GENESIS), {})


async def test_long_poll_ends_at_its_timeout(served: Served) -> None:
    rpc = RoleClient("rollout", lambda: served.url, TOKEN)
    answer = await asyncio.to_thread(
        lambda: rpc.get("/v1/ledger/next", deadline_s=5, step=0, timeout_s=0.2, uuid="nobody")
    )
    assert answer == {"status": "waiting", "duties": []}


async def test_beats_keep_a_member_alive(served: Served) -> None:
    client = served.client("a")
    beats = LiveBeats(client, interval_s=0.05)
    beats.start(State(0, GENESIS), "starting")
    for _ in range(100):
        await asyncio.sleep(0.05)
        if served.ledger.status()["members"]:
            break
    await asyncio.to_thread(beats.stop)
    (seen,) = served.ledger.status()["members"]
    assert seen["uuid"] == "a" and seen["alive"] and seen["phase"] == "starting"


@pytest.mark.scenario("S-2")
async def test_every_route_needs_the_token(served: Served) -> None:
    wrong = RoleClient("rollout", lambda: served.url, "guess")
    for route in routes(served.ledger):
        path = route.path.split("{")[0] + ("1" if "{" in route.path else "")
        call = (
            wrong.get
            if route.method == "GET"
            else lambda p, deadline_s: wrong.post(p, {}, deadline_s=deadline_s)
        )
        with pytest.raises(RoleRefused) as refused:
            await asyncio.to_thread(call, path, deadline_s=2)
        assert refused.value.status == 401
