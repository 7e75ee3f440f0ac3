"""What the benchmark of weights makes of its measurements."""

import pytest

from benchmarks import weight_sync
from benchmarks.weight_paths import plot
from benchmarks.weight_paths.crew import Sample, median
from benchmarks.weight_sync import BARE, CMA, HOP, TCP, TCP_BARE, TCP_HOP, aims_of, ratios, table


def sample(all_s):
    return Sample(all_s / 2, all_s)


ROWS = {
    ("memcpy", 64, 1): sample(0.01),
    ("socket", 64, 1): sample(0.04),
    (CMA, 64, 1): sample(0.02),
    (TCP, 64, 1): sample(0.08),
    ("socket", 64, 8): sample(0.5),
    (CMA, 64, 8): sample(0.06),
    (TCP, 64, 8): sample(0.3),
    ("memcpy", 2048, 1): sample(0.3),
    ("socket", 2048, 1): sample(1.0),
    ("sha256", 2048, 1): sample(1.5),
    (CMA, 2048, 1): sample(1.0),
    (TCP, 2048, 1): sample(1.2),
    (HOP, 2048, 1): sample(0.5),
    (TCP_HOP, 2048, 1): sample(0.8),
    (BARE, 2048, 1): sample(0.4),
    (TCP_BARE, 2048, 1): sample(0.6),
}
STALLS = {"holders_s": 0.1, "disk_s": 1.0}


def test_aims_are_ratios_of_one_run():
    aims = aims_of(ROWS, STALLS)
    assert {n: pytest.approx(a.value) for n, a in aims.items()} == {
        "stall_to_disk": 0.1,
        "hop_to_memcpy": 0.6,  # of the largest size
        "hop_to_socket": 2.0,
        "hop_to_socket_at_worst_size": 2.0,
        "tcp_hop_to_socket": 1.25,
        "tcp_hop_to_socket_at_worst_size": 1.25,
        "hop_to_bare_library": 0.8,
        "tcp_hop_to_bare_library": 0.75,
        "first_hop_to_sha256": 1.5,
        "8_receivers_to_one": 3.0,  # of the largest size that went to so many
    }
    assert all(a.met for a in aims.values())
    assert aims["8_receivers_to_one"].aim == 4.0


def test_a_hop_is_slower_than_a_socket_at_no_size():
    small = {**ROWS, (TCP_HOP, 64, 1): sample(0.05)}
    aims = aims_of(small, STALLS)
    assert aims["tcp_hop_to_socket"].met
    assert aims["tcp_hop_to_socket_at_worst_size"].value == pytest.approx(0.8)
    assert not aims["tcp_hop_to_socket_at_worst_size"].met


def test_what_was_not_measured_is_left_empty_and_is_no_aim():
    told = ratios(ROWS)
    assert told["rows"] == [
        ["2048", "0.60", "", "0.80", "2.00", "1.25", "0.75", "1.50"],
    ]
    assert len(told["head"]) == 8
    some = {key: x for key, x in ROWS.items() if key[1] == 64 and key[2] == 1}
    assert set(aims_of(some, STALLS)) == {"stall_to_disk"}


def test_the_table_and_the_picture_show_every_row(tmp_path):
    shown = table(ROWS)
    assert len(shown["rows"]) == len(ROWS)
    assert all(len(row) == len(shown["head"]) for row in shown["rows"])
    plot.save(ROWS, tmp_path / "weights.png")
    assert (tmp_path / "weights.png").stat().st_size > 1000


def test_medians_and_sizes():
    assert median([sample(1), sample(3), sample(2)]) == sample(2)
    for megabytes in (16, 64):
        tensors = weight_sync.tensors_of(megabytes << 20)
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        assert nbytes == megabytes << 20
    assert not weight_sync.fits(1 << 60, 1)
