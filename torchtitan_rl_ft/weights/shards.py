"""Which bytes of a policy's image each rank of a replica group writes.

A rank has a shard of a tensor (of `adapter.to_hf(model.state_dict())`, plain or DTensor). Where the
shards are runs of the tensor's elements in row-major order, each is written from where it is. Equal
shards, which several ranks hold, are split among them. Where they are no runs (sharded by columns),
the tensor is gathered by its ranks, and each writes an equal part. So a group writes every byte
once, and no rank more than its share.

Placement arithmetic is pure; `Survey` is what ranks have to tell one another, once.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import (
    Placement,
    Replicate,
    Shard,
    _StridedShard,
    _StridedShardOffsetMode,
)

from torchtitan_rl_ft.weights.image import Image
from torchtitan_rl_ft.weights.pieces import Range, merge
from torchtitan_rl_ft.weights.tensor_files import ITEM_BYTES

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
}
"""As safetensors names them."""

MIN_PART_BYTES = 1 << 18
"""Smaller parts of a tensor are not worth a range of their own: one of its holders writes all."""

T = TypeVar("T")

Run = tuple[int, int]
"""Elements [begin, end) of a tensor in row-major order."""


class ShardsUnclear(Exception):
    """The ranks of a group do not hold one whole model between them, as far as can be told."""


# One tensor on one mesh -----------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def runs(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[Run, ...] | None:
    """The run of elements that each rank of a mesh holds, in the mesh's order. None when the shards
    are no runs, or not known: the same for all ranks, since they gather the tensor then."""
    found = []
    for coordinate in itertools.product(*map(range, mesh_shape)):
        run = _run(shape, _box(shape, mesh_shape, coordinate, placements))
        if run is None:
            return None
        found.append(run)
    copies = _replicas(mesh_shape, placements)
    covered = sum(end - begin for begin, end in found)
    return tuple(found) if covered == copies * math.prod(shape) else None


def _box(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    placements: tuple[Placement, ...],
) -> list[Sequence[int]] | None:
    """The indices that one rank holds, by dimension of the tensor."""
    box: list[Sequence[int]] = [range(size) for size in shape]
    for at, ranks, placement in zip(coordinate, mesh_shape, placements, strict=True):
        match placement:
            case _StridedShard():
                size, offsets = placement._local_shard_size_and_offset(
                    len(box[placement.dim]), ranks, at, _StridedShardOffsetMode.ALL
                )
                assert isinstance(offsets, list)
                box[placement.dim] = [box[placement.dim][i] for i in offsets[:size]]
            case Shard():
                size, offset = Shard.local_shard_size_and_offset(len(box[placement.dim]), ranks, at)
                box[placement.dim] = box[placement.dim][offset : offset + size]
            case Replicate():
                pass
            case _:
                return None
    return box


def _run(shape: tuple[int, ...], box: list[Sequence[int]] | None) -> Run | None:
    if box is None:
        return None
    if any(not indices for indices in box):
        return 0, 0
    begin, inner, whole = 0, 1, True
    for size, indices in zip(reversed(shape), reversed(box), strict=True):
        first, n = indices[0], len(indices)
        if indices[-1] - first != n - 1 or (n > 1 and not whole):
            return None
        begin += first * inner
        inner *= size
        whole = whole and n == size
    return begin, begin + math.prod(len(indices) for indices in box)


def _replicas(mesh_shape: tuple[int, ...], placements: tuple[Placement, ...]) -> int:
    return math.prod(n for n, p in zip(mesh_shape, placements, strict=True) if p.is_replicate())


@dataclass(frozen=True)
class Placed:
    """A tensor as one rank holds it. `run`: the elements of its shard, None when it is to be
    gathered. `replica` of `replicas`: which one of those of its mesh that hold the same. `ranks`:
    of its mesh; a plain tensor has one of its own."""

    dtype: str
    shape: tuple[int, ...]
    run: Run | None
    replica: int
    replicas: int
    ranks: tuple[int, ...]


def placed(tensor: torch.Tensor, rank: int) -> Placed:
    """Raises ShardsUnclear."""
    if tensor.dtype not in DTYPES:
        raise ShardsUnclear(f"weights of type {tensor.dtype} cannot be published")
    dtype, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Placed(dtype, shape, (0, tensor.numel()), 0, 1, (rank,))
    mesh = tensor.device_mesh
    ranks = tuple(mesh.mesh.flatten().tolist())
    return placed_on(dtype, shape, tuple(mesh.shape), ranks, tensor.placements, rank)


def placed_on(
    dtype: str,
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    ranks: tuple[int, ...],
    placements: tuple[Placement, ...],
    rank: int,
) -> Placed:
    """`ranks`: of the mesh, in its order."""
    place = ranks.index(rank)
    found = runs(shape, mesh_shape, placements)
    if found is None:
        return Placed(dtype, shape, None, place, len(ranks), ranks)
    replica = 0
    coordinate = _coordinate(place, mesh_shape)
    for at, size, placement in zip(coordinate, mesh_shape, placements, strict=True):
        if placement.is_replicate():
            replica = replica * size + at
    return Placed(dtype, shape, found[place], replica, _replicas(mesh_shape, placements), ranks)


def _coordinate(place: int, mesh_shape: tuple[int, ...]) -> list[int]:
    coordinate = []
    for size in reversed(mesh_shape):
        place, at = divmod(place, size)
        coordinate.append(at)
    return coordinate[::-1]


# All tensors on all ranks ---------------------------------------------------------------------


@dataclass(frozen=True)
class Survey:
    """What a rank tells the others of what it holds: names with dtype and shape (their digest,
    when all hold the same), and for each name, sorted, which of `meshes` its tensor is on."""

    digest: str
    meshes: tuple[tuple[int, ...], ...]
    on: tuple[int, ...]
    specs: dict[str, tuple[str, tuple[int, ...]]] | None = None

    @classmethod
    def of(cls, tensors: Mapping[str, Placed]) -> Survey:
        names = sorted(tensors)
        meshes = tuple(sorted({p.ranks for p in tensors.values()}))
        index = {mesh: i for i, mesh in enumerate(meshes)}
        text = "\n".join(f"{n}|{tensors[n].dtype}|{tensors[n].shape}" for n in names)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(digest, meshes, tuple(index[tensors[n].ranks] for n in names))


def specs_of(tensors: Mapping[str, Placed]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensors[name].dtype, tensors[name].shape) for name in sorted(tensors)}


@dataclass(frozen=True)
class Part:
    """What this rank writes of a tensor: elements `run` of the whole, which begin at element
    `local` of its own shard (of the whole tensor when that is gathered); `start` is the first byte
    in the image."""

    name: str
    run: Run
    local: int
    start: int


@dataclass(frozen=True)
class ShardPlan:
    """What one rank writes. `gathered`: a part, perhaps empty, of each tensor that its ranks have
    to gather, in the order in which they do."""

    image: Image
    own: list[Part]
    gathered: list[Part]
    writes_header: bool
    ranges: list[Range] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(end - start for start, end in self.ranges)


def make_plan(mine: Mapping[str, Placed], surveys: Sequence[Survey], rank: int) -> ShardPlan:
    """`surveys`: of all ranks of the group, by rank; with `specs` when their digests differ.

    Raises ShardsUnclear.
    """
    specs = specs_of(mine)
    for survey in surveys:
        for name, spec in (survey.specs or {}).items():
            if specs.setdefault(name, spec) != spec:
                raise ShardsUnclear(f"ranks disagree on tensor {name}: {specs[name]} and {spec}")
    image = Image(specs)
    order = {name: i for i, name in enumerate(image.tensors)}
    rivals = _meshes_by_name(sorted(mine), surveys)
    own: list[Part] = []
    gathered: list[Part] = []
    for name in sorted(mine):
        part = _part(name, mine[name], sorted(rivals[name]), order[name], image)
        if mine[name].run is None:
            gathered.append(part)
        elif part.run[0] < part.run[1]:
            own.append(part)
    ranges = [_range(part, image) for part in (*own, *gathered) if part.run[0] < part.run[1]]
    if rank == 0:
        ranges.append((0, len(image.header)))
    return ShardPlan(image, own, gathered, rank == 0, merge(ranges))


def _meshes_by_name(
    mine: Sequence[str], surveys: Sequence[Survey]
) -> dict[str, set[tuple[int, ...]]]:
    """The meshes that have a whole copy each of the tensors that this rank holds."""
    found: dict[str, set[tuple[int, ...]]] = {name: set() for name in mine}
    for survey in surveys:
        names = mine if survey.specs is None else sorted(survey.specs)
        for name, mesh in zip(names, survey.on, strict=True):
            if name in found:
                found[name].add(survey.meshes[mesh])
    return found


def _part(
    name: str, tensor: Placed, meshes: list[tuple[int, ...]], turn: int, image: Image
) -> Part:
    item = ITEM_BYTES[tensor.dtype]
    held = tensor.run if tensor.run is not None else (0, math.prod(tensor.shape))
    copies = len(meshes) * tensor.replicas
    copy = meshes.index(tensor.ranks) * tensor.replicas + tensor.replica
    begin, end = share(held, copies, copy, turn, min_items=MIN_PART_BYTES // item)
    start = image.tensors[name].start + begin * item
    return Part(name, (begin, end), begin - held[0], start)


def share(run: Run, copies: int, copy: int, turn: int, min_items: int) -> Run:
    """What holder `copy` of `copies` equal ones writes of `run`: an equal part, or all or nothing
    where parts would be small; who has all is a matter of `turn`."""
    begin, end = run
    if end - begin < copies * min_items:
        return run if turn % copies == copy else (begin, begin)
    return begin + (end - begin) * copy // copies, begin + (end - begin) * (copy + 1) // copies


def _range(part: Part, image: Image) -> Range:
    item = ITEM_BYTES[image.tensors[part.name].dtype]
    return part.start, part.start + (part.run[1] - part.run[0]) * item


def check_cover(image: Image, written: Sequence[int]) -> None:
    """`written`: bytes by rank, of ranges that are not known to overlap. Raises ShardsUnclear."""
    if sum(written) != image.nbytes:
        raise ShardsUnclear(
            f"the shards of this layout cannot be told apart: the ranks would write {sum(written)} "
            f'bytes of {image.nbytes}; set rollout.weight_transport = "disk"'
        )


Gather = Callable[[Any], list[Any]]
"""Every rank's value, by rank, on all ranks (GroupLink.gather)."""


def plan_of(tensors: Mapping[str, torch.Tensor], rank: int, gather: Gather) -> ShardPlan:
    """Collective over the group. Raises ShardsUnclear, on all ranks or none."""
    mine = _agreed(gather, lambda: {name: placed(t, rank) for name, t in tensors.items()})
    survey = Survey.of(mine)
    surveys = gather(survey)
    if len({s.digest for s in surveys}) > 1:
        surveys = gather(replace(survey, specs=specs_of(mine)))
    plan = _agreed(gather, lambda: make_plan(mine, surveys, rank))
    check_cover(plan.image, gather(plan.nbytes))
    return plan


def _agreed(gather: Gather, work: Callable[[], T]) -> T:
    """`work()`, unless it raises ShardsUnclear on some rank: then all ranks do."""
    found, problem = None, ""
    try:
        found = work()
    except ShardsUnclear as e:
        problem = str(e)
    if problems := [p for p in gather(problem) if p]:
        raise ShardsUnclear(problems[0])
    assert found is not None
    return found


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, not a copy."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).detach()
