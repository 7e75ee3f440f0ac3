"""How fast weights reach engines, all on one host (loopback figures): UCX against other ways.

    python benchmarks/weight_sync.py [--megabytes 64 256 512 1024 2048] [--receivers 1 2 4 8]
        [--repeats 3] [--memory-folder /dev/shm] [--huge-folder DIR] [--quick] [--verify]
        [--out FILE]

One trainer rank offers a version to its source; 1 to 8 relays get it from there and from one
another, and check every byte. Beside it, unchecked: a memcpy of one thread, the bare library (one
agent that writes to another), a TCP socket, gloo's broadcast, a file on disk, torchft's HTTP
transport. All on one host, so these are loopback figures: a network changes what is fastest.
Seconds until the first receiver has all, and until all have; the trainer's stall for one publish,
over holders and to disk. --quick: 64 MB, 1 and 2 receivers. A size is left out where memory is
short; what is checked costs CPU, so with few cores many receivers are slower than the network makes
them. The picture is beside FILE.

A hop is from relay to relay. The first relay also makes the manifest: a sha256 of every tensor, on
all cores, which takes longer than the transfer. A copy between processes goes page by page: over
huge pages it is twice as fast. --huge-folder: a tmpfs that has them (`mount -t tmpfs -o
huge=within_size`), for one more row of hops.

Aims, each at the largest size that was measured: one hop at half the speed of memcpy (same-host
copy) and of the bare library, no slower than a socket (at any size), N receivers in at most
1 + log2(N) times the time of one, a stall of at most half of that of disk.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

from benchmarks.report import Aim, finish  # noqa: E402
from benchmarks.weight_paths import bare, crew, holders, plot, references  # noqa: E402
from benchmarks.weight_paths.crew import Sample  # noqa: E402
from torchtitan_rl_ft.config.weights import WeightsSection  # noqa: E402
from torchtitan_rl_ft.models.tiny import make_tiny_model  # noqa: E402
from torchtitan_rl_ft.weights.publisher import publish  # noqa: E402

CMA, TCP = "holders", "holders, tcp"
ALONE = "holders, relays give nothing"
HOP, TCP_HOP = "relay to relay", "relay to relay, tcp"
HUGE_HOP = "relay to relay, huge pages"
BARE, TCP_BARE = "bare library", "bare library, tcp"
RATIOS = {
    "hop_to_memcpy": (HOP, "memcpy", 0.5),
    "hop_of_huge_pages_to_memcpy": (HUGE_HOP, "memcpy", 0.5),
    "hop_to_bare_library": (HOP, BARE, 0.5),
    "hop_to_socket": (HOP, "socket", 1.0),
    "tcp_hop_to_socket": (TCP_HOP, "socket", 1.0),
    "tcp_hop_to_bare_library": (TCP_HOP, TCP_BARE, 0.5),
    "first_hop_to_sha256": (CMA, "sha256", 1.0),
}
"""What of which way, and how much of it is the aim."""

TENSOR_BYTES = 4 << 20
HELD = 2
"""Versions that every holder has memory for."""

Rows = dict[tuple[str, int, int], Sample]
"""Median by way, megabytes, receivers."""


def tensors_of(nbytes: int) -> dict[str, torch.Tensor]:
    """Layers as large as those of a small model."""
    count = max(1, nbytes // TENSOR_BYTES)
    each = nbytes // count // 2
    return {f"layer.{i:04d}": torch.randn(each // 1024, 1024).bfloat16() for i in range(count)}


def fits(nbytes: int, receivers: int) -> bool:
    """Relays and source hold versions, the trainer has the weights; a quarter stays free."""
    needed = nbytes * (HELD * (receivers + 1) + 2)
    return needed < 0.75 * psutil.virtual_memory().available


def other_ways(nbytes: int, receivers: int, folder: Path) -> dict[str, Callable[[], crew.Way]]:
    return {
        "socket": lambda: references.Socket(nbytes, receivers),
        "gloo broadcast": lambda: references.Gloo(nbytes, receivers),
        "disk": lambda: references.Disk(nbytes, folder),
        "torchft HTTP": lambda: references.TorchftHttp(nbytes),
    }


def sites(folder: Path, nbytes: int, memory_folder: str) -> dict[str, holders.Site]:
    """Ways over holders. One piece per 32 MB, as a job has it."""
    usual, tensors = WeightsSection(memory_folder=memory_folder), tensors_of(nbytes)
    tcp = WeightsSection(ucx_tls="tcp", memory_folder=memory_folder)
    return {
        CMA: holders.Site(folder, usual, tensors),
        TCP: holders.Site(folder, tcp, tensors),
        ALONE: holders.Site(folder, usual, tensors, relays_give=False),
    }


def disk_stall_s(tensors: dict[str, torch.Tensor], folder: Path, repeats: int) -> float:
    """What a trainer waits for when it writes a policy folder: gathered, hashed, durable."""
    assets = make_tiny_model(folder / "assets", 0)
    took = []
    for step in range(repeats):
        began = time.monotonic()
        publish(
            tensors,
            target=folder / f"policy-{step % 2}",
            assets=assets,
            step=step,
            token=f"{step:032x}",
            writer=True,
            buffer_bytes=1 << 28,
        )
        took.append(time.monotonic() - began)
    return statistics.median(took)


def hops(
    made: dict[str, holders.Site], nbytes: int, repeats: int, huge_folder: str | None
) -> dict[str, Sample]:
    """From relay to relay, and the library alone."""
    found = {}
    if huge_folder is not None:
        weights = WeightsSection(memory_folder=huge_folder)
        site = replace(made[CMA], weights=weights)
        found[HUGE_HOP] = crew.median(holders.measure_hops(site, repeats))
    for way, hop, alone in ((CMA, HOP, BARE), (TCP, TCP_HOP, TCP_BARE)):
        found[hop] = crew.median(holders.measure_hops(made[way], repeats))
        found[alone] = crew.median(bare.bare(nbytes, made[way].weights, repeats))
    return found


def measure(
    megabytes: list[int],
    receivers: list[int],
    repeats: int,
    memory_folder: str,
    huge_folder: str | None,
) -> tuple[Rows, dict[str, float], list[str]]:
    """Medians, stalls in seconds (of the largest size), and what was left out."""
    rows: Rows = {}
    stalls: dict[str, float] = {}
    left_out = []
    for size in megabytes:
        nbytes = size << 20
        rows["memcpy", size, 1] = crew.median(references.memcpy(nbytes, repeats))
        rows["sha256", size, 1] = crew.median(references.sha256(nbytes, repeats))
        for n in receivers:
            if not fits(nbytes, n):
                left_out.append(f"{size} MB to {n} receivers: not enough memory")
                continue
            with tempfile.TemporaryDirectory(dir=".") as temp:  # a disk, where /tmp may be none
                folder = Path(temp).resolve()
                for name, make in other_ways(nbytes, n, folder).items():
                    rows[name, size, n] = crew.median(crew.measure(make(), n, repeats))
                    show(name, size, n, rows[name, size, n])
                made = sites(folder, nbytes, memory_folder)
                if n == receivers[0] and not fits(nbytes, 2):
                    left_out.append(f"{size} MB from relay to relay: not enough memory")
                elif n == receivers[0]:
                    for name, sample in hops(made, nbytes, repeats, huge_folder).items():
                        rows[name, size, 1] = sample
                        show(name, size, 1, sample)
                for name, site in made.items():
                    samples, offerings = holders.measure(site, n, repeats)
                    rows[name, size, n] = crew.median(samples)
                    show(name, size, n, rows[name, size, n])
                    if name == CMA and n == receivers[0]:
                        stalls = {
                            "megabytes": size,
                            "holders_s": statistics.median(o.stall_s for o in offerings),
                            "hash_beside_s": statistics.median(o.hash_s for o in offerings),
                            "disk_s": disk_stall_s(site.tensors, folder, repeats),
                        }
    return rows, stalls, left_out


def show(name: str, size: int, n: int, sample: Sample) -> None:
    speed = size * 2**20 / sample.all_s / 1e9
    print(
        f"{name:30} {size:5} MB to {n}: first {sample.first_s:7.3f} s, all {sample.all_s:7.3f} s "
        f"({speed:.2f} GB/s to each)",
        flush=True,
    )


def ratio(rows: Rows, size: int, way: str, of: str) -> float | None:
    """Speed of `way` to one receiver as a multiple of that of `of`; None: one was not measured."""
    if (way, size, 1) not in rows or (of, size, 1) not in rows:
        return None
    return rows[of, size, 1].all_s / rows[way, size, 1].all_s


def ratios(rows: Rows) -> dict[str, Any]:
    """Of one hop, by size."""
    cells = []
    for size in sorted({s for _, s, _ in rows}):
        found = [ratio(rows, size, way, of) for way, of, _ in RATIOS.values()]
        if any(x is not None for x in found):
            cells.append([str(size), *("" if x is None else f"{x:.2f}" for x in found)])
    head = ["MB", *(name.replace("_", " ") for name in RATIOS)]
    return {"title": "Speed of one hop as a multiple, by size", "head": head, "rows": cells}


def aims_of(rows: Rows, stalls: dict[str, float]) -> dict[str, Aim]:
    found = {"stall_to_disk": Aim(stalls["holders_s"] / stalls["disk_s"], 0.5)}
    for name, (way, of, aim) in RATIOS.items():
        by_size = {s: ratio(rows, s, way, of) for w, s, _ in rows if w == way}
        told = {s: value for s, value in by_size.items() if value is not None}
        if told:
            found[name] = Aim(told[max(told)], aim, at_most=False)
        if told and of == "socket":  # never slower, at no size
            found[f"{name}_at_worst_size"] = Aim(min(told.values()), aim, at_most=False)
    both = {(n, s) for name, s, n in rows if name == CMA and (CMA, s, 1) in rows}
    most, of = max(both, default=(1, 0))
    if most > 1:
        growth = rows[CMA, of, most].all_s / rows[CMA, of, 1].all_s
        found[f"{most}_receivers_to_one"] = Aim(growth, 1 + math.log2(most))
    return found


def table(rows: Rows) -> dict[str, Any]:
    cells = [
        [
            name,
            str(size),
            str(n),
            f"{s.first_s:.3f}",
            f"{s.all_s:.3f}",
            f"{size * 2**20 / s.all_s / 1e9:.2f}",
            f"{rows['memcpy', size, 1].all_s / s.all_s:.2f}",
        ]
        for (name, size, n), s in sorted(rows.items(), key=lambda item: item[0][1:])
    ]
    head = ["way", "MB", "receivers", "first, s", "all, s", "GB/s to each", "of memcpy"]
    return {"title": "Seconds until receivers have all bytes", "head": head, "rows": cells}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, nargs="+", default=[64, 256, 512, 1024, 2048])
    parser.add_argument("--receivers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory-folder", default=WeightsSection().memory_folder)
    parser.add_argument("--huge-folder")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes, receivers, repeats = args.megabytes, args.receivers, args.repeats
    if args.quick:
        sizes, receivers, repeats = sizes[:1], receivers[:2], min(repeats, 2)
    rows, stalls, left_out = measure(
        sorted(sizes), sorted(receivers), repeats, args.memory_folder, args.huge_folder
    )
    for line in left_out:
        print(f"left out: {line}")
    aims = aims_of(rows, stalls)
    figures: dict[str, Any] = {"stall": stalls, "left_out": left_out}
    if args.out is not None:
        shown = {n: {"value": a.value, "aim": a.aim, "met": a.met} for n, a in aims.items()}
        found = {"figures": figures, "tables": [ratios(rows), table(rows)], "aims": shown}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        plot.save(rows, args.out.with_suffix(".png"))
    return finish("weight_sync", figures, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
