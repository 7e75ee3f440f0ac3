"""A holder look-alike without UCX: the routes of a holder over local HTTP, which carries the bytes
as well. Takes a holder's command line (HolderSettings as JSON).

A relay gets what it lacks from those whom serving names, and writes it to its folder in memory. A
source has what `POST /v1/offer {"folder"}` names: a complete policy folder.

Faults are set by `POST /fault {name: value}`:

    push_s=S       each piece that it gives takes S seconds
    push_status=N  a push is answered N at once
    hang_push      a push is never answered
    die_in_push    it kills itself half-way through a push
    die_in_fetch   it kills itself when it has got the first piece
    fetch_status=N a fetch is answered N at once
    mute           it tells serving nothing
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from torchtitan_rl_ft.rpc.server import RequestError, json_body, make_app, start
from torchtitan_rl_ft.run_folder import TOKEN_ENV, ProcessId, RunFolder
from torchtitan_rl_ft.weights.holder.piece_digest import piece_digest
from torchtitan_rl_ft.weights.holder.settings import HolderSettings, Key
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE, Image
from torchtitan_rl_ft.weights.manifest import (
    MANIFEST_FILE,
    Manifest,
    read_manifest,
    tensor_entry,
    write_manifest,
)
from torchtitan_rl_ft.weights.pieces import Piece, contains, cover, cut, subtract
from torchtitan_rl_ft.weights.tensor_files import TensorFile

TELL_S = 0.1
ASK_S = 2.0


class FakeHolder:
    def __init__(self, settings: HolderSettings, token: str) -> None:
        self._settings, self._token = settings, token
        self._headers = {"Authorization": f"Bearer {token}"}
        self._folders: dict[Key, Path] = {}
        self._pieces: dict[Key, list[Piece]] = {}
        self._images: dict[Key, Image] = {}
        self._known: set[Key] = set()
        self._keep: list[Key] = []
        self._fetches: dict[Key, asyncio.Task[dict[str, Any]]] = {}
        self._pushing = False
        self._faults: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._url = ""

    async def run(self) -> None:
        for folder in self._settings.folder.glob("step-*"):
            with contextlib.suppress(Exception):
                self._take(folder)
        app = make_app(
            self._token,
            [
                web.post("/v1/offer", self.offer),
                web.post("/v1/fetch", self.fetch),
                web.post("/v1/push", self.push),
                web.get("/v1/pieces", self.pieces),
                web.get("/v1/assets", self.assets),
                web.get("/v1/status", self.status),
                web.post("/fault", self.fault),
            ],
        )
        async with aiohttp.ClientSession(headers=self._headers) as self._http:
            self._url, _ = await start(app)
            while True:
                await self._tell()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TELL_S):
                        await self._changed.wait()
                self._changed.clear()

    # Serving --------------------------------------------------------------------------------

    @property
    def _serving(self) -> str | None:
        if self._settings.serving_url:
            return self._settings.serving_url
        address = RunFolder(self._settings.run_folder).role("serving")
        return None if address is None else address.url

    async def _tell(self) -> None:
        if self._faults.get("mute") or (serving := self._serving) is None:
            return
        me = ProcessId.current()
        held = [
            {
                "step": key.step,
                "token": key.token,
                "layout_digest": self._images[key].layout_digest,
                "whole": self._settings.kind == "relay",
                **(
                    {"pieces": [p.to_json() for p in self._pieces[key]]}
                    if self._settings.kind == "source" and key not in self._known
                    else {}
                ),
            }
            for key in self._folders
        ]
        body = {
            "name": self._settings.name,
            "kind": self._settings.kind,
            "url": self._url,
            "pid": me.pid,
            "start_time": me.start_time,
            "host": socket.gethostname(),
            "held": held,
        }
        with contextlib.suppress(aiohttp.ClientError):
            async with self._http.post(serving + "/v1/holders", json=body) as response:
                if response.status == 200:
                    answer = await response.json()
                    self._known = {Key(*k) for k in answer["known"]}
                    self._keep = [Key(*k) for k in answer["keep"]]
                    if self._settings.kind == "relay":
                        self._drop()

    def _drop(self) -> None:
        """What is not needed any more, but for the newest."""
        for key in list(self._folders)[:-1]:
            if key not in self._keep:
                shutil.rmtree(self._folders.pop(key))

    # Versions -------------------------------------------------------------------------------

    def _take(self, folder: Path) -> Key:
        manifest = read_manifest(folder)
        key = Key(manifest.step, manifest.token)
        image = Image({n: (t.dtype, t.shape) for n, t in manifest.tensors.items()})
        data = (folder / WEIGHTS_FILE).read_bytes()
        if data[: len(image.header)] != image.header:
            raise ValueError(f"{folder} holds no canonical image")
        self._pieces[key] = [
            Piece(a, b, piece_digest(data[a:b]))
            for a, b in cut(image, [(0, image.nbytes)], 1 << 16)
        ]
        self._images[key], self._folders[key] = image, folder
        return key

    async def offer(self, request: web.Request) -> web.Response:
        self._take(Path((await json_body(request))["folder"]))
        self._changed.set()
        return web.json_response({})

    async def fetch(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        if status := self._faults.get("fetch_status"):
            raise RequestError(status, "as told")
        key = Key(body["step"], body["token"])
        task = self._fetches.get(key)
        if task is None or (task.done() and (task.exception() or key not in self._folders)):
            task = self._fetches[key] = asyncio.create_task(self._get(key, body))
        async with asyncio.timeout(body["timeout_s"]):
            answer = await asyncio.shield(task)
        if body["manifest_digest"] not in (None, answer["manifest_digest"]):
            raise RequestError(422, f"{key} has another manifest than {body['manifest_digest']}")
        return web.json_response(answer)

    async def _get(self, key: Key, body: dict[str, Any]) -> dict[str, Any]:
        began = time.monotonic()
        folder = self._settings.folder / f"step-{key.step}-{key.token[-8:]}"
        if key in self._folders:
            return _answer(self._folders[key], 0.0, {})
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        data = bytearray(body["nbytes"])
        missing = [(0, len(data))]
        taken: dict[str, int] = {}
        while missing:
            leases = await self._lease(key, missing)
            parts = await asyncio.gather(
                *(self._receive(key, x, data, folder, taken) for x in leases)
            )
            for got in parts:
                missing = subtract(missing, got)
        (folder / WEIGHTS_FILE).write_bytes(data)
        _complete(folder, key)
        if self._take(folder) != key:
            raise ValueError(f"{folder} is not {key}")
        self._changed.set()
        return _answer(folder, time.monotonic() - began, taken)

    async def _lease(self, key: Key, missing: list[Any]) -> list[dict[str, Any]]:
        body = {
            "name": self._settings.name,
            "step": key.step,
            "token": key.token,
            "missing": missing,
            "timeout_s": ASK_S,
        }
        async with self._http.post(f"{self._serving}/v1/holders/lease", json=body) as response:
            answer = await response.json()
            if response.status != 200:
                raise RequestError(response.status, answer["error"])
            return answer["leases"]

    async def _receive(
        self, key: Key, lease: dict[str, Any], data: bytearray, folder: Path, taken: dict[str, int]
    ) -> list[Any]:
        """The ranges that came; serving is told."""
        got, cause = [], None
        try:
            await self._copy_assets(key, lease["url"], folder)
            for start, end in lease["ranges"]:
                for a in range(start, end, 1 << 16):
                    b = min(a + (1 << 16), end)
                    data[a:b] = await self._piece(key, lease["url"], a, b)
                    got.append((a, b))
                    taken[lease["name"]] = taken.get(lease["name"], 0) + b - a
                    if self._faults.get("die_in_fetch"):
                        os.kill(os.getpid(), signal.SIGKILL)
        except (aiohttp.ClientError, TimeoutError, ValueError) as e:
            cause = f"{type(e).__name__}: {e}"
        told = {"lease": lease["id"], "ok": cause is None, "cause": cause}
        async with self._http.post(f"{self._serving}/v1/holders/returned", json=told):
            return got

    async def _piece(self, key: Key, url: str, start: int, end: int) -> bytes:
        body = {"step": key.step, "token": key.token, "ranges": [[start, end]]}
        limit = aiohttp.ClientTimeout(total=self._settings.weights.stall_timeout_s)
        async with self._http.post(url + "/v1/push", json=body, timeout=limit) as response:
            data = await response.read()
            if response.status != 200 or len(data) != end - start:
                raise ValueError(f"status {response.status}")
            return data

    async def _copy_assets(self, key: Key, url: str, folder: Path) -> None:
        params = {"step": str(key.step), "token": key.token}
        async with self._http.get(url + "/v1/assets", params=params) as response:
            for name, text in (await response.json())["files"].items():
                (folder / name).write_bytes(base64.b64decode(text))

    # Given ----------------------------------------------------------------------------------

    async def push(self, request: web.Request) -> web.Response:
        body = await json_body(request)
        key = Key(body["step"], body["token"])
        if key not in self._folders:
            raise RequestError(404, f"{key} is not here")
        if status := self._faults.get("push_status"):
            raise RequestError(status, "as told")
        if self._pushing:
            raise RequestError(409, "one push at a time")
        self._pushing = True
        try:
            if self._faults.get("hang_push"):
                await asyncio.sleep(3600)
            await asyncio.sleep(self._faults.get("push_s", 0))
            if self._faults.get("die_in_push"):
                os.kill(os.getpid(), signal.SIGKILL)
            data = (self._folders[key] / WEIGHTS_FILE).read_bytes()
            if not contains(cover(self._pieces[key]), body["ranges"]):
                raise RequestError(404, "not all of it is here")
            return web.Response(body=b"".join(data[a:b] for a, b in body["ranges"]))
        finally:
            self._pushing = False

    async def pieces(self, request: web.Request) -> web.Response:
        key = Key(int(request.query["step"]), request.query["token"])
        header = base64.b64encode(self._images[key].header).decode()
        told = [p.to_json() for p in self._pieces[key]]
        return web.json_response({"header": header, "pieces": told})

    async def assets(self, request: web.Request) -> web.Response:
        folder = self._folders[Key(int(request.query["step"]), request.query["token"])]
        files = {
            f.name: base64.b64encode(f.read_bytes()).decode()
            for f in folder.iterdir()
            if f.name not in (WEIGHTS_FILE, MANIFEST_FILE)
        }
        return web.json_response({"files": files})

    async def status(self, request: web.Request) -> web.Response:
        return web.json_response({"held": [list(k) for k in self._folders]})

    async def fault(self, request: web.Request) -> web.Response:
        self._faults |= await json_body(request)
        return web.json_response({})


def _complete(folder: Path, key: Key) -> None:
    file = TensorFile(folder / WEIGHTS_FILE)
    entries = {
        n: tensor_entry(t.dtype, t.shape, file.raw(n), WEIGHTS_FILE)
        for n, t in file.tensors.items()
    }
    file.close()
    write_manifest(folder, Manifest.build(step=key.step, token=key.token, tensors=entries))


def _answer(folder: Path, seconds: float, taken: dict[str, int]) -> dict[str, Any]:
    return {
        "path": str(folder),
        "manifest_digest": read_manifest(folder).digest,
        "seconds": seconds,
        "bytes_from": taken,
    }


if __name__ == "__main__":
    asyncio.run(FakeHolder(HolderSettings.from_json(sys.argv[1]), os.environ[TOKEN_ENV]).run())
