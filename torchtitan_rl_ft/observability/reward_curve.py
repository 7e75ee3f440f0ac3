"""The reward over steps, drawn in the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

_BLOCKS = " ▁▂▃▄▅▆▇█"


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means of equal stretches of `values`."""
    n = len(values)
    if n <= width:
        return list(values)
    edges = [i * n // width for i in range(width + 1)]
    return [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]


def bounds(values: Sequence[float]) -> tuple[float, float]:
    """The axis: 0..1 when all rewards lie there, else what they span."""
    low, high = min(0.0, *values), max(1.0, *values)
    return low, high


def sparkline(values: Sequence[float], width: int) -> str:
    """One line of blocks."""
    if not values:
        return ""
    low, high = bounds(values)
    shown = resample(values, width)
    return "".join(_BLOCKS[1 + round((v - low) / (high - low) * 7)] for v in shown)


def terminal_curve(values: Sequence[float], width: int = 60, height: int = 8) -> list[str]:
    """Lines of a bar chart with a labelled axis, top first; none without values."""
    if not values:
        return []
    low, high = bounds(values)
    columns = resample(values, width)
    eighths = [round((v - low) / (high - low) * height * 8) for v in columns]
    lines = []
    for row in range(height - 1, -1, -1):
        bars = "".join(_BLOCKS[max(0, min(8, e - 8 * row))] for e in eighths)
        label = {height - 1: f"{high:.2f}", 0: f"{low:.2f}"}.get(row, "")
        lines.append(f"{label:>6} │{bars}")
    lines.append(f"{'':>6} └{'─' * len(columns)} {len(values)} steps")
    return lines


def save_png(path: Path, steps: Sequence[int], rewards: Sequence[float], title: str) -> None:
    """Write the curve to `path`. Raises OSError."""
    # Imported here: it takes longer than everything else in the process that draws.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, rewards, color="tab:blue", linewidth=1.5)
    axes.set(xlabel="step", ylabel="mean reward", title=title, ylim=bounds(rewards))
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
