"""What a holder is asked for is checked before anything is done."""

from concurrent.futures import ThreadPoolExecutor

import aiohttp
import pytest
from fakes.fake_agent import FakeAgent

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.weights.holder.files import HolderFiles
from torchtitan_rl_ft.weights.holder.push import Pusher
from torchtitan_rl_ft.weights.holder.routes import Routes
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key
from torchtitan_rl_ft.weights.holder.shelf import Shelf
from torchtitan_rl_ft.weights.image import Image

TOKEN = "the-token"
HEADERS = {"Authorization": f"Bearer {TOKEN}"}
IMAGE = Image({"a": ("F32", [300])})
VERSION = {"step": 1, "token": "t"}
PUSH = {
    **VERSION,
    "layout_digest": IMAGE.layout_digest,
    "ranges": [[0, IMAGE.nbytes]],
    "agent": "eA==",
    "address": 4096,
    "nbytes": IMAGE.nbytes,
    "nixl": "nixl 1",
    "stall_timeout_s": 5.0,
}
FETCH = {
    **VERSION,
    "layout_digest": IMAGE.layout_digest,
    "nbytes": IMAGE.nbytes,
    "timeout_s": 5.0,
}


class Bench:
    """A holder's routes; nothing behind them can be reached by a bad request."""

    def __init__(self, tmp_path, checks, kind="relay"):
        weights = WeightsSection(memory_folder=str(tmp_path))
        settings = HolderSettings(
            "h", kind, "run", weights, ProcessId.current(), serving_url="http://x"
        )
        settings.folder.mkdir(parents=True)
        self.agent = FakeAgent()
        pusher = Pusher(lambda: self.agent)
        self.shelf = Shelf(kind, HolderFiles(settings), pusher, checks, 256)
        unreachable = object()
        self.routes = Routes(
            settings,
            "nixl 1",
            self.shelf,
            pusher,
            unreachable,  # fetches
            unreachable,  # the reporter
            unreachable,  # the receiver
            checks,
        ).table()


@pytest.fixture
async def bench(tmp_path):
    with ThreadPoolExecutor(2) as checks:
        made = Bench(tmp_path, checks)
        version = await made.shelf.begin(Key(1, "t"), IMAGE)
        version.pieces = await made.shelf.pieces(version, [(0, IMAGE.nbytes)])
        version.manifest_digest = "0" * 64
        made.url, runner = await server.start(server.make_app(TOKEN, made.routes), grace_s=0.1)
        async with aiohttp.ClientSession() as made.http:
            yield made
        await runner.cleanup()


async def ask(bench, path, body, headers=HEADERS):
    async with bench.http.post(bench.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


async def test_a_good_push_is_made(bench):
    assert await ask(bench, "/v1/push", PUSH) == (200, {"bytes": IMAGE.nbytes})


@pytest.mark.parametrize("kind", ["relay", "source"])
@pytest.mark.scenario("S-2")
async def test_every_route_needs_the_token(tmp_path, kind):
    with ThreadPoolExecutor(1) as checks:
        routes = Bench(tmp_path, checks, kind).routes
        url, runner = await server.start(server.make_app(TOKEN, routes), grace_s=0.1)
        async with aiohttp.ClientSession() as http:
            for route in routes:
                for headers in ({}, {"Authorization": f"Bearer {TOKEN}x"}):
                    ask = http.request(route.method, url + route.path, headers=headers)
                    async with ask as response:
                        assert response.status == 401, route.path
        await runner.cleanup()


@pytest.mark.parametrize(
    "path, good, bad, status",
    [
        ("/v1/push", PUSH, {"stall_timeout_s": float("nan")}, 400),
        ("/v1/push", PUSH, {"stall_timeout_s": float("inf")}, 400),
        ("/v1/push", PUSH, {"stall_timeout_s": 0}, 400),
        ("/v1/push", PUSH, {"stall_timeout_s": True}, 400),
        ("/v1/push", PUSH, {"nbytes": IMAGE.nbytes - 1}, 400),
        ("/v1/push", PUSH, {"ranges": [[0, IMAGE.nbytes + 1]]}, 400),
        ("/v1/push", PUSH, {"ranges": [[5, 5]]}, 400),
        ("/v1/push", PUSH, {"ranges": [[-1, 5]]}, 400),
        ("/v1/push", PUSH, {"agent": "not base64"}, 400),
        ("/v1/push", PUSH, {"layout_digest": "0" * 64}, 412),
        ("/v1/push", PUSH, {"nixl": "nixl 2"}, 412),
        ("/v1/push", PUSH, {"step": 2}, 404),
        ("/v1/fetch", FETCH, {"timeout_s": float("nan")}, 400),
        ("/v1/fetch", FETCH, {"timeout_s": float("inf")}, 400),
        ("/v1/fetch", FETCH, {"timeout_s": -1}, 400),
        ("/v1/fetch", FETCH, {"nbytes": "many"}, 400),
        ("/v1/pieces", VERSION, {"ranges": [[0, IMAGE.nbytes + 1]]}, 400),
        ("/v1/pieces", VERSION, {"ranges": [[0, float("inf")]]}, 400),
        ("/v1/pieces", VERSION, {"step": float("inf")}, 400),
        ("/v1/fetch", FETCH, {"timeout_s": 10**400}, 400),
    ],
)
async def test_bad_requests_are_refused_and_nothing_is_written(bench, path, good, bad, status):
    found, answer = await ask(bench, path, {**good, **bad})
    assert found == status, answer
    assert answer["error"]
    assert not bench.agent.written and not bench.agent.registered
