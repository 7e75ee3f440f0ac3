"""The directory as serving keeps it: receivers that wait for a holder, and ask anew meanwhile."""

import asyncio

import aiohttp
import pytest

from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.directory import Directory, Held, Report
from torchtitan_rl_ft.serving.holder_book import HolderBook
from torchtitan_rl_ft.serving.holder_routes import HolderRoutes
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.pieces import Piece

V1, V2 = Key(1, "a"), Key(2, "b")
ALL = [(0, 100)]
LIMIT_S = 30.0


class Events:
    def emit(self, kind, **fields):
        pass


@pytest.fixture
def book():
    made = HolderBook(Directory(), Events(), Changes(), clock=lambda: 0.0)
    for key in (V1, V2):
        made.want(key, "L", 100)
    pieces = (Piece(0, 100, "0" * 32),)
    held = tuple(Held(key, "L", whole=False, pieces=pieces) for key in (V1, V2))
    for name in ("relay-0", "relay-1", "source-0.0"):
        kind = "relay" if name.startswith("relay") else "source"
        told = held if kind == "source" else ()
        made.report(Report(name, kind, f"http://{name}", 1, 1.0, "h", told))
    return made


@pytest.mark.parametrize("then", [V1, V2])
async def test_what_a_receiver_has_stopped_waiting_for_is_not_granted(book, then):
    """Its request may still be here: of a process that was killed, or a fetch that is over."""
    [busy] = await book.lease("relay-1", V2, ALL, LIMIT_S)
    old = asyncio.create_task(book.lease("relay-0", V1, ALL, LIMIT_S))
    await asyncio.sleep(0)
    new = asyncio.create_task(book.lease("relay-0", then, ALL, LIMIT_S))
    await asyncio.sleep(0)
    book.returned(busy.id, True, None)
    assert await asyncio.wait_for(old, LIMIT_S) == []
    [granted] = await asyncio.wait_for(new, LIMIT_S)
    assert (granted.receiver, granted.key) == ("relay-0", then)


async def test_waits_for_different_parts_do_not_end_each_other(book):
    [busy] = await book.lease("relay-1", V2, ALL, LIMIT_S)
    halves = [
        asyncio.create_task(book.lease("relay-0", V1, [part], LIMIT_S))
        for part in ((0, 50), (50, 100))
    ]
    await asyncio.sleep(0)
    book.returned(busy.id, True, None)
    done, waiting = await asyncio.wait(halves, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    [first] = done.pop().result()
    book.returned(first.id, True, None)
    [second] = await asyncio.wait_for(waiting.pop(), LIMIT_S)
    assert sorted([*first.ranges, *second.ranges]) == [(0, 50), (50, 100)]


LEASE = '{"name": "relay-0", "step": 1, "token": "a", "missing": [[0, %s]], "timeout_s": %s}'


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("lease", LEASE % ("Infinity", 0)),
        ("lease", LEASE % (9, "9" * 400)),
        ("lease", LEASE % ("null", 0)),
        ("lease", "[" * 200_000),
        ("returned", '{"lease": 1, "ok": true}'),
    ],
    ids=["endless", "too late", "no end", "too deep", "no lease"],
)
async def test_what_is_no_request_is_refused_as_such(book, path, body):
    url, runner = await server.start(server.make_app("t", HolderRoutes(book).table()))
    async with (
        aiohttp.ClientSession(headers={"Authorization": "Bearer t"}) as http,
        http.post(f"{url}/v1/holders/{path}", data=body) as response,
    ):
        assert (response.status, "error" in await response.json()) == (400, True)
    await runner.cleanup()
