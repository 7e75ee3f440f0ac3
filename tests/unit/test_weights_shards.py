"""Which rank writes which bytes of an image: together all, each once, and the right ones."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from torchtitan_rl_ft.weights import shards
from torchtitan_rl_ft.weights.image import Image
from torchtitan_rl_ft.weights.pieces import total
from torchtitan_rl_ft.weights.shard_writer import ShardWriter, finite_copy
from torchtitan_rl_ft.weights.shards import (
    Placed,
    ShardsUnclear,
    Survey,
    check_cover,
    make_plan,
    placed_on,
    runs,
    share,
    specs_of,
)

SEED = torch.Generator().manual_seed(0)


class Mesh:
    """Ranks of a group, arranged. `sub`: each row of it is a mesh of its own."""

    def __init__(self, shape, first=0):
        self.shape = tuple(shape)
        self.ranks = tuple(range(first, first + math.prod(shape)))

    def coordinate(self, rank):
        place = self.ranks.index(rank)
        found = []
        for size in reversed(self.shape):
            place, at = divmod(place, size)
            found.append(at)
        return found[::-1]


def local(tensor, mesh, placements, rank):
    """What DTensor gives to a rank, by its own splitting."""
    for at, size, placement in zip(mesh.coordinate(rank), mesh.shape, placements, strict=True):
        if placement.is_replicate():
            continue
        pieces, _ = placement._split_tensor(tensor, size, with_padding=False, contiguous=True)
        tensor = pieces[at] if at < len(pieces) else tensor.narrow(placement.dim, 0, 0)
    return tensor


def plans_of(held, ranks):
    """`held`: by rank, {name: Placed}."""
    surveys = [Survey.of(held[r]) for r in ranks]
    if len({s.digest for s in surveys}) > 1:
        surveys = [
            Survey(s.digest, s.meshes, s.on, specs_of(held[r]))
            for r, s in zip(ranks, surveys, strict=True)
        ]
    return [make_plan(held[r], surveys, r) for r in ranks]


def written(tensors, layout, ranks):
    """The image as all ranks write it, and how often each byte was written.

    `layout(name, rank)`: its mesh and placements, or None for a plain tensor.
    """
    held = {r: {} for r in ranks}
    for r, (name, tensor) in itertools.product(ranks, tensors.items()):
        dtype = shards.DTYPES[tensor.dtype]
        if (at := layout(name, r)) is None:
            held[r][name] = Placed(dtype, tuple(tensor.shape), (0, tensor.numel()), 0, 1, (r,))
        else:
            mesh, placements = at
            held[r][name] = placed_on(
                dtype, tuple(tensor.shape), mesh.shape, mesh.ranks, tuple(placements), r
            )
    plans = plans_of(held, ranks)
    image = plans[0].image
    data = torch.zeros(image.nbytes, dtype=torch.uint8)
    times = torch.zeros(image.nbytes, dtype=torch.int32)
    for r, plan in zip(ranks, plans, strict=True):
        mine = {}
        for name, tensor in tensors.items():
            at = layout(name, r)
            gathered = held[r][name].run is None
            mine[name] = tensor if at is None or gathered else local(tensor, *at, r)
        assert ShardWriter(plan, 1 << 20).write(mine, data) is None
        for start, end in plan.ranges:
            times[start:end] += 1
    check_cover(image, [p.nbytes for p in plans])
    return data, times, plans


def expected(tensors):
    image = Image({n: (shards.DTYPES[t.dtype], t.shape) for n, t in tensors.items()})
    body = [tensors[n].contiguous().reshape(-1).view(torch.uint8) for n in image.tensors]
    return torch.cat([torch.frombuffer(bytearray(image.header), dtype=torch.uint8), *body])


def assert_once(tensors, layout, ranks):
    data, times, plans = written(tensors, layout, ranks)
    assert torch.equal(data, expected(tensors))
    assert torch.equal(times, torch.ones_like(times))
    return plans


def some_tensors(shapes, dtype=torch.float32):
    return {f"t{i:02}": torch.randn(shape, generator=SEED).to(dtype) for i, shape in shapes}


LAYOUTS = {
    "FSDP": ((4,), [Shard(0)]),
    "HSDP": ((2, 2), [Replicate(), Shard(0)]),
    "replicated": ((4,), [Replicate()]),
    "TP by columns": ((4,), [Shard(1)]),
    "FSDP and TP on rows": ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "FSDP on rows, TP on columns": ((2, 2), [Shard(0), Shard(1)]),
    "FSDP, replicated over TP": ((2, 2), [Shard(0), Replicate()]),
    "HSDP and TP on rows": (
        (2, 2, 2),
        [Replicate(), _StridedShard(0, split_factor=2), Shard(0)],
    ),
    "FSDP over CP": ((2, 2), [Shard(0), Shard(0)]),
}

shapes = st.lists(
    st.lists(st.integers(0, 13), min_size=2, max_size=3).map(tuple), min_size=1, max_size=6
)


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=40, deadline=None)
@given(shapes=shapes, small=st.booleans())
def test_every_byte_is_written_once_whatever_the_layout(layout, shapes, small):
    mesh_shape, placements = LAYOUTS[layout]
    mesh = Mesh(mesh_shape)
    tensors = some_tensors(enumerate(shapes))
    before = shards.MIN_PART_BYTES
    shards.MIN_PART_BYTES = before if small else 8  # else everything is split among its holders
    try:
        assert_once(tensors, lambda name, rank: (mesh, placements), mesh.ranks)
    finally:
        shards.MIN_PART_BYTES = before


def test_layouts_may_differ_from_tensor_to_tensor():
    whole, names = Mesh((2, 2)), itertools.cycle(LAYOUTS)
    fitting = {n: p for n, (shape, p) in LAYOUTS.items() if shape == (2, 2)}
    tensors = some_tensors(enumerate([(8, 6), (7, 3), (5,), (9, 4), (1, 1), (0, 3), (4, 4, 2)]))
    chosen = {name: next(n for n in names if n in fitting) for name in tensors}
    chosen["t02"] = "FSDP, replicated over TP"
    assert_once(tensors, lambda name, rank: (whole, fitting[chosen[name]]), whole.ranks)


def test_a_tensor_on_a_mesh_of_each_column_is_one_tensor_all_the_same():
    """FSDP alone beside TP: each TP rank has a mesh, and a whole copy, of its own."""
    columns = [Mesh((2,), first=0), Mesh((2,), first=2)]
    tensors = some_tensors(enumerate([(6, 4), (3,), (512, 1025)]))
    plans = assert_once(tensors, lambda name, rank: (columns[rank // 2], [Shard(0)]), (0, 1, 2, 3))
    assert all(p.nbytes > 512 * 1025 * 4 / 5 for p in plans)


def test_ranks_that_hold_different_tensors_write_one_image():
    """Pipeline stages, or experts: each rank has names of its own."""
    tensors = some_tensors(enumerate([(6, 4), (3, 3), (5, 2), (2, 2)]))
    stages = {0: ("t00", "t01"), 1: ("t02", "t03")}
    held = {
        r: {
            n: Placed("F32", tuple(tensors[n].shape), (0, tensors[n].numel()), 0, 1, (r,))
            for n in names
        }
        for r, names in stages.items()
    }
    plans = plans_of(held, (0, 1))
    assert plans[0].image.header == plans[1].image.header
    data = torch.zeros(plans[0].image.nbytes, dtype=torch.uint8)
    for plan in plans:
        ShardWriter(plan, 1 << 20).write(tensors, data)
    assert torch.equal(data, expected(tensors))
    check_cover(plans[0].image, [p.nbytes for p in plans])


def test_ranks_that_disagree_on_a_tensor_are_refused():
    one, two = (
        {"a": Placed("F32", (rows, 2), (0, 2 * rows), 0, 1, (rank,))}
        for rank, rows in enumerate((2, 3))
    )
    with pytest.raises(ShardsUnclear, match="disagree on tensor a"):
        plans_of({0: one, 1: two}, (0, 1))


def test_a_layout_that_leaves_bytes_out_is_refused():
    image = Image({"a": ("F32", (4,))})
    with pytest.raises(ShardsUnclear, match=r"rollout\.weight_transport"):
        check_cover(image, [image.nbytes, 4])


def test_equal_shards_are_spread_evenly():
    mesh = Mesh((4,))
    big, many = [(512, 1024)], [(64,)] * 40
    tensors = some_tensors(enumerate([*big, *many]))
    plans = assert_once(tensors, lambda name, rank: (mesh, [Replicate()]), mesh.ranks)
    sizes = [p.nbytes - (len(p.image.header) if p.writes_header else 0) for p in plans]
    assert max(sizes) - min(sizes) <= 64 * 4


def test_rows_need_no_peer_and_columns_do():
    rows = runs((8, 6), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)))
    assert rows == ((0, 12), (24, 36), (12, 24), (36, 48))
    assert runs((8, 6), (4,), (Shard(1),)) is None
    assert runs((8, 6), (2,), (Partial(),)) is None
    # A rank that holds nothing needs the same as those that hold columns: all must gather.
    assert runs((8, 2), (4,), (Shard(1),)) is None
    assert runs((1, 8), (4,), (Shard(1),)) == ((0, 2), (2, 4), (4, 6), (6, 8))


@given(
    begin=st.integers(0, 100),
    n=st.integers(0, 1000),
    copies=st.integers(1, 9),
    turn=st.integers(0, 20),
    least=st.integers(0, 300),
)
def test_shares_are_a_partition(begin, n, copies, turn, least):
    parts = [share((begin, begin + n), copies, c, turn, least) for c in range(copies)]
    filled = [p for p in parts if p[0] < p[1]]
    assert sum(e - b for b, e in filled) == n
    assert all(a[1] == b[0] for a, b in itertools.pairwise(filled))
    assert total(filled) == n


@pytest.mark.row("I7")
@pytest.mark.parametrize("dtype", list(shards.DTYPES))
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 1, -1])
def test_no_number_that_is_not_finite_goes_unnoticed(dtype, bad, at):
    values = torch.ones(700_000, dtype=dtype)  # several chunks
    target = torch.zeros(values.numel() * values.element_size(), dtype=torch.uint8)
    assert finite_copy(values, target)
    values[at * 699_999 if at == 1 else at] = bad
    assert not finite_copy(values, target)
    assert torch.equal(target, values.view(torch.uint8))


def test_the_largest_numbers_are_finite():
    for dtype in shards.DTYPES:
        values = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
        values[::2] *= -1
        assert finite_copy(values, torch.zeros(64 * values.element_size(), dtype=torch.uint8))


@pytest.mark.row("I7")
def test_the_tensor_is_named():
    mesh = Mesh((2,))
    tensors = some_tensors(enumerate([(4, 2), (4, 2), (4, 2)]))
    tensors["t01"][3, 1] = math.nan
    held = {
        r: {n: placed_on("F32", (4, 2), mesh.shape, mesh.ranks, (Shard(0),), r) for n in tensors}
        for r in mesh.ranks
    }
    plans = plans_of(held, mesh.ranks)
    image = torch.zeros(plans[0].image.nbytes, dtype=torch.uint8)
    found = [
        ShardWriter(plan, 1 << 20).write(
            {n: local(t, mesh, [Shard(0)], r) for n, t in tensors.items()}, image
        )
        for r, plan in zip(mesh.ranks, plans, strict=True)
    ]
    assert found == [None, "t01"]
