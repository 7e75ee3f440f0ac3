"""Whether a run makes progress: a pure verdict on its state."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan_rl_ft.observability.run_state import RunState


@dataclass(frozen=True)
class Health:
    ok: bool
    state: str  # starting, ok, stalled, ended
    reason: str

    def to_json(self) -> dict[str, str | bool]:
        return {"ok": self.ok, "state": self.state, "reason": self.reason}


@dataclass(frozen=True)
class HealthLimits:
    start_s: float  # until the first sign of work
    stall_s: float  # between two signs of work


def health(state: RunState, now_mono_s: float, limits: HealthLimits) -> Health:
    """Work is what run_state.PROGRESS names: a group rolled out, a batch sealed, a commit, ..."""
    if state.outcome is not None:
        return Health(False, "ended", f"the job has ended: {state.outcome}")
    if state.progress_mono_s is None:
        waits_s = state.elapsed_s(now_mono_s)
        if waits_s <= limits.start_s:
            return Health(True, "starting", state.phase())
        reason = f"nothing was done in {waits_s:.0f} s since the start: {state.phase()}"
        return Health(False, "stalled", "; ".join([reason, *_missing(state)]))
    waits_s = max(0.0, now_mono_s - state.progress_mono_s)
    if waits_s <= limits.stall_s:
        return Health(True, "ok" if state.under_way else "starting", state.phase())
    reason = f"nothing was done for {waits_s:.0f} s, since step {state.step}"
    return Health(False, "stalled", "; ".join([reason, *_missing(state)]))


def _missing(state: RunState) -> list[str]:
    """What is not there that the work may wait for."""
    found = []
    if state.engines and not state.engines_serving:
        found.append("no engine serves")
    if state.groups and not state.groups_alive:
        found.append("no trainer group is up")
    for role in state.members.roles.values():
        if role.state in ("ended", "restarting"):
            found.append(
                f"{role.name} is {role.state}" + (f": {role.reason}" if role.reason else "")
            )
    return found
