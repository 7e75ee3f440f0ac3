"""What one side of a push does to the other when it dies, freezes or errs.

Real processes and real NIXL, by its own choice of transport (on one host: CMA) and by TCP. To be
run with each new version of the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web
from fakes.nixl_peer import FAILED
from integration.holder_faults import Seen, caught_half_way, file_of, until, until_pushes
from integration.holder_site import TOKEN, Holder, Policy, Site, holder_site

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.ports import free_port
from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.rpc.server import RequestError
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.directory import Held, Report
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.client import HolderClient, HolderError, Offer
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key
from torchtitan_rl_ft.weights.pieces import Range

pytest.importorskip("nixl_cu13")

pytestmark = [pytest.mark.row("D10"), pytest.mark.timeout(180)]

OVER = pytest.mark.parametrize("tls", ["", "tcp"], ids=["default", "tcp"])
MIB = 24
PATIENT_S = 20.0  # of a receiver that is told by its holder when to give up


def noted(holder: Holder) -> int:
    """Pieces that it has checked of the version that it gets."""
    lines = holder.settings.folder.glob("step-*/pieces.jsonl")
    return sum(path.read_text().count("\n") - 1 for path in lines)


async def givers(site: Site, policy: Policy, count: int, tls: str) -> list[Holder]:
    """A source that holds the policy alone, or, with `count` of more than 1, relays that do."""
    source = await site.start("trainer-0.0", "source", ucx_tls=tls)
    await site.offer(source, policy)
    site.want(policy)
    if count == 1:
        return [source]
    relays = [await site.start(f"relay-{i}", "relay", ucx_tls=tls) for i in range(count)]
    for relay in relays:
        await site.fetch(relay, policy)
    source.kill()
    await source.child.wait()
    site.book.gone(source.name)
    return relays


# The receiver ---------------------------------------------------------------------------------


@OVER
async def test_a_receiver_that_dies_costs_its_holder_one_push(tmp_path, tls):
    policy = Policy.make(MIB)
    async with holder_site(tmp_path) as site:
        [source] = await givers(site, policy, 1, tls)
        dying = await site.start("relay-0", "relay", ucx_tls=tls)
        other = await site.start("relay-1", "relay", ucx_tls=tls)
        fetching = await caught_half_way(site, source, dying, policy)
        dying.kill()
        await dying.child.wait()
        site.book.gone(dying.name)
        source.thaw()
        with pytest.raises(HolderError):
            await fetching
        started = time.monotonic()
        await site.fetch(other, policy)
        assert time.monotonic() - started < site.weights.stall_timeout_s + 3.0
        path = file_of(other)
        assert path is not None and path.read_bytes() == policy.data
        status = await source.client.status(5.0)
        assert source.child.returncode is None
        assert status["pushes"]["failed"] == 1 and status["pushes"]["done"] == 1


@OVER
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_receiver_that_dies_between_two_pieces_does_not_end_its_holder(tmp_path, tls, lanes):
    """UCX has connections to end then, before its agent may be dropped."""
    cycles = 3 if tls == "" else 2
    arguments = [str(tmp_path / "file"), str(cycles), tls, str(lanes)]
    command = [sys.executable, "-m", "fakes.nixl_pusher", *arguments]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=150, env=env)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout.split() == ["failed", "done"] * cycles, ended.stderr[-2000:]


# The sender -----------------------------------------------------------------------------------


@OVER
async def test_a_holder_that_dies_costs_what_it_has_not_pushed_yet(tmp_path, tls):
    policy = Policy.make(MIB)
    async with holder_site(tmp_path) as site:
        holders = await givers(site, policy, 2, tls)
        taker = await site.start("relay-2", "relay", ucx_tls=tls)
        first = _least_used(site, holders)
        fetching = await caught_half_way(site, first, taker, policy)
        first.kill()
        fetched = await fetching
        path = file_of(taker)
        assert path is not None and path.read_bytes() == policy.data
        assert set(fetched.bytes_from) == {h.name for h in holders}
        assert sum(fetched.bytes_from.values()) == policy.image.nbytes  # nothing came twice
        status = await taker.client.status(5.0)
        assert status["fetches"] == {"done": 1, "failed": 0, "abandoned": 1}


@OVER
async def test_a_trainer_that_is_started_anew_goes_on_from_another_address(tmp_path, tls):
    policy = Policy.make(MIB)
    async with holder_site(tmp_path) as site:
        [first] = await givers(site, policy, 1, tls)
        taker = await site.start("relay-0", "relay", ucx_tls=tls)
        fetching = await caught_half_way(site, first, taker, policy)
        first.kill()
        await first.child.wait()
        second = await site.start(first.name, "source", ucx_tls=tls)
        assert second.client.url != first.client.url
        await site.offer(second, policy)
        fetched = await fetching
        assert Path(fetched.path, "model.safetensors").read_bytes() == policy.data
        assert fetched.bytes_from == {first.name: policy.image.nbytes}  # nothing came twice
        pushed = (await second.client.status(5.0))["pushes"]["bytes"]
        assert 0 < pushed < policy.image.nbytes


def _least_used(site: Site, holders: list[Holder]) -> Holder:
    """Whom the directory names first."""
    used = {h["name"]: h["used"] for h in site.book.to_json()["holders"]}
    return min(holders, key=lambda h: (used[h.name], h.name))


# The link -------------------------------------------------------------------------------------


class Link:
    """A network namespace, and a link to it that can be cut: packets are lost then, nothing is
    reset."""

    def __init__(self) -> None:
        self.netns = f"tt{os.getpid()}"
        self.here, self.there = f"tta{os.getpid()}", f"ttb{os.getpid()}"
        net = f"10.{199 + os.getpid() % 40}.{os.getpid() // 40 % 250}"
        self.here_ip, self.there_ip = f"{net}.1", f"{net}.2"

    def __enter__(self) -> Link:
        _ip("netns", "add", self.netns)
        peer = ("type", "veth", "peer", "name", self.there, "netns", self.netns)
        _ip("link", "add", self.here, *peer)
        _ip("addr", "add", f"{self.here_ip}/24", "dev", self.here)
        _ip("link", "set", self.here, "up")
        _ip("-n", self.netns, "addr", "add", f"{self.there_ip}/24", "dev", self.there)
        for device in ("lo", self.there):
            _ip("-n", self.netns, "link", "set", device, "up")
        return self

    def cut(self) -> None:
        """Each side sends to a machine that is not there. (A device that is down would tell.)"""
        nobody = ("lladdr", "02:00:00:00:00:99", "nud", "permanent")
        _ip("neigh", "replace", self.there_ip, *nobody, "dev", self.here)
        _ip("-n", self.netns, "neigh", "replace", self.here_ip, *nobody, "dev", self.there)

    def mend(self) -> None:
        _ip("neigh", "del", self.there_ip, "dev", self.here)
        _ip("-n", self.netns, "neigh", "del", self.here_ip, "dev", self.there)

    def __exit__(self, *exc: object) -> None:
        _ip("link", "del", self.here)  # a namespace takes its own time
        _ip("netns", "del", self.netns)


def _ip(*args: str) -> None:
    subprocess.run(["ip", *args], check=True, capture_output=True)


def _has_namespaces() -> bool:
    if shutil.which("ip") is None:
        return False
    return subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


@OVER
@pytest.mark.skipif(not _has_namespaces(), reason="needs root and network namespaces")
async def test_a_link_that_is_cut_ends_a_push_on_both_sides(tmp_path, tls):
    policy = Policy.make(MIB)
    with Link() as link:
        async with holder_site(tmp_path, link.here_ip) as site:
            here = {"ucx_tls": tls, "ucx_devices": link.here, "host": link.here_ip}
            there = {"ucx_tls": tls, "ucx_devices": link.there, "host": link.there_ip}
            source = await site.start("trainer-0.0", "source", **here)
            await site.offer(source, policy)
            site.want(policy)
            near = await site.start("relay-0", "relay", **here)
            far = await site.start("relay-1", "relay", netns=link.netns, **there)
            fetching = await caught_half_way(site, source, far, policy)
            link.cut()
            source.thaw()
            # By UCX's own choice bytes go past the link, on one machine: what is lost then is word
            # of them, and the holder may be done.
            await until_pushes(source, ("failed",) if tls == "tcp" else ("failed", "done"))
            await site.fetch(near, policy)  # its holder is free again
            await until(lambda: "no piece came for 2 s" in site.log(far))
            link.mend()
            await fetching
            path = file_of(far)
            assert path is not None and path.read_bytes() == policy.data
            assert far.child.returncode is None and source.child.returncode is None
            assert (await far.client.status(5.0))["fetches"]["abandoned"] >= 1


# One side alone, to the byte ------------------------------------------------------------------


class Peer:
    """A process of fakes/nixl_peer.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, *args: str) -> Peer:
        return cls(
            await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "fakes.nixl_peer", *args),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
        )

    async def says(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(30.0):
            line = await self.process.stdout.readline()
        assert line, "the peer has ended"
        return line.decode().strip()

    async def go_on(self) -> None:
        """Write the next piece."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        await self.process.stdin.drain()

    async def kill(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


class FalseHolder:
    """A holder's routes in the test's process, behind which a peer pushes as far as it is told to.
    The answer comes, and is a failure, when `over` is set."""

    COUNT = 3  # pieces that are pushed

    def __init__(self, site: Site, policy: Policy, tls: str, file: Path, name: str) -> None:
        self._site, self._policy, self._tls, self._file = site, policy, tls, file
        self.name = name
        self.peers: list[Peer] = []
        self.pushing, self.over = asyncio.Event(), asyncio.Event()
        self.pieces: list[list] = []

    @contextlib.asynccontextmanager
    async def answering(self, true: Holder) -> AsyncIterator[None]:
        """The directory takes it for a relay that has all. What it cannot know is asked of a `true`
        holder."""

        async def pieces(request: web.Request) -> web.Response:
            answer = await self._site.post(true, "/v1/pieces", await request.json())
            self.pieces = answer["pieces"]
            return web.json_response(answer)

        async def assets(request: web.Request) -> web.Response:
            return web.json_response({"files": {}})

        self._file.write_bytes(self._policy.data)
        routes = [
            web.post("/v1/pieces", pieces),
            web.get("/v1/assets", assets),
            web.post("/v1/push", self._push),
        ]
        url, runner = await server.start(server.make_app(TOKEN, routes), grace_s=0.1)
        held = Held(self._policy.key, self._policy.image.layout_digest, True)
        host = socket.gethostname()
        reporting = asyncio.create_task(
            self._report(Report(self.name, "relay", url, os.getpid(), 1.0, host, (held,)))
        )
        try:
            yield
        finally:
            reporting.cancel()
            self._site.book.gone(self.name)
            for peer in self.peers:
                await peer.kill()
            await runner.cleanup()

    async def _report(self, report: Report) -> None:
        while True:
            self._site.book.report(report)
            await asyncio.sleep(1.0)

    async def _push(self, request: web.Request) -> web.Response:
        peer = await Peer.start(
            "send",
            str(self._file),
            str(self._policy.image.nbytes),
            self._tls,
            json.dumps(await request.json()),
            json.dumps([p[:2] for p in self.pieces]),
            str(self.COUNT),
        )
        self.peers.append(peer)
        assert await peer.says() == "half"
        self.pushing.set()
        await self.over.wait()
        raise RequestError(502, "the receiver is gone")


@OVER
async def test_what_comes_after_a_push_was_given_up_lands_nowhere(tmp_path, tls):
    """The sender is not frozen but late: it writes the rest when the receiver has turned away."""
    policy = Policy.make(6)
    async with holder_site(tmp_path) as site:
        [source] = await givers(site, policy, 1, tls)
        taker = await site.start("relay-0", "relay", ucx_tls=tls, stall_timeout_s=PATIENT_S)
        false = FalseHolder(site, policy, tls, tmp_path / "image", "a-false-holder")
        async with false.answering(source):
            fetching = asyncio.create_task(site.fetch(taker, policy))
            await false.pushing.wait()
            await until(lambda: noted(taker) == false.COUNT)  # it may be behind
            false.over.set()
            fetched = await fetching
            assert set(fetched.bytes_from) == {false.name, source.name}
            came = sum(p[1] - p[0] for p in false.pieces[: false.COUNT])
            assert fetched.bytes_from[false.name] == came
            path = Path(fetched.path, "model.safetensors")
            assert path.read_bytes() == policy.data
            mark = b"\xa5" * policy.image.nbytes
            path.write_bytes(mark)
            [peer] = false.peers
            for _ in false.pieces[false.COUNT :]:
                with contextlib.suppress(ConnectionError):  # it has failed at the one before
                    await peer.go_on()
            assert await peer.process.wait() == FAILED
            assert path.read_bytes() == mark
            assert taker.child.returncode is None
            assert (await taker.client.status(5.0))["fetches"]["abandoned"] == 1


# Cycles ---------------------------------------------------------------------------------------

GROWTH_BYTES = 16 << 20
WARM_UP = 3


async def at_rest(holder: Holder, limit_s: float = 30.0) -> dict:
    """The process of a relay when what is done beside other work is done: agents of pushes that
    are over are dropped, the one for the next push is there."""
    end_s = time.monotonic() + limit_s
    while True:
        status = await holder.client.status(5.0)
        if status["receiver"] == {"open": 0, "agent_ahead": True}:
            return status["process"]
        assert time.monotonic() < end_s, status
        await asyncio.sleep(0.02)


def has_not_grown(before: dict, now: dict) -> None:
    print("before", before, "after", now)
    assert now["descriptors"] <= before["descriptors"] + 4, (before, now)
    assert now["threads"] <= before["threads"] + 4, (before, now)
    assert now["private_bytes"] <= before["private_bytes"] + GROWTH_BYTES, (before, now)


@contextlib.asynccontextmanager
async def receiver(path: Path, policy: Policy, tls: str) -> AsyncIterator[tuple[Peer, Offer]]:
    path.write_bytes(bytes(policy.image.nbytes))
    peer = await Peer.start("receive", str(path), str(policy.image.nbytes), tls)
    try:
        yield peer, Offer.from_json(json.loads(await peer.says()))
    finally:
        await peer.kill()


async def after_a_push(source: Holder, path: Path, policy: Policy, tls: str) -> dict:
    """Its process when a receiver that lives has got all."""
    for _ in range(3):  # a connection that is not made is one more push that failed
        async with receiver(path, policy, tls) as (_, offer):
            with contextlib.suppress(HolderError):
                await push(source, policy, offer)
                assert path.read_bytes() == policy.data
                return await source.process()
    raise AssertionError("no push to a receiver that lives ended well")


async def lose_receivers(folder: Path, tls: str, cycles: int) -> None:
    policy = Policy.make(9)  # large enough for two lanes
    path = folder / "receiver"
    async with holder_site(folder) as site:
        [source] = await givers(site, policy, 1, tls)
        before = {}
        for cycle in range(cycles + WARM_UP):
            if cycle == WARM_UP:
                before = await after_a_push(source, path, policy, tls)
            async with receiver(path, policy, tls) as (peer, offer):
                seen = Seen(path, policy)
                pushing = asyncio.create_task(push(source, policy, offer))
                # Now and then a connection is not made; the holder says so after its limit.
                await until(lambda s=seen, p=pushing: s.probes() > 4 or p.done())
                await peer.kill()
                with contextlib.suppress(HolderError):  # or it was faster
                    await pushing
        has_not_grown(before, await after_a_push(source, path, policy, tls))
        failed = (await source.client.status(5.0))["pushes"]["failed"]
        assert failed >= cycles // 4, "nearly all pushes were over before they were struck"


async def push(source: Holder, policy: Policy, offer: Offer, **other) -> None:
    ranges: list[Range] = other.pop("ranges", [(0, policy.image.nbytes)])
    layout_digest = other.pop("layout_digest", policy.image.layout_digest)
    await source.client.push(policy.key, layout_digest, ranges, offer, 2.0, 20.0)


async def lose_senders(folder: Path, tls: str, cycles: int) -> None:
    async with holder_site(folder) as site:
        source = await site.start("trainer-0.0", "source", ucx_tls=tls)
        taker = await site.start("relay-0", "relay", ucx_tls=tls, stall_timeout_s=PATIENT_S)
        before = {}
        for cycle in range(cycles + WARM_UP):
            if cycle == WARM_UP:
                before = await at_rest(taker)
            policy = Policy.make(4, step=cycle + 1)
            await site.offer(source, policy)
            site.want(policy)
            false = FalseHolder(site, policy, tls, folder / "image", f"a-false-holder-{cycle}")
            async with false.answering(source):
                fetching = asyncio.create_task(site.fetch(taker, policy))
                await false.pushing.wait()
                await false.peers[0].kill()
                false.over.set()
                fetched = await fetching
            assert set(fetched.bytes_from) == {false.name, source.name}
            assert Path(fetched.path, "model.safetensors").read_bytes() == policy.data
        has_not_grown(before, await at_rest(taker))
        fetches = (await taker.client.status(5.0))["fetches"]
        assert (fetches["done"], fetches["failed"]) == (cycles + WARM_UP, 0)
        # Now and then a connection is not made, and another try is.
        assert 0 <= fetches["abandoned"] - (cycles + WARM_UP) <= 1 + cycles // 10


@OVER
@pytest.mark.row("D4")
async def test_receivers_that_die_one_after_the_other_leave_nothing_in_their_holder(tmp_path, tls):
    await lose_receivers(tmp_path, tls, 10)


@OVER
async def test_holders_that_die_one_after_the_other_leave_nothing_in_their_receiver(tmp_path, tls):
    await lose_senders(tmp_path, tls, 10)


@OVER
@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("lose", [lose_receivers, lose_senders])
async def test_two_hundred_deaths_leave_nothing(tmp_path, tls, lose):
    await lose(tmp_path, tls, 200)


# Requests that are refused --------------------------------------------------------------------


async def test_a_push_that_cannot_be_is_refused_before_anything_is_written(tmp_path):
    policy = Policy.make(2)
    size = policy.image.nbytes
    async with holder_site(tmp_path) as site:
        source = await site.start("trainer-0.0", "source")
        first, second = policy.halves()
        await site.offer(source, policy, first)
        path = tmp_path / "receiver"
        path.write_bytes(bytes(size))
        peer = await Peer.start("receive", str(path), str(size), "")
        try:
            offer = Offer.from_json(json.loads(await peer.says()))
            held = [(0, len(policy.image.header)), *first]

            async def refused(status: int, says: str, offer: Offer = offer, **other) -> None:
                with pytest.raises(HolderError, match=says) as caught:
                    await push(source, policy, offer, **{"ranges": held, **other})
                assert caught.value.status == status

            await refused(
                412, "nixl-cu13 0.0.1, this holder", replace(offer, nixl="nixl-cu13 0.0.1")
            )
            await refused(412, "another model", layout_digest="0" * 64)
            await refused(400, "memory has", replace(offer, nbytes=size - 4096))
            await refused(400, "no range", ranges=[(0, size + 1)])
            await refused(400, "no range", ranges=[(-1, 10)])
            await refused(400, "not all of these", ranges=second)
            strangers = HolderClient(site.http, source.client.url, "another token")
            with pytest.raises(HolderError, match="token") as caught:
                await strangers.push(policy.key, policy.image.layout_digest, held, offer, 2.0, 20.0)
            assert caught.value.status == 401
            with pytest.raises(HolderError, match="not held") as caught:
                await source.client.pieces(Key(7, "other"), 5.0)
            assert caught.value.status == 404
            # Addresses that the receiver did not register.
            with pytest.raises(HolderError) as caught:
                await push(
                    source, policy, replace(offer, address=offer.address + size), ranges=held
                )
            assert caught.value.status == 502
            with pytest.raises(HolderError) as caught:
                await push(source, policy, replace(offer, agent=b"no metadata"), ranges=held)
            assert caught.value.status == 502
            assert path.read_bytes() == bytes(size)
            await push(source, policy, offer, ranges=held)
            for start, end in held:
                assert path.read_bytes()[start:end] == policy.data[start:end]
        finally:
            await peer.kill()


async def test_ports_that_are_used_up_are_named_and_nothing_is_lost(tmp_path):
    policy = Policy.make(2)
    port = free_port()
    async with holder_site(tmp_path) as site:
        source = await site.start("trainer-0.0", "source", ucx_port_range=f"{port}-{port}")
        relay = await site.start("relay-0", "relay")
        await site.offer(source, policy)
        site.want(policy)
        with socket.create_server(("127.0.0.1", port)), pytest.raises(HolderError) as told:
            await site.fetch(relay, policy, 3.0)
        assert told.value.status == 502
        assert str(told.value).endswith(
            f"{policy.image.nbytes} bytes are missing (trainer-0.0: making a NIXL agent: "
            "nixlBackendError: NIXL_ERR_BACKEND: all ports of weights.ucx_port_range = "
            f"'{port}-{port}' are taken)"
        )
        fetched = await site.fetch(relay, policy)
        assert Path(fetched.path, "model.safetensors").read_bytes() == policy.data


async def test_a_library_that_does_not_work_is_one_clear_error(tmp_path):
    broken = tmp_path / "broken" / "nixl_cu13"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('libucp.so.0: cannot open')")
    weights, owner = WeightsSection(memory_folder=str(tmp_path)), ProcessId.current()
    settings = HolderSettings("relay-0", "relay", "r", weights, owner, serving_url="http://x")
    path = os.pathsep.join([str(broken.parent), *(p for p in sys.path if p)])
    child = launch.start(
        settings, token=TOKEN, log=tmp_path / "log", env={**os.environ, "PYTHONPATH": path}
    )
    assert await child.wait() == ExitCode.CONFIG
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines == [
        "torchtitan: error: holder relay-0: nixl-cu13 1.5.1 is installed but does not work: "
        "ImportError: libucp.so.0: cannot open"
    ]
