"""The canonical image and its pieces: what must hold for all models, shards and losses."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchtitan_rl_ft.weights.holder.piece_digest import piece_digest
from torchtitan_rl_ft.weights.image import Image, ImageInvalid
from torchtitan_rl_ft.weights.pieces import (
    SMALL_FRACTION,
    Piece,
    clip,
    contains,
    cover,
    cut,
    intersect,
    merge,
    piece_from_json,
    subtract,
    total,
)
from torchtitan_rl_ft.weights.tensor_files import ITEM_BYTES, TensorFile

names = st.text(min_size=1, max_size=12).filter(lambda n: n != "__metadata__")
shapes = st.lists(st.integers(0, 40), max_size=3)
specs = st.dictionaries(names, st.tuples(st.sampled_from(sorted(ITEM_BYTES)), shapes), max_size=12)
images = specs.map(Image)

UNIVERSE = 400
spans = st.tuples(st.integers(0, UNIVERSE), st.integers(0, UNIVERSE)).map(
    lambda r: (min(r), max(r))
)
range_lists = st.lists(spans, max_size=12)


def bytes_of(ranges):
    return {i for start, end in ranges for i in range(start, end)}


def is_canonical(ranges):
    """Sorted, none empty, none touching the next."""
    return all(s < e for s, e in ranges) and all(
        a[1] < b[0] for a, b in zip(ranges, ranges[1:], strict=False)
    )


@settings(deadline=None)
@given(range_lists, range_lists)
def test_ranges_are_sets_of_bytes(a, b):
    assert bytes_of(merge(a)) == bytes_of(a)
    assert is_canonical(merge(a))
    assert bytes_of(subtract(a, b)) == bytes_of(a) - bytes_of(b)
    assert is_canonical(subtract(a, b))
    assert bytes_of(intersect(a, b)) == bytes_of(a) & bytes_of(b)
    assert contains(a, b) == (bytes_of(a) >= bytes_of(b))
    assert total(merge(a)) == len(bytes_of(a))


@settings(deadline=None)
@given(images, st.data(), st.integers(1, 5000))
def test_pieces_cover_their_ranges_once_and_are_small_enough(image, data, piece_bytes):
    edge = st.integers(0, image.nbytes)
    ranges = data.draw(st.lists(st.tuples(edge, edge).map(sorted).map(tuple), max_size=5))
    cuts = cut(image, ranges, piece_bytes)
    assert merge(cuts) == merge(ranges)
    assert total(cuts) == total(merge(ranges))  # no overlaps
    assert all(0 < end - start <= piece_bytes for start, end in cuts)
    assert cuts == sorted(cuts)


@settings(deadline=None)
@given(images, st.integers(64, 5000))
def test_a_tensor_that_is_not_small_begins_a_piece(image, piece_bytes):
    cuts = cut(image, [(0, image.nbytes)], piece_bytes)
    starts, ends = {c[0] for c in cuts}, {c[1] for c in cuts}
    for span in image.tensors.values():
        if span.end - span.start >= max(1, piece_bytes // SMALL_FRACTION):
            assert {span.start} <= starts and {span.end} <= ends
    assert len(image.header) in starts | {image.nbytes}


@settings(deadline=None)
@given(range_lists, range_lists)
def test_both_sides_of_a_push_cut_the_same_pieces(held, wanted):
    pieces = [Piece(s, e, "0" * 32) for s, e in merge(held)]
    parts = clip(pieces, wanted)
    assert bytes_of(parts) == bytes_of(held) & bytes_of(wanted)
    assert total(parts) == len(bytes_of(parts))
    assert all(any(p.start <= s and e <= p.end for p in pieces) for s, e in parts)
    again = clip([Piece(s, e, "0" * 32) for s, e in parts], wanted)
    assert again == parts


@settings(deadline=None)
@given(specs)
def test_an_image_is_what_safetensors_reads(given_specs):
    image = Image(given_specs)
    read = Image.from_header(image.header)
    assert read.layout_digest == image.layout_digest
    assert list(read.tensors) == sorted(given_specs)
    assert image.boundaries[-1] == image.nbytes


def test_the_file_of_an_image(tmp_path):
    image = Image({"b": ("F32", [3]), "a": ("BF16", [2, 2]), "empty": ("F32", [0, 4])})
    (tmp_path / "model.safetensors").write_bytes(
        image.header + bytes(range(image.nbytes - len(image.header)))
    )
    file = TensorFile(tmp_path / "model.safetensors")
    assert file.tensors == image.tensors
    assert bytes(file.raw("a")) == bytes(range(8))
    file.close()
    assert image.names_in(0, image.nbytes) == ["a", "b"]
    start = image.tensors["b"].start
    assert image.names_in(start - 1, start + 1) == ["a", "b"]
    assert image.names_in(start, start + 1) == ["b"]
    assert image.names_in(0, len(image.header)) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda h: h.replace(b'"F32"', b'"F33"'),
        lambda h: h.replace(b"[3]", b"[4]"),
        lambda h: h.replace(b"[3]", b"[-3]"),
        lambda h: h[:-8],
        lambda h: h + b" " * 8,
        lambda h: b"x" * len(h),
        lambda h: b"",
    ],
)
def test_another_header_is_refused(spoil):
    header = Image({"a": ("F32", [3]), "b": ("F32", [2])}).header
    with pytest.raises(ImageInvalid):
        Image.from_header(spoil(header))


def test_a_header_that_is_not_sorted_is_refused():
    image = Image({"a": ("F32", [1]), "b": ("F32", [1])})
    fields = json.loads(image.header[8:])
    text = json.dumps(dict(reversed(fields.items())), separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with pytest.raises(ImageInvalid, match="canonical"):
        Image.from_header(len(text).to_bytes(8, "little") + text)


def test_pieces_travel_as_json():
    piece = Piece(3, 9, piece_digest(b"x"))
    assert piece_from_json(json.loads(json.dumps(piece.to_json()))) == piece
    assert cover([piece, Piece(9, 12, piece.digest)]) == [(3, 12)]
    for bad in ([9, 3, piece.digest], [-1, 3, piece.digest], [1, 3, "short"], [1, 3], [1, 2, 3, 4]):
        with pytest.raises((ValueError, TypeError)):
            piece_from_json(bad)
