"""Four ranks that write the image of one model, sharded in several ways, over gloo.

    python tests/fakes/shard_ranks.py FOLDER

FOLDER/<layout>-<step>.<rank> is what a rank has written, FOLDER/<layout>.whole what it should come
to; FOLDER/told.<rank> is JSON: by layout the ranges, and what a NaN on the last rank came to.
"""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.offers import Offers
from torchtitan_rl_ft.trainer.publishing import Announcer, DiskPublisher, HolderPublisher
from torchtitan_rl_ft.weights.publisher import NonFiniteWeights
from torchtitan_rl_ft.weights.shards import local_tensor

RANKS = 4
STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(768, 515, bias=False)  # rows that four ranks cannot share evenly
        self.down = nn.Linear(516, 768, bias=False)
        self.norm = nn.Parameter(torch.randn(6))
        self.plain = nn.Parameter(torch.randn(3, 3))


def fsdp(model: nn.Module, mesh: DeviceMesh) -> None:
    fully_shard(model, mesh=mesh)


def layouts() -> dict[str, nn.Module]:
    square = {"mesh_shape": (2, 2)}
    hsdp = init_device_mesh("cpu", **square, mesh_dim_names=("replicate", "shard"))
    mixed = init_device_mesh("cpu", **square, mesh_dim_names=("dp", "tp"))
    found = {name: Block() for name in ("alone", "fsdp", "hsdp", "tp", "fsdp_tp", "beside_tp")}
    fsdp(found["fsdp"], init_device_mesh("cpu", (RANKS,)))
    fsdp(found["hsdp"], hsdp)
    parallelize_module(found["tp"], init_device_mesh("cpu", (RANKS,)), STYLES)
    parallelize_module(found["fsdp_tp"], mixed["tp"], {"down": RowwiseParallel()})
    fsdp(found["fsdp_tp"], mixed["dp"])
    fsdp(found["beside_tp"], mixed["dp"])  # one mesh for each column of ranks
    return found


class Memory:
    """A source as this process sees it; files instead of a process."""

    starts, runs = 1, True

    def __init__(self, folder: Path, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self.layout, self.nbytes = "", 0
        self.ranges: dict[str, list] = {}

    def reserve(self, key: object, header: bytes) -> Path:
        step = key.step  # type: ignore[attr-defined]
        path = self._folder / f"{self.layout}-{step}.{self._rank}"
        path.touch()
        os.truncate(path, self.nbytes)
        return path

    def post(self, path: str, body: dict, deadline_s: float) -> None:
        self.ranges[self.layout] = body["ranges"]

    def close(self) -> None:
        pass


class Live:
    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def tensors(self) -> dict[str, torch.Tensor]:
        return {f"model.{n}": p for n, p in self._model.named_parameters()}


class Serving:
    def post(self, path: str, body: dict, deadline_s: float) -> dict:
        return {"version": body.get("nbytes", 0)}


def rank_main(folder: Path, rank: int) -> None:
    torch.manual_seed(0)
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    link, memory = GroupLink(), Memory(folder, rank)
    told: dict[str, object] = {"ranges": memory.ranges}
    for name, model in layouts().items():
        live = Live(model)
        offers = Offers(memory, link, folder, buffer_bytes=1 << 20)  # type: ignore[arg-type]
        made = HolderPublisher(
            live,  # type: ignore[arg-type]
            Announcer(Serving(), link),  # type: ignore[arg-type]
            link,
            offers,
            wait_relays="all",
        )
        memory.layout, memory.nbytes = name, offers.image(live.tensors()).nbytes
        told[f"version {name}"] = made.publish(1, "ab" * 16)
        image = offers.image(live.tensors())
        wholes = {n: getattr(t, "full_tensor", lambda t=t: t)() for n, t in live.tensors().items()}
        if rank == 0:
            body = [wholes[n].detach().contiguous().numpy().tobytes() for n in image.tensors]
            (folder / f"{name}.whole").write_bytes(image.header + b"".join(body))
        if rank == RANKS - 1:
            shard = local_tensor(live.tensors()["model.up.weight"])
            shard.reshape(-1)[-1:] = math.nan
        disk = DiskPublisher(
            live,  # type: ignore[arg-type]
            Announcer(Serving(), link),  # type: ignore[arg-type]
            link,
            assets=folder,
            folder=folder / "weights",
            buffer_bytes=1 << 20,
        )
        for over, publisher in (("holders", made), ("disk", disk)):
            try:
                publisher.publish(2, "cd" * 16)
            except NonFiniteWeights as e:
                told[f"NaN {name} {over}"] = str(e)
    (folder / f"told.{rank}").write_text(json.dumps(told))
    dist.destroy_process_group()


def main() -> int:
    folder = Path(sys.argv[1])
    children = []
    for rank in range(RANKS):  # forked: libraries are imported once
        if (pid := os.fork()) == 0:
            try:
                rank_main(folder, rank)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
