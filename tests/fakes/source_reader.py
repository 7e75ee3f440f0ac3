"""What serving does with the sources of trainers, without relays and UCX: serving's own directory,
and the shards read from the files in which sources hold them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from pathlib import Path
from typing import Any

from aiohttp import web

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.observability.events import EventSink
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.directory import Directory
from torchtitan_rl_ft.serving.holder_book import HolderBook
from torchtitan_rl_ft.serving.holder_routes import HolderRoutes
from torchtitan_rl_ft.trainer.source import sources_run_id
from torchtitan_rl_ft.weights.holder.piece_digest import piece_digest
from torchtitan_rl_ft.weights.holder.settings import Key, run_memory
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE
from torchtitan_rl_ft.weights.pieces import Piece, cover, piece_from_json

READ_S = 0.02


class SourceReader:
    """RUN/policies.jsonl gets a line for each version that a group's sources hold whole: step,
    token, group, layout_digest, and the sha256 of the image."""

    def __init__(self, run: RunFolder, weights: WeightsSection, events: EventSink) -> None:
        self._run = run
        self._memory = run_memory(weights.memory_folder, sources_run_id(run))
        self._book = HolderBook(Directory(), events, Changes())
        self._pieces: dict[tuple[Key, str], list[Piece]] = {}  # by version and source
        self._digests: dict[Key, str] = {}
        self._told: set[tuple[Key, str]] = set()

    def routes(self) -> list[web.RouteDef]:
        table = HolderRoutes(self._book).table()
        own = [r for r in table if r.path != "/v1/holders" or r.method != "POST"]
        self._report = next(r for r in table if r not in own).handler
        return [*own, web.post("/v1/holders", self._reported)]

    async def _reported(self, request: web.Request) -> web.Response:
        body = await request.json()
        for held in body["held"]:
            key = Key(held["step"], held["token"])
            self._digests[key] = held["layout_digest"]
            if (pieces := held.get("pieces")) is not None:
                self._pieces[key, body["name"]] = [piece_from_json(p) for p in pieces]
                self._tell(key, body["name"].partition(".")[0])
        return await self._report(request)  # type: ignore[operator]

    def _tell(self, key: Key, group: str) -> None:
        if (key, group) in self._told or (image := self.image(key, group)) is None:
            return
        self._told.add((key, group))
        line = {
            "step": key.step,
            "token": key.token,
            "group": group,
            "layout_digest": self._digests[key],
            "sha256": hashlib.sha256(image).hexdigest(),
        }
        with open(self._run.path / "policies.jsonl", "a") as f:
            f.write(json.dumps(line) + "\n")

    def image(self, key: Key, group: str = "") -> bytes | None:
        """All bytes of a version, from the sources of one group, or of all; None while they have
        not all of it, or have given it up."""
        held = {n: p for (k, n), p in self._pieces.items() if k == key and n.startswith(group)}
        covered = cover(p for pieces in held.values() for p in pieces)
        if len(covered) != 1 or covered[0][0] != 0:
            return None
        data = bytearray(covered[0][1])
        for name, pieces in held.items():
            if (path := self._file(name, key)) is None:
                return None
            whole = path.read_bytes()
            if len(whole) != len(data):
                return None
            for piece in pieces:
                part = whole[piece.start : piece.end]
                if piece_digest(part) != piece.digest:
                    return None
                data[piece.start : piece.end] = part
        return bytes(data)

    def _file(self, name: str, key: Key) -> Path | None:
        folder = self._memory / name / f"step-{key.step}-{key.token[:8]}"
        return path if (path := folder / WEIGHTS_FILE).exists() else None

    async def fetch(self, body: dict[str, Any]) -> bytes | None:
        """What `/v1/publish` announces, once sources hold it; None at the deadline."""
        key = Key(body["step"], body["token"])
        self._book.want(key, body["layout_digest"], body["nbytes"])
        end = time.monotonic() + body["deadline_s"]
        while (image := self.image(key)) is None:
            if time.monotonic() > end:
                return None
            await asyncio.sleep(READ_S)
        assert self._digests[key] == body["layout_digest"] and len(image) == body["nbytes"]
        return image
