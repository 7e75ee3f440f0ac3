"""The HTTP routes of a holder. What they are given is checked here, before anything is done."""

from __future__ import annotations

import asyncio
import base64
import os
import sys
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from torchtitan_rl_ft.rpc.server import RequestError, json_body
from torchtitan_rl_ft.weights.assets import ASSET_FILES
from torchtitan_rl_ft.weights.holder import client
from torchtitan_rl_ft.weights.holder.agent import NixlError
from torchtitan_rl_ft.weights.holder.client import Offer
from torchtitan_rl_ft.weights.holder.directory import Superseded
from torchtitan_rl_ft.weights.holder.fetch import FetchFailed, OtherPolicy, Wish
from torchtitan_rl_ft.weights.holder.fetches import Fetches
from torchtitan_rl_ft.weights.holder.files import NoMemory
from torchtitan_rl_ft.weights.holder.push import PushBusy, Pusher, PushFailed
from torchtitan_rl_ft.weights.holder.receive import Receiver
from torchtitan_rl_ft.weights.holder.reporter import Reporter
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key
from torchtitan_rl_ft.weights.holder.shelf import NotReserved, Shelf
from torchtitan_rl_ft.weights.holder.versions import Version
from torchtitan_rl_ft.weights.image import Image, ImageInvalid
from torchtitan_rl_ft.weights.manifest import MANIFEST_FILE
from torchtitan_rl_ft.weights.pieces import Range, clip, contains, merge

TELL_TIMEOUT_S = 2.0
FAILED = 502
MAX_STALL_S = 60.0
"""No receiver bars others for longer."""


class Routes:
    def __init__(
        self,
        settings: HolderSettings,
        nixl: str,
        shelf: Shelf,
        pusher: Pusher,
        fetches: Fetches,
        reporter: Reporter,
        receiver: Receiver,
        pushes: Executor,
    ) -> None:
        self._settings, self._nixl = settings, nixl
        self._shelf, self._pusher, self._fetches = shelf, pusher, fetches
        self._reporter, self._receiver, self._pushes = reporter, receiver, pushes

    def table(self) -> list[web.RouteDef]:
        own = {
            "source": [
                web.post("/v1/reserve", self.reserve),
                web.post("/v1/offer", self.offer),
            ],
            "relay": [web.post("/v1/fetch", self.fetch)],
        }
        return [
            web.post("/v1/push", self.push),
            web.post("/v1/pieces", self.pieces),
            web.get("/v1/assets", self.assets),
            web.get("/v1/status", self.status),
            *own[self._settings.kind],
        ]

    # A source's ----------------------------------------------------------------------------

    async def reserve(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        key = _key(body)
        try:
            image = Image.from_header(base64.b64decode(_field(body, "header", str)))
        except (ImageInvalid, ValueError) as e:
            raise RequestError(400, f"header: {e}") from e
        try:
            path = await self._shelf.reserve(key, image)
        except NoMemory as e:
            raise RequestError(client.NO_MEMORY, str(e)) from e
        return web.json_response({"file": str(path)})

    async def offer(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        key, file = _key(body), Path(_field(body, "file", str))
        assets = Path(_field(body, "assets", str)) if body.get("assets") else None
        try:
            image = self._shelf.reserved_image(key)
            await self._shelf.offer(key, file, _ranges(body, image), assets)
        except NotReserved as e:
            raise RequestError(404, str(e)) from e
        known = await self._reporter.tell(key, TELL_TIMEOUT_S)
        return web.json_response({"known": known})

    # A relay's -----------------------------------------------------------------------------

    async def fetch(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        manifest_digest = body.get("manifest_digest")
        wish = Wish(
            _key(body),
            _field(body, "layout_digest", str),
            _field(body, "nbytes", int),
            None if manifest_digest is None else str(manifest_digest),
        )
        timeout_s = _seconds(body, "timeout_s")
        try:
            version = await self._fetches.fetch(wish, timeout_s)
        except NoMemory as e:
            raise RequestError(client.NO_MEMORY, str(e)) from e
        except Superseded as e:
            raise RequestError(client.SUPERSEDED, str(e)) from e
        except OtherPolicy as e:
            raise RequestError(client.OTHER_POLICY, str(e)) from e
        except FetchFailed as e:
            raise RequestError(FAILED, str(e)) from e
        await self._reporter.tell(wish.key, TELL_TIMEOUT_S)
        return web.json_response(
            {
                "path": str(version.folder),
                "manifest_digest": version.manifest_digest,
                "seconds": version.seconds,
                "bytes_from": version.bytes_from,
            }
        )

    # Both ----------------------------------------------------------------------------------

    async def push(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        version = self._version(_key(body))
        try:
            offer = Offer.from_json(body)
        except (ValueError, KeyError, TypeError, OverflowError) as e:
            raise RequestError(400, f"not memory to push into: {type(e).__name__}: {e}") from e
        parts = self._parts_for(body, version, offer)
        stall_timeout_s = min(_seconds(body, "stall_timeout_s"), MAX_STALL_S)
        with self._shelf.using(version.key):
            try:
                await asyncio.get_running_loop().run_in_executor(
                    self._pushes, self._pusher.push, version.memory, parts, offer, stall_timeout_s
                )
            except PushBusy as e:
                raise RequestError(client.BUSY, str(e)) from e
            except PushFailed as e:
                raise RequestError(FAILED, str(e)) from e
            except NixlError as e:
                raise RequestError(client.NOT_ABLE, str(e)) from e
        return web.json_response({"bytes": sum(end - start for start, end in parts)})

    def _parts_for(self, body: dict[str, Any], version: Version, offer: Offer) -> list[Range]:
        """What is to be pushed, in pieces. Raises RequestError: nothing is written then."""
        image = version.image
        if (theirs := _field(body, "layout_digest", str)) != image.layout_digest:
            raise RequestError(
                client.OTHER_MODEL,
                f"another model is held here as {version.key}: layout_digest is "
                f"{image.layout_digest}, not {theirs}",
            )
        if offer.nixl != self._nixl:
            raise RequestError(
                client.OTHER_LIBRARY,
                f"the receiver has {offer.nixl}, this holder {self._nixl}: install the same "
                "version everywhere",
            )
        if offer.nbytes != image.nbytes:
            raise RequestError(
                400, f"the receiver's memory has {offer.nbytes} bytes, the image {image.nbytes}"
            )
        return self._clip(body, version)

    async def pieces(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        version = self._version(_key(body))
        parts = [p.range for p in version.pieces]
        if "ranges" in body:
            parts = self._clip(body, version)
        with self._shelf.using(version.key):
            pieces = await self._shelf.pieces(version, parts)
        return web.json_response(
            {
                "header": base64.b64encode(version.image.header).decode(),
                "pieces": [p.to_json() for p in pieces],
            }
        )

    def _clip(self, body: dict[str, Any], version: Version) -> list[Range]:
        """Raises RequestError."""
        ranges = _ranges(body, version.image)
        if not contains(version.ranges, ranges):
            raise RequestError(400, f"not all of these ranges of {version.key} are held here")
        return clip(version.pieces, ranges)

    async def assets(self, request: web.Request) -> web.Response:
        version = self._version(_key(request.query))
        files = {
            name: base64.b64encode((version.folder / name).read_bytes()).decode()
            for name in (*ASSET_FILES, MANIFEST_FILE)
            if (version.folder / name).exists()
        }
        return web.json_response({"files": files})

    async def status(self, request: web.Request) -> web.Response:
        process = psutil.Process()
        memory = process.memory_info()
        return web.json_response(
            {
                "name": self._settings.name,
                "kind": self._settings.kind,
                "nixl": self._nixl,
                "held": [v.report(with_pieces=False) for v in self._shelf.held],
                "pushes": self._pusher.counts(),
                "fetches": {**self._fetches.counts(), "abandoned": self._receiver.abandoned},
                "receiver": self._receiver.to_json(),
                "process": {
                    "pid": os.getpid(),
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                    "rss_bytes": memory.rss,
                    "private_bytes": memory.rss - memory.shared,
                },
            }
        )

    def _version(self, key: Key) -> Version:
        """Raises RequestError."""
        try:
            return self._shelf[key]
        except KeyError:
            raise RequestError(404, f"{key} is not held here") from None


def _key(fields: Any) -> Key:
    """Raises RequestError."""
    try:
        return Key(int(fields["step"]), str(fields["token"]))
    except (ValueError, KeyError, TypeError, OverflowError) as e:
        raise RequestError(400, f"no version is named: step and token ({e})") from e


def _field(body: dict[str, Any], name: str, kind: Any) -> Any:
    """Raises RequestError."""
    value = body.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(400, f"{name}: {value!r}")
    return value


def _seconds(body: dict[str, Any], name: str) -> float:
    """Raises RequestError: a limit that never ends is none."""
    value = _field(body, name, (int, float))
    if not (0 < value <= sys.float_info.max):
        raise RequestError(400, f"{name} is {value}: a number of seconds above 0")
    return float(value)


def _ranges(body: dict[str, Any], image: Image) -> list[Range]:
    """Byte ranges inside the image. Raises RequestError."""
    try:
        ranges = [(int(start), int(end)) for start, end in body["ranges"]]
    except (ValueError, KeyError, TypeError, OverflowError) as e:
        raise RequestError(400, f"ranges: {type(e).__name__}: {e}") from e
    for start, end in ranges:
        if not 0 <= start < end <= image.nbytes:
            raise RequestError(400, f"[{start}, {end}) is no range of {image.nbytes} bytes")
    return merge(ranges)
