"""A trainer process that waits for the place of a lost group (docs/architecture.md, "Standby
trainers").

It waits in one of two forms: imported (before anything of a group exists) or built (with model,
optimizer and the process group of its ranks). Rank 0 is asked over HTTP; the other ranks sleep in a
store until it tells them, so no collective can run into its timeout meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from aiohttp import web

from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.run_folder import (
    ATTEMPT_ENV,
    REPLICA_ENV,
    RUN_ENV,
    STANDBY_ENV,
    STANDBY_PORT_ENV,
    RunFolder,
)
from torchtitan_rl_ft.trainer import watch

logger = logging.getLogger(__name__)

BUILT, IMPORTED = "built", "imported"
FOREVER = timedelta(days=3650)
PLACE_KEY = "place"


@dataclass(frozen=True)
class Place:
    """What a promotion gives: the group to be, its count of starts, the devices of its ranks."""

    replica_id: int
    attempt: int
    devices: tuple[int, ...] | None = None

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Place:
        """Raises ValueError."""
        try:
            devices = body.get("devices")
            return cls(
                int(body["replica_id"]),
                int(body["attempt"]),
                tuple(int(d) for d in devices) if devices is not None else None,
            )
        except (KeyError, TypeError, ValueError) as e:
            raise ValueError(f"not a place: {body!r} ({e})") from None


class Desk:
    """Where a standby is asked to take a place. The first place is the one."""

    def __init__(self) -> None:
        self._taken = asyncio.get_running_loop().create_future()

    async def place(self) -> Place:
        return await self._taken

    async def promote(self, request: web.Request) -> web.Response:
        try:
            place = Place.from_json(await request.json())
        except ValueError as e:
            raise server.RequestError(400, str(e)) from None
        if not self._taken.done():
            self._taken.set_result(place)
        elif self._taken.result() != place:
            raise server.RequestError(409, f"it has a place already: {self._taken.result()}")
        return web.json_response({})


def waits() -> bool:
    """Whether this process is a standby that has no place yet."""
    return STANDBY_ENV in os.environ


def await_place(form: str) -> Place | None:
    """Wait for a place, if this process is a standby of this form; None at once if it is not.

    The environment is that of the group's own process afterwards.
    """
    name, _, wanted = os.environ.get(STANDBY_ENV, "").partition(":")
    if not name or wanted != form:
        return None
    run = RunFolder(os.environ[RUN_ENV])
    phase = watch.begin(run.phases)
    phase.enter("standby")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store(rank, ranks) if ranks > 1 else None
    if rank == 0:
        if store is not None:
            store.wait([_ready(r) for r in range(1, ranks)], FOREVER)
        place = asyncio.run(_serve(name, run))
        if store is not None:
            store.set(PLACE_KEY, json.dumps(asdict(place)))
            # The store lives in this process: the others read before it can go away.
            store.wait([_told(r) for r in range(1, ranks)], FOREVER)
    else:
        assert store is not None
        store.set(_ready(rank), "")
        store.wait([PLACE_KEY], FOREVER)
        place = Place.from_json(json.loads(store.get(PLACE_KEY)))
        store.set(_told(rank), "")
    _become(place, rank)
    phase.rename(f"trainer-{place.replica_id}")
    phase.enter("starting")
    logger.info("%s takes the place of trainer-%d", name, place.replica_id)
    return place


async def _serve(name: str, run: RunFolder) -> Place:
    desk = Desk()
    app = server.make_app(run.token(), [web.post("/v1/promote", desk.promote)])
    url, runner = await server.start(app)
    try:
        run.register(name, url)
        return await desk.place()
    finally:
        await runner.cleanup()


def _store(rank: int, ranks: int) -> dist.Store:
    """Raises RuntimeError in a call, in a rank other than 0, when rank 0 has died."""
    port = int(os.environ[STANDBY_PORT_ENV])
    host = os.environ["MASTER_ADDR"]
    return dist.TCPStore(host, port, ranks, is_master=rank == 0, wait_for_workers=False)


def _ready(rank: int) -> str:
    return f"ready-{rank}"


def _told(rank: int) -> str:
    return f"told-{rank}"


def _become(place: Place, rank: int) -> None:
    os.environ[REPLICA_ENV] = str(place.replica_id)
    os.environ[ATTEMPT_ENV] = str(place.attempt)
    del os.environ[STANDBY_ENV]
    if place.devices is not None:
        # Not CUDA_VISIBLE_DEVICES: what has been imported may have looked at it already.
        os.environ["LOCAL_RANK"] = str(place.devices[rank])
