"""ETTR and outages as lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_rl_ft.observability.ettr import Ettr, Figure
from torchtitan_rl_ft.observability.outages import Outage

MAX_OUTAGES = 5
"""Outages that are listed, the longest ones."""

SHOWN_S = 0.05
"""Slot-seconds below this are not worth a word."""


def ettr_rows(value: Ettr | None) -> list[tuple[str, str]]:
    """Labels and lines for a summary."""
    if value is None:
        return [("ETTR", "none: no step was committed")]
    lost = lost_text(value.strict, value.slot_s)
    step = "no undisturbed step" if value.step_s is None else f"{value.step_s:.2f} s"
    listed = outage_lines(value.outages)
    return [
        ("ETTR", f"strict {_figure_text(value.strict)}, an undisturbed step: {step}"),
        ("", f"paper {_figure_text(value.paper)}"),
        ("lost", lost),
        *[("outages" if i == 0 else "", line) for i, line in enumerate(listed)],
    ]


def _figure_text(figure: Figure) -> str:
    free = "unknown" if figure.fault_free is None else f"{figure.fault_free:.3f}"
    return f"{figure.ratio:.3f} (fault-free {free}; after start-up {figure.after_startup:.3f})"


def lost_text(figure: Figure, slot_s: float) -> str:
    """What faults took, and what no fault did; of the roles the most first, within a role in the
    order of the causes."""
    faults, waits = [], []
    for role, causes in sorted(figure.lost_s.items(), key=lambda item: -sum(item[1].values())):
        shown = {cause: s for cause, s in causes.items() if s >= SHOWN_S}
        if (wait_s := shown.pop("wait", None)) is not None:
            waits.append(f"{role} {wait_s:.1f} s")
        if shown:
            faults.append(f"{role} {', '.join(f'{c} {s:.1f} s' for c, s in shown.items())}")
    lost = f"to faults {'; '.join(faults) or 'nothing'}"
    waited = f"; to waiting {', '.join(waits)}" if waits else ""
    return f"{lost}{waited} (of {slot_s:.1f} s slot time, strict)"


def outage_lines(found: Sequence[Outage]) -> list[str]:
    """None where there was none."""
    shown = sorted(sorted(found, key=lambda o: -o.total_s)[:MAX_OUTAGES], key=lambda o: o.began_s)
    lines = [outage.line() for outage in shown]
    more = len(found) - len(lines)
    return lines + ([f"and {more} more: torchtitan report --json"] if more > 0 else [])
