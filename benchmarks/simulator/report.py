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
from matplotlib.axes import Axes  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from benchmarks.simulator.experiments import ScaleRow  # noqa: E402
from benchmarks.simulator.job import Result  # noqa: E402
from benchmarks.simulator.targets import Target, Verdict  # noqa: E402
from benchmarks.simulator.validation import TOLERANCE_POINTS, Comparison  # noqa: E402


def print_targets(console: Console, targets: Sequence[Target]) -> None:
    table = Table(*TARGETS_HEAD)
    for t in targets:
        table.add_row(*target_cells(t))
    console.print(table)
    for name, reason in reasons(targets).items():
        console.print(f"apart: {name}: {reason}", soft_wrap=True, highlight=False)


TARGETS_HEAD = ("", "figure", "predicted", "one run", "target", "at a step of", "source")


def wanted(t: Target) -> str:
    return f"{'>= ' if t.at_least else ''}{t.target:.4g} ± {t.tolerance:g}"


def target_cells(t: Target) -> tuple[str, ...]:
    goal = wanted(t)
    step = "" if t.step_s is None else f"{t.step_s:g} s"
    digits = 2 if t.tolerance < 1 else 1
    spread = f"± {t.predicted.spread:.{digits}f}"
    return (str(t.verdict), t.name, t.predicted.text(digits=digits), spread, goal, step, t.source)


APART_NOTE = "contradicts other published figures; does not fail --verify"


def reasons(targets: Sequence[Target]) -> dict[str, str]:
    """Each once, by the figures that it is told of."""
    names: dict[str, list[str]] = {}
    for t in targets:
        if t.verdict is Verdict.APART:
            names.setdefault(t.reason, []).append(t.name)
    return {"; ".join(of): reason for reason, of in names.items()}


def print_verdict(console: Console, targets: Sequence[Target], missed: Sequence[str]) -> None:
    """`missed`: what fails --verify."""
    apart = [t.name for t in targets if t.verdict is Verdict.APART]
    for told in (
        f"missed, fails --verify: {', '.join(missed) or 'none'}",
        f"not reproduced, does not fail --verify: {', '.join(apart) or 'none'}",
        FITTED,
    ):
        console.print(told, soft_wrap=True, highlight=False)


FITTED = (
    "fitted to the figures they are compared with: step times, the failure rate at 100K GPUs, what "
    "a second is worth; restart times are given, their ratio is no prediction (docs/simulator.md)"
)


def print_scales(console: Console, rows: Sequence[ScaleRow], step_s: float, calm: Result) -> None:
    """`calm`: without faults."""
    console.print(
        f"{SCALES_TITLE}; steps of {step_s:g} s; "
        f"without faults {100 * calm.strict:.1f} / {100 * calm.paper:.1f}",
        soft_wrap=True,
    )
    head, cells = scale_cells(rows)
    table = Table(*head)
    for row in cells:
        table.add_row(*row)
    console.print(table)


SCALES_TITLE = (
    "ETTR in %, strict / paper (± 95 % of both), every step is saved; rate: failures per 1,000 "
    "machines and day"
)


def scale_cells(rows: Sequence[ScaleRow]) -> tuple[list[str], list[list[str]]]:
    """Head and rows: strategies beside one another."""
    names = list(dict.fromkeys(r.strategy for r in rows))
    found: dict[tuple[int, str, float], dict[str, str]] = {}
    for r in rows:
        half_width = 100 * max(r.strict.half_width, r.paper.half_width)
        text = f"{100 * r.strict.mean:.1f} / {100 * r.paper.mean:.1f} (± {half_width:.1f})"
        found.setdefault((r.gpus, r.rate, r.engine_rate_share), {})[r.strategy] = text
    cells = []
    for (gpus, rate, share), by_name in found.items():
        often = "as trainers" if share == 1 else f"1 : {1 / share:.0f}"
        cells.append([f"{gpus:,}", rate, often, *(by_name.get(n, "") for n in names)])
    return ["GPUs", "rate", "engines fail", *names], cells


def print_validation(console: Console, comparisons: Sequence[Comparison]) -> None:
    table = Table("", "live arm", "seed", "definition", "predicted %", "measured %", "points")
    for c in comparisons:
        table.add_row(
            "met" if c.met else "MISSED",
            c.arm,
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
    head, cells = scale_cells(scales)
    apart = [("apart", n, "", "", "", "", reason) for n, reason in reasons(targets).items()]
    data = {
        "benchmark": "simulator",
        "aims": {
            t.name: {
                "value": t.predicted.mean,
                "aim": t.target,
                "wanted": wanted(t),
                "met": t.verdict is Verdict.MET,
                "note": APART_NOTE if t.verdict is Verdict.APART else "",
            }
            for t in targets
        }
        | _live_aim(validation),
        "tables": [
            {
                "title": "Published figures",
                "head": TARGETS_HEAD,
                "rows": [*map(target_cells, targets), *apart],
            },
            {"title": SCALES_TITLE, "head": head, "rows": cells},
        ],
        "figures": {
            **about,
            "targets": [{**asdict(t), "verdict": str(t.verdict)} for t in targets],
            "sweep": list(sweep),
            "scales": [asdict(r) for r in scales],
            "validation": [{**asdict(c), "points": c.points, "met": c.met} for c in validation],
        },
    }
    return json.dumps(_finite(data), indent=1) + "\n"


def _live_aim(comparisons: Sequence[Comparison]) -> dict[str, Any]:
    if not comparisons:
        return {}
    worst = max(abs(c.points) for c in comparisons)
    met = all(c.met for c in comparisons)
    return {"live runs: most points off": {"value": worst, "aim": TOLERANCE_POINTS, "met": met}}


def _finite(value: Any) -> Any:
    """JSON has no infinities."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def plot(file: Path, sweep: Sequence[dict[str, Any]], rows: Sequence[ScaleRow]) -> None:
    figure = plt.figure(figsize=(13, 8))
    above, below = figure.subfigures(2, 1)
    _plot_sweep(above.subplots(1, 2), sweep)
    rates = list(dict.fromkeys(r.rate for r in rows))
    axes = below.subplots(1, len(rates), sharey=True, squeeze=False)[0]
    for axis, rate in zip(axes, rates, strict=True):
        _plot_rate(axis, rate, [r for r in rows if r.rate == rate and r.engine_rate_share == 1])
    axes[0].set_ylabel("ETTR (paper's definition), %")
    axes[0].legend(fontsize="small")
    for part in (above, below):
        part.subplots_adjust(left=0.07, right=0.98, bottom=0.14, top=0.92)
    figure.savefig(file, dpi=100)
    plt.close(figure)


def _plot_sweep(axes: Sequence[Axes], sweep: Sequence[dict[str, Any]]) -> None:
    percent = [row["faults_percent"] for row in sweep]
    for axis, key, published, label in (
        (axes[0], "time_percent", (-2.2, -12.2), "time against full restart, %"),
        (axes[1], "ettr_points", (2.7, 15.7), "ETTR above full restart, points"),
    ):
        means = [row[key]["mean"] for row in sweep]
        spread = [row[key]["spread"] for row in sweep]
        axis.errorbar(percent, means, spread, label=f"simulated, steps of {sweep[0]['step_s']:g} s")
        axis.plot((2, 10), published, "o", label="published (RobustRL)")
        axis.set_xlabel("steps with a trainer fault, %")
        axis.set_ylabel(label)
        axis.legend()


def _plot_rate(axis: Axes, rate: str, rows: Sequence[ScaleRow]) -> None:
    for name in dict.fromkeys(r.strategy for r in rows):
        mine = [r for r in rows if r.strategy == name]
        gpus, paper = [r.gpus for r in mine], [100 * r.paper.mean for r in mine]
        axis.errorbar(gpus, paper, [100 * r.paper.half_width for r in mine], marker="o", label=name)
    axis.set_xscale("log")
    axis.set_xlabel("GPUs")
    axis.set_title(f"{rate} failures per 1,000 machines and day", fontsize="medium")
