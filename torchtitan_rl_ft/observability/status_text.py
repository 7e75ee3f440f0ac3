"""The state of a run as lines of text, for `torchtitan status`."""

from __future__ import annotations

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.observability.live_ettr import Measured
from torchtitan_rl_ft.observability.reward_curve import sparkline
from torchtitan_rl_ft.observability.run_members import Member
from torchtitan_rl_ft.observability.run_state import RunState

CURVE_WIDTH = 48
MOST_OUTAGES = 3
"""Outages that are listed, the last ones."""


def run_rows(state: RunState, measured: Measured, now_mono_s: float) -> list[tuple[str, str]]:
    """Labels and lines; nothing for what is not known."""
    if state.started_mono_s is None and not state.last_mono_s:
        return []
    rows = [("run", _progress(state, now_mono_s))]
    if state.rewards:
        curve = sparkline(state.rewards, CURVE_WIDTH)
        rows.append(("reward", f"{state.rewards[-1]:.3f}  {curve}"))
    rows += [("versions", text)] if (text := _versions(state)) else []
    if (quorum := state.members.quorum) is not None:
        members = ", ".join(quorum.members[:16])
        rows.append(("quorum", f"{quorum.quorum_id} at step {quorum.step}: {members}"))
    rows += [("ETTR", text)] if (text := _ettr(measured)) else []
    rows.append(("faults", _faults(state)))
    if state.dropped:
        reasons = ", ".join(f"{reason} {n}" for reason, n in state.dropped.most_common())
        rows.append(("dropped", f"{state.dropped.total()} prompt groups: {reasons}"))
    if measured.ettr is not None:
        for i, outage in enumerate(measured.ettr.outages[-MOST_OUTAGES:]):
            rows.append(("outages" if i == 0 else "", outage.line()))
    return rows


def member_text(member: Member, now_mono_s: float) -> str:
    """What a role or an engine does, for the end of a line."""
    since_s = max(0.0, now_mono_s - member.since_mono_s)
    told = [member.phase.replace("_", " ") if member.phase else member.state]
    if member.phase and member.step is not None:
        told.append(f"(step {member.step})")
    told.append(f"{since_s:.1f} s")
    if member.restarts:
        told.append(f"restarts {member.restarts}")
    return " ".join(told) + (f": {member.reason}" if member.reason else "")


def _progress(state: RunState, now_mono_s: float) -> str:
    unit, done = ("step", state.step) if state.groups else ("rollout", len(state.dumped))
    parts = [state.phase(), f"{unit} {done} of {state.total_steps}"]
    parts.append(f"{state.elapsed_s(now_mono_s):.0f} s")
    if state.groups:
        parts.append(f"groups {state.groups_up}/{state.groups}")
    if state.engines:
        parts.append(f"engines {state.engines_serving}/{state.engines}")
    if state.buffered_batches:
        parts.append(f"batches ahead {state.buffered_batches}")
    return ", ".join(parts)


def _versions(state: RunState) -> str:
    parts = []
    if state.version is not None:
        parts.append(f"published {state.version} (step {state.version_step})")
    held = [e.version for e in state.members.engines.values() if e.version is not None]
    if held:
        low, high = min(held), max(held)
        parts.append(f"engines hold {low}" if low == high else f"engines hold {low} to {high}")
    if state.checkpoint_step is not None:
        parts.append(f"checkpoint of step {state.checkpoint_step}")
    return ", ".join(parts)


def _ettr(measured: Measured) -> str:
    if measured.ettr is None:
        return measured.problem or ""
    parts = []
    for name in ("strict", "paper"):
        figure = getattr(measured.ettr, name)
        free = "" if figure.fault_free is None else f", fault-free {figure.fault_free:.3f}"
        window = ""
        if measured.samples:
            value = getattr(measured.samples[-1], f"{name}_window")
            window = f", of the last {measured.window_s:g} s {value:.3f}"
        parts.append(f"{name} {figure.ratio:.3f}{window}{free}")
    if measured.ettr.step_s is not None:
        parts.append(f"an undisturbed step {measured.ettr.step_s:.2f} s")
    return "; ".join(parts)


def _faults(state: RunState) -> str:
    restarts = ", ".join(f"{role} {n}" for role, n in state.members.restarts.most_common())
    parts = [f"{state.faults}", f"restarts {restarts}" if restarts else "no restarts"]
    for kind, text in ((Kind.REFUSE, "refused commits"), (Kind.HEAL, "heals")):
        if state.totals[kind]:
            parts.append(f"{text} {state.totals[kind]}")
    return ", ".join(parts)
