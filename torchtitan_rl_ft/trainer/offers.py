"""This rank's shards of each version, copied into the memory of its source and offered from there.

The rank stands still for the copy alone; the source hashes and tells the directory while training
goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchtitan_rl_ft.rpc.client import RoleRefused, RoleUnreachable
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.mapped_images import ImageUnusable, MappedImages
from torchtitan_rl_ft.trainer.source import Source
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.image import Image
from torchtitan_rl_ft.weights.shard_writer import ShardWriter
from torchtitan_rl_ft.weights.shards import plan_of

logger = logging.getLogger(__name__)

OFFER_DEADLINE_S = 10.0
HASH_BYTES_PER_S = 100e6
"""The least that is expected of a busy machine."""

PROBLEMS = (RoleUnreachable, RoleRefused, OSError, ImageUnusable)


@dataclass(frozen=True)
class Offered:
    """How far this rank came with a version: at best, both are None. `non_finite` is a tensor that
    holds NaN or infinity."""

    non_finite: str | None = None
    problem: str | None = None


class Offers:
    """All ranks of a group call it alike."""

    def __init__(self, source: Source, link: GroupLink, assets: Path, buffer_bytes: int) -> None:
        self._source, self._link = source, link
        self._assets, self._buffer_bytes = assets, buffer_bytes
        self._images = MappedImages()
        self._writer: ShardWriter | None = None
        self._handing: _Handing | None = None
        self._held: tuple[Key, int] | None = None  # and the source's process, as a count

    def image(self, tensors: Mapping[str, torch.Tensor]) -> Image:
        """Collective when it is asked for the first time. Raises ShardsUnclear, on all ranks."""
        return self._ready(tensors).plan.image

    def offer(self, tensors: Mapping[str, torch.Tensor], key: Key, *, patient: bool) -> Offered:
        """Write this rank's parts and have the source offer them; what it answers is for `settle`.
        Collective. Unless `patient`, a version is left out while the last one is being offered:
        other groups offer it too.

        Raises ShardsUnclear, on all ranks; everything else is in the answer.
        """
        writer = self._ready(tensors)
        if self._handing is not None and (patient or self._handing.done):
            self.settle()
        held = self._held == (key, self._source.starts) and self._source.runs
        path, image, problem = None, None, None
        if not held and self._handing is None:
            try:
                path = self._source.reserve(key, writer.plan.image.header)
                image = self._images.open(path, writer.plan.image.nbytes, writer.plan.ranges)
            except PROBLEMS as e:
                problem = f"{type(e).__name__}: {e}"
                logger.warning("%s is not offered: %s", key, problem)
        # Also without an image: others gather with us.
        non_finite = writer.write(tensors, image)
        if non_finite is not None:
            logger.warning("%s is not offered: %s holds NaN or infinity", key, non_finite)
        if image is not None and non_finite is None:
            self._hand_over(key, path, writer)
        return Offered(non_finite, problem)

    def settle(self) -> str | None:
        """Wait until the source has answered. Returns why the last version is not offered."""
        handing, self._handing = self._handing, None
        if handing is None:
            return None
        problem = handing.wait()
        if problem is None:
            self._held = handing.key, handing.life
            return None
        logger.warning("%s is not offered: %s", handing.key, problem)
        if handing.silent:
            self._source.end()
        return problem

    def close(self) -> None:
        self._source.end()
        if self._handing is not None:  # at once: nobody answers any more
            self._handing.wait()
        self._images.close()
        self._source.close()

    def _ready(self, tensors: Mapping[str, torch.Tensor]) -> ShardWriter:
        if self._writer is None:
            plan = plan_of(tensors, self._link.rank, self._link.gather)
            self._writer = ShardWriter(plan, self._buffer_bytes)
        return self._writer

    def _hand_over(self, key: Key, file: Path | None, writer: ShardWriter) -> None:
        body = {
            "step": key.step,
            "token": key.token,
            "file": str(file),
            "ranges": writer.plan.ranges,
            "assets": str(self._assets),
        }
        limit_s = OFFER_DEADLINE_S + writer.plan.nbytes / HASH_BYTES_PER_S
        self._held = None
        self._handing = _Handing(self._source, key, body, limit_s)


class _Handing:
    """One request to the source, under way in a thread."""

    def __init__(self, source: Source, key: Key, body: dict[str, Any], limit_s: float) -> None:
        self.key, self.life = key, source.starts
        self.silent = False
        self._source, self._body, self._limit_s = source, body, limit_s
        self._problem: str | None = None
        self._thread = threading.Thread(target=self._run, name="offer", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> str | None:
        self._thread.join()
        return self._problem

    def _run(self) -> None:
        try:
            self._source.post("/v1/offer", self._body, deadline_s=self._limit_s)
        except (RoleUnreachable, RoleRefused) as e:
            self.silent = isinstance(e, RoleUnreachable)
            self._problem = f"{type(e).__name__}: {e}"
