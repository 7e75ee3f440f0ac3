"""A trainer whose report was taken, and whose reply was lost: one commit, told again by the ledger
that made it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from journal_cases import make_ledger, member, record, seal

from torchtitan_rl_ft.journal.client import LedgerClient
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.records import Decision
from torchtitan_rl_ft.journal.service import routes
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rpc.client import RoleClient, RoleUnreachable
from torchtitan_rl_ft.rpc.server import make_app, start


class LossyLedger:
    """The real service; replies to `committed` are lost as `lose` says, after the work is done."""

    def __init__(self, ledger: Ledger, url: str) -> None:
        self.ledger, self.url, self.asked = ledger, url, 0

    def client(self, deadline_s: float) -> LedgerClient:
        rpc = RoleClient("rollout", lambda: self.url, "secret")
        return LedgerClient(rpc, member("a"), deadline_s=deadline_s)


@pytest.fixture(params=["connection lost", "no answer in time"])
async def lossy(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[tuple[str, LossyLedger]]:
    events = EventList()
    with Journal.open(tmp_path / "journal", events=events) as journal:
        ledger = make_ledger(journal, tmp_path, events)
        served = LossyLedger(ledger, "")

        @web.middleware
        async def lose(call: web.Request, handler) -> web.StreamResponse:
            answer = await handler(call)
            if call.path == "/v1/ledger/committed":
                served.asked += 1
                if served.asked == 1 and request.param == "connection lost":
                    assert call.transport is not None
                    call.transport.abort()
                elif request.param == "no answer in time" and served.asked == 1:
                    await asyncio.sleep(1.5)
            return answer

        app = make_app("secret", routes(ledger))
        app.middlewares.append(lose)
        served.url, runner = await start(app)
        yield request.param, served
        await runner.cleanup()


@pytest.mark.row("E5")
async def test_a_lost_reply_is_reconciled_and_commits_nothing_twice(lossy) -> None:
    how, served = lossy
    journal, pid = served.ledger.journal, os.getpid()
    first = seal(journal)
    client = served.client(deadline_s=1.0 if how == "no answer in time" else 10.0)
    await asyncio.to_thread(client.attach)
    done = record(journal)
    if how == "no answer in time":
        with pytest.raises(RoleUnreachable):
            await asyncio.to_thread(client.committed, done, {"loss": 0.5})
    else:  # the client asks again by itself
        answer = await asyncio.to_thread(client.committed, done, {"loss": 0.5})
        assert (answer.status, served.asked) == ("confirmed", 2)
    # Asked again, the same ledger tells what it has committed, and which batch is next.
    again = await asyncio.to_thread(served.client(10.0).committed, done, {"loss": 0.5})
    assert again.status == "confirmed" and os.getpid() == pid
    second = seal(journal)
    state = journal.tip
    begun = await asyncio.to_thread(
        lambda: served.client(10.0).begin(state, done, participants=2, quorum_id=7)
    )
    assert (begun.decision, begun.batch) == (Decision.GO, second.ref)
    (commit,) = journal.commits_after(0)
    assert commit.record == done and commit.record.batch_id == first.batch_id
    assert journal.audit().ok
