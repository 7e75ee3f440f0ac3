"""Tables for the terminal, plots, and the JSON of all figures."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.simulator.experiments import ScaleRow  # noqa: E402
from benchmarks.simulator.job import Result  # noqa: E402
from benchmarks.simulator.targets import Target, Verdict  # noqa: E402
from benchmarks.simulator.validation import TOLERANCE_POINTS, Comparison  # noqa: E402


def print_targets(console: Console, targets: Sequence[Target]) -> None:
    table = Table("", "figure", "predicted", "one run", "target", "at a step of", "source")
    for t in targets:
        goal = f"{'>= ' if t.at_least else ''}{t.target:.4g} ± {t.tolerance:g}"
        step = "" if t.step_s is None else f"{t.step_s:g} s"
        spread = f"± {t.predicted.spread:.1f}"
        digits = 2 if t.tolerance < 1 else 1
        table.add_row(
            t.verdict, t.name, t.predicted.text(digits=digits), spread, goal, step, t.source
        )
    console.print(table)
    told: set[str] = set()
    for t in targets:
        if t.verdict is Verdict.APART and t.reason not in told:
            told.add(t.reason)
            console.print(f"apart: {t.name}: {t.reason}", soft_wrap=True, highlight=False)
    steps = sorted({t.step_s for t in targets if t.step_s and t.source.startswith("RobustRL")})
    console.print(
        "step times that the published figures need, each for itself: "
        + ", ".join(f"{s:g} s" for s in steps),
        soft_wrap=True,
    )


def print_scales(console: Console, rows: Sequence[ScaleRow], step_s: float, calm: Result) -> None:
    """`calm`: without faults."""
    console.print(
        f"ETTR in %, strict / paper (± 95 % of both); steps of {step_s:g} s, every step is saved; "
        f"without faults {100 * calm.strict:.1f} / {100 * calm.paper:.1f}",
        soft_wrap=True,
    )
    names = list(dict.fromkeys(r.strategy for r in rows))
    table = Table("GPUs", "rate", "engines fail", *names)
    cells: dict[tuple[int, str, float], dict[str, str]] = {}
    for r in rows:
        key = (r.gpus, r.rate, r.engine_rate_share)
        half_width = 100 * max(r.strict.half_width, r.paper.half_width)
        text = f"{100 * r.strict.mean:.1f} / {100 * r.paper.mean:.1f} (± {half_width:.1f})"
        cells.setdefault(key, {})[r.strategy] = text
    for (gpus, rate, share), by_name in cells.items():
        often = "as trainers" if share == 1 else f"1 : {1 / share:.0f}"
        table.add_row(f"{gpus:,}", rate, often, *(by_name.get(n, "") for n in names))
    console.print(table)


def print_validation(console: Console, comparisons: Sequence[Comparison]) -> None:
    table = Table("", "live arm", "seed", "definition", "predicted %", "measured %", "points")
    for c in comparisons:
        table.add_row(
            "met" if c.met else "MISSED",
            c.strategy,
            str(c.seed),
            c.definition,
            f"{100 * c.predicted:.1f}",
            f"{100 * c.measured:.1f}",
            f"{c.points:+.1f} (± {TOLERANCE_POINTS:g})",
        )
    console.print(table)


def to_json(
    targets: Sequence[Target],
    scales: Sequence[ScaleRow],
    sweep: Sequence[dict[str, Any]],
    validation: Sequence[Comparison],
    about: dict[str, Any],
) -> str:
    data = {
        "benchmark": "simulator",
        **about,
        "targets": [{**asdict(t), "verdict": str(t.verdict)} for t in targets],
        "sweep": list(sweep),
        "scales": [asdict(r) for r in scales],
        "validation": [{**asdict(c), "points": c.points, "met": c.met} for c in validation],
    }
    return json.dumps(_finite(data), indent=1) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no infinities."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def plot_sweep(file: Path, sweep: Sequence[dict[str, Any]]) -> None:
    figure, (time_axis, ettr_axis) = plt.subplots(1, 2, figsize=(10, 4))
    percent = [row["faults_percent"] for row in sweep]
    for axis, key, published, label in (
        (time_axis, "time_percent", (-2.2, -12.2), "time against full restart, %"),
        (ettr_axis, "ettr_points", (2.7, 15.7), "ETTR above full restart, points"),
    ):
        means = [row[key]["mean"] for row in sweep]
        axis.errorbar(percent, means, [row[key]["spread"] for row in sweep], label="simulated")
        axis.plot((2, 10), published, "o", label="published (RobustRL)")
        axis.set_xlabel("steps with a trainer fault, %")
        axis.set_ylabel(label)
        axis.legend()
    _save(figure, file)


def plot_scales(file: Path, rows: Sequence[ScaleRow]) -> None:
    rates = list(dict.fromkeys(r.rate for r in rows))
    figure, axes = plt.subplots(
        1, len(rates), figsize=(5 * len(rates), 4), sharey=True, squeeze=False
    )
    for axis, rate in zip(axes[0], rates, strict=True):
        of_rate = [r for r in rows if r.rate == rate and r.engine_rate_share == 1]
        for name in dict.fromkeys(r.strategy for r in of_rate):
            mine = [r for r in of_rate if r.strategy == name]
            axis.errorbar(
                [r.gpus for r in mine],
                [100 * r.paper.mean for r in mine],
                [100 * r.paper.half_width for r in mine],
                marker="o",
                label=name,
            )
        axis.set_xscale("log")
        axis.set_xlabel("GPUs")
        axis.set_title(f"{rate} failures per 1,000 machines and day")
    axes[0][0].set_ylabel("ETTR (paper's definition), %")
    axes[0][0].legend()
    _save(figure, file)


def _save(figure: Any, file: Path) -> None:
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
