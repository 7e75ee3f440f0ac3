"""What a rank offers, held by real sources and told to serving's own directory."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from source_reader import SourceReader

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rpc.client import RoleRefused
from torchtitan_rl_ft.rpc.server import make_app, start
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.offers import Offered, Offers
from torchtitan_rl_ft.trainer.source import Source
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.publisher import image_of

pytestmark = pytest.mark.timeout(120)

TOKEN = "secret"
DEADLINE_S = 60.0


class Serving:
    """The directory of holders, in a thread with an event loop of its own."""

    def __init__(self, run: RunFolder, weights: WeightsSection) -> None:
        self.reader = SourceReader(run, weights, EventList())
        self._run, self._up = run, threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        assert self._up.wait(DEADLINE_S)

    def _serve(self) -> None:
        async def serve() -> None:
            url, runner = await start(make_app(TOKEN, self.reader.routes()))
            self._run.register("serving", url)
            self._stop = asyncio.Event()
            self._up.set()
            await self._stop.wait()
            await runner.cleanup()

        self._loop.run_until_complete(serve())

    def fetch(self, key: Key, layout_digest: str, nbytes: int) -> bytes | None:
        body = {
            **key._asdict(),
            "layout_digest": layout_digest,
            "nbytes": nbytes,
            "deadline_s": DEADLINE_S,
        }
        done = asyncio.run_coroutine_threadsafe(self.reader.fetch(body), self._loop)
        return done.result(2 * DEADLINE_S)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(DEADLINE_S)
        self._loop.close()


class Rank:
    def __init__(self, path: Path) -> None:
        self.run = RunFolder(path / "run")
        self.run.path.mkdir()
        self.assets = make_tiny_model(path / "model", 0)
        weights = WeightsSection(memory_folder=str(path), piece_mb=1)
        self.serving = Serving(self.run, weights)
        self.source = Source(self.run, weights, 0, 0, TOKEN)
        self.offers = Offers(self.source, GroupLink(), self.assets, 1 << 20)

    def tensors(self, scale: float) -> dict[str, torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        shapes = [(1200, 300), (3,), (700, 513), (2, 2)]
        return {f"layer.{i}": scale * torch.randn(s, generator=g) for i, s in enumerate(shapes)}

    def offer(self, key: Key, scale: float) -> None:
        assert self.offers.offer(self.tensors(scale), key, patient=True) == Offered()
        assert self.offers.settle() is None

    def image(self, key: Key, scale: float) -> bytes:
        """As serving has it; checked against the tensors."""
        tensors = self.tensors(scale)
        layout = image_of(tensors, None)
        found = self.serving.fetch(key, layout.layout_digest, layout.nbytes)
        assert found is not None
        for name, span in layout.tensors.items():
            assert found[span.start : span.end] == tensors[name].numpy().tobytes()
        return found

    def close(self) -> None:
        self.offers.close()
        self.serving.close()


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    yield made
    made.close()


def test_versions_reach_the_directory_whole_and_memory_is_used_again(rank):
    keys = [Key(n, f"{n}" * 32) for n in range(1, 6)]
    files = set()
    for n, key in enumerate(keys, start=1):
        rank.offer(key, scale=n)
        rank.image(key, scale=n)
        folders = rank.source.settings.folder.glob("*/model.safetensors")
        files |= {path.stat().st_ino for path in folders}
    assert len(files) <= 3  # for five versions
    assert rank.source.starts == 1


def test_a_source_that_was_killed_is_started_for_the_next_version_and_holds_the_last(rank):
    first, second = Key(1, "1" * 32), Key(2, "2" * 32)
    rank.offer(first, scale=1)
    rank.image(first, scale=1)
    process.kill(rank.source._child.id)
    while rank.source.runs:
        time.sleep(0.01)
    rank.offer(second, scale=2)
    rank.image(second, scale=2)
    assert rank.source.starts == 2


def test_the_same_version_again_and_one_that_was_not_reserved(rank):
    key = Key(1, "1" * 32)
    rank.offer(key, scale=1)
    rank.offer(key, scale=1)
    rank.image(key, scale=1)
    body = {"step": 9, "token": "9" * 32, "file": "/etc/passwd", "ranges": [[0, 8]], "assets": ""}
    with pytest.raises(RoleRefused, match="reserved"):
        rank.source.post("/v1/offer", body, deadline_s=DEADLINE_S)


def test_small_files_go_with_the_weights(rank):
    key = Key(1, "1" * 32)
    rank.offer(key, scale=1)
    [folder] = rank.source.settings.folder.glob("step-1-*")
    config = json.loads((folder / "config.json").read_text())
    assert config == json.loads((rank.assets / "config.json").read_text())
