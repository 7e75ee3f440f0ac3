"""The process of a holder, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import aiohttp

from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.agent import Agent, load, make, nixl_version
from torchtitan_rl_ft.weights.holder.client import HolderClient
from torchtitan_rl_ft.weights.holder.directory import DirectoryClient
from torchtitan_rl_ft.weights.holder.fetch import Fetch, Wish
from torchtitan_rl_ft.weights.holder.fetches import Fetches
from torchtitan_rl_ft.weights.holder.files import HolderFiles
from torchtitan_rl_ft.weights.holder.push import Pusher
from torchtitan_rl_ft.weights.holder.receive import Receiver
from torchtitan_rl_ft.weights.holder.reporter import Reporter
from torchtitan_rl_ft.weights.holder.routes import Routes
from torchtitan_rl_ft.weights.holder.settings import HolderSettings
from torchtitan_rl_ft.weights.holder.shelf import Shelf

logger = logging.getLogger(__name__)

PUSH_THREADS = 32
"""Each push, of either side, takes one."""

RECEIVES_AT_ONCE = 24
"""Of a version whose shards many ranks hold; the other threads begin and end pushes, and give."""


async def serve(settings: HolderSettings, token: str) -> None:
    """Until SIGTERM or SIGINT. Raises NixlUnavailable, NixlError, HolderRuns, MemoryRemoved,
    Replaced, WornOut, OSError."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    files = HolderFiles(settings)
    files.open()
    nixl, version = load(settings.weights, files.folder), nixl_version()

    def make_agent() -> Agent:
        return make(nixl, settings.name, settings.weights)

    make_agent().drop()  # what cannot work says so now
    pushes = ThreadPoolExecutor(PUSH_THREADS, thread_name_prefix="push")
    checks = ThreadPoolExecutor(max(2, os.cpu_count() or 1), thread_name_prefix="check")
    pusher = Pusher(make_agent)
    shelf = Shelf(settings.kind, files, pusher, checks, settings.piece_bytes)
    async with contextlib.AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=0)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        directory = DirectoryClient(http, _find_serving(settings), token)
        receiver = Receiver(
            make_agent,
            version,
            settings.weights.stall_timeout_s,
            pushes,
            checks,
            RECEIVES_AT_ONCE,
        )

        def make_fetch(wish: Wish) -> Fetch:
            return Fetch(
                wish,
                settings.name,
                directory,
                receiver,
                lambda url: HolderClient(http, url, token),
                shelf.begin,
                checks,
            )

        if settings.kind == "relay":
            receiver.prepare()
        reporter = Reporter(settings, directory, shelf)
        fetches = Fetches(shelf, make_fetch)
        routes = Routes(settings, version, shelf, pusher, fetches, reporter, receiver, pushes)
        app = server.make_app(token, routes.table())
        url, runner = await server.start(app, settings.weights.host)
        stack.push_async_callback(runner.cleanup)
        await shelf.restore()
        launch.announce(settings, url)
        logger.info("%s %s answers at %s (%s)", settings.kind, settings.name, url, version)
        lives = (stop.wait(), reporter.run(url), receiver.wear(), files.watch())
        ends = [asyncio.create_task(life) for life in lives]
        for task in ends:
            stack.callback(task.cancel)
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()


def _find_serving(settings: HolderSettings) -> Callable[[], str | None]:
    if settings.serving_url:
        return lambda: settings.serving_url
    folder = RunFolder(settings.run_folder)

    def find() -> str | None:
        role = folder.role("serving")
        return role.url if role is not None else None

    return find
