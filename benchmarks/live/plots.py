"""The live benchmark as one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.live.tables import Row

COLOURS = {"strict": "#1f5f8b", "paper": "#9cc4dd", "wall": "#8a8a8a"}


def save(found: Sequence[Row], path: Path) -> None:
    """Both ratios and the wall time of every arm, a panel per load. Raises OSError."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    loads = list(dict.fromkeys(r.load for r in found))
    figure, axes = plt.subplots(
        len(loads),
        2,
        figsize=(11, 1.2 + 0.55 * len(found) + 0.8 * len(loads)),
        height_ratios=[sum(r.load == load for r in found) for load in loads],
        squeeze=False,
    )
    for load, (ratio, wall) in zip(loads, axes, strict=True):
        these = [r for r in found if r.load == load]
        at = range(len(these))
        names = [f"{r.name}\n{r.faults} faults, step {r.step_s:.2f} s" for r in these]
        _bars(ratio, [i - 0.2 for i in at], [r.strict for r in these], "strict", _spread(these))
        _bars(ratio, [i + 0.2 for i in at], [r.paper for r in these], "paper")
        for i, row in enumerate(these):
            if row.strict_fault_free is not None:
                ratio.plot([row.strict_fault_free] * 2, [i - 0.4, i], color="black", linewidth=1)
            ratio.text(0.01, i - 0.2, f"{row.strict:.2f}", va="center", fontsize=7, color="white")
        ratio.set(xlim=(0, 1), xlabel="ETTR (line: without the faults)", title=f"load {load}")
        ratio.set_yticks(list(at), names, fontsize=7)
        ratio.invert_yaxis()
        ratio.legend(fontsize=7, loc="lower right")
        wall.barh(list(at), [r.wall_s for r in these], 0.6, color=COLOURS["wall"])
        wall.set(xlabel="end to end, s", title=f"{these[0].steps} steps")
        wall.set_yticks(list(at), ["" for _ in at])
        wall.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, at: list[float], values: list[float], kind: str, spread: Any = None) -> None:
    look = {"color": COLOURS[kind], "ecolor": "black", "capsize": 2}
    axis.barh(at, values, 0.38, label=kind, xerr=spread, **look)


def _spread(these: Sequence[Row]) -> list[list[float]]:
    return [[r.strict - r.strict_least for r in these], [r.strict_most - r.strict for r in these]]
