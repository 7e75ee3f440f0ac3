"""Time to all receivers, by way: as they grow in number, and as the weights grow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from benchmarks.weight_paths.crew import Sample


def save(rows: Mapping[tuple[str, int, int], Sample], path: Path) -> None:
    """`rows` by way, megabytes, receivers. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (growing, larger) = plt.subplots(1, 2, figsize=(12, 5))
    size = max(s for name, s, n in rows if n > 1 or name != "memcpy")
    for name in dict.fromkeys(name for name, _, _ in rows):
        by_n = sorted((n, x.all_s) for (w, s, n), x in rows.items() if w == name and s == size)
        by_size = sorted((s, x.all_s) for (w, s, n), x in rows.items() if w == name and n == 1)
        if len(by_n) > 1:
            growing.plot(*zip(*by_n, strict=True), marker="o", label=name)
        elif by_n:
            growing.axhline(by_n[0][1], linestyle=":", color="gray", label=name)
        speeds = [(s, s * 2**20 / all_s / 1e9) for s, all_s in by_size]
        if speeds:
            larger.plot(*zip(*speeds, strict=True), marker="o", label=name)
    growing.set(xlabel="receivers", ylabel="s until all have it", title=f"{size} MB")
    growing.set_xscale("log", base=2)
    growing.set_yscale("log")
    larger.set(xlabel="MB", ylabel="GB/s", title="one receiver")
    larger.set_xscale("log", base=2)
    growing.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
