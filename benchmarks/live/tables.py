"""Saved arms as rows of a table, and the aims. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report import Aim

OURS = "role_isolated/trainers/spare"
BASELINES = ("full_restart/trainers/saved_every_1", "full_restart/trainers/saved_every_5")
POINTS = 100.0

Saved = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One arm of a load over its seeds: means, with the least and the most strict ratio."""

    load: str
    name: str
    seeds: list[int]
    steps: int
    faults: int
    step_s: float
    strict: float
    strict_least: float
    strict_most: float
    strict_fault_free: float | None
    paper: float
    wall_s: float
    to_no_fault: float | None
    """Wall time over that of the arm without faults."""

    recovery_s: dict[str, float]
    restarts: int
    samples_lost: int
    samples_too_old: int


def rows(arms: Sequence[Saved]) -> list[Row]:
    """In the order of the arms."""
    groups: dict[tuple[str, str], list[Saved]] = {}
    for arm in arms:
        groups.setdefault((arm["load"], arm["name"]), []).append(arm)
    return [_row(load, name, each, arms) for (load, name), each in groups.items()]


def _row(load: str, name: str, each: Sequence[Saved], arms: Sequence[Saved]) -> Row:
    strict = [a["ettr"]["strict"] for a in each]
    free = [f for a in each if (f := a["ettr_fault_free"]["strict"]) is not None]
    calm = {a["seed"]: a["wall_s"] for a in arms if (a["load"], a["name"]) == (load, "no_fault")}
    ratios = [a["wall_s"] / calm[a["seed"]] for a in each if a["seed"] in calm]
    roles = dict.fromkeys(role for a in each for role in a["recovery_s"])
    return Row(
        load=load,
        name=name,
        seeds=sorted(a["seed"] for a in each),
        steps=each[0]["steps"],
        faults=sum(len(a["trace"]) for a in each),
        step_s=_mean(each, lambda a: a["step_s"] or 0.0),
        strict=statistics.fmean(strict),
        strict_least=min(strict),
        strict_most=max(strict),
        strict_fault_free=statistics.fmean(free) if free else None,
        paper=_mean(each, lambda a: a["ettr"]["paper"]),
        wall_s=_mean(each, lambda a: a["wall_s"]),
        to_no_fault=statistics.fmean(ratios) if ratios else None,
        recovery_s={
            r: statistics.median(a["recovery_s"][r] for a in each if r in a["recovery_s"])
            for r in roles
        },
        restarts=sum(a["restarts_of_the_job"] for a in each),
        samples_lost=sum(a["samples"]["lost"] for a in each),
        samples_too_old=sum(a["samples"]["too_old"] for a in each),
    )


def _mean(each: Sequence[Saved], value: Callable[[Saved], float]) -> float:
    return statistics.fmean(value(a) for a in each)


HEAD = (
    *("load", "arm", "seeds", "faults", "step s", "strict", "(least..most)", "fault-free"),
    *("paper", "wall s", "x no fault", "recovery s", "samples lost", "too old"),
)


def cells(row: Row) -> tuple[str, ...]:
    """Of a row, under `HEAD`."""
    recovery = ", ".join(f"{role} {s:.2f}" for role, s in row.recovery_s.items())
    return (
        row.load,
        row.name,
        str(len(row.seeds)),
        str(row.faults),
        f"{row.step_s:.2f}",
        f"{row.strict:.3f}",
        f"{row.strict_least:.3f}..{row.strict_most:.3f}",
        "" if row.strict_fault_free is None else f"{row.strict_fault_free:.3f}",
        f"{row.paper:.3f}",
        f"{row.wall_s:.1f}",
        "" if row.to_no_fault is None else f"{row.to_no_fault:.2f}",
        recovery or "-",
        str(row.samples_lost),
        str(row.samples_too_old),
    )


def aims(found: Sequence[Row]) -> dict[str, Aim]:
    """Those that can be told: on the load with the shorter step, against the better one of the two
    baselines."""
    main = {r.name: r for r in found if r.load == "short"}
    baselines = [main[name] for name in BASELINES if name in main]
    wanted: dict[str, Aim] = {}
    if OURS not in main or not baselines:
        return wanted
    ours = main[OURS]
    gain = ours.strict - max(b.strict for b in baselines)
    wanted["strict_points_above_full_restart"] = Aim(POINTS * gain, 20.0, at_most=False)
    restart_s = [b.recovery_s["job"] for b in baselines if "job" in b.recovery_s]
    if restart_s and "trainer" in ours.recovery_s:
        wanted["recovery_to_full_restart"] = Aim(ours.recovery_s["trainer"] / min(restart_s), 0.2)
    lost = sum(r.samples_lost for r in found if r.name.startswith("role_isolated"))
    wanted["samples_lost"] = Aim(float(lost), 0.0)
    return wanted


def unmeasured(found: Sequence[Row]) -> list[str]:
    """What the aims still need."""
    main = {r.name: r for r in found if r.load == "short"}
    lacking = [name for name in (OURS, *BASELINES) if name not in main]
    lacking += [
        f"recovery of {name}"
        for name in (OURS, *BASELINES)
        if name in main and not main[name].recovery_s
    ]
    return lacking
