"""How long a fault goes unnoticed: our own detectors, asked as time passes, and those of others."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.simulator.parameters import INSPECTION_S, Cause, Symptom
from torchtitan_rl_ft.host import phase_limits
from torchtitan_rl_ft.host.phase_file import PhaseRecord
from torchtitan_rl_ft.serving import verdict
from torchtitan_rl_ft.serving.prober import REFUSED_DELAY_S
from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.serving.verdict import Health, Observation

LOOK_S = 1.0
"""Between two looks of the watcher of ranks."""


def engine_s(limits: verdict.Limits, *, reachable: bool) -> float:
    """From the last token of an engine that has served for long until it is found dead. It hangs
    (`reachable`: probes are taken and never answered), or refuses them at once."""
    now_s = checked_s = 0.0
    while True:
        seen = Observation(
            state=EngineState.SERVING,
            in_state_s=limits.first_wait_s + now_s,
            watched_s=limits.first_wait_s + now_s,
            progress_s=now_s,
            checked_s=now_s - checked_s,
        )
        found = verdict.judge(seen, limits)
        if found.health is Health.CHECK:
            per_probe_s = limits.share_s if reachable else min(limits.share_s, REFUSED_DELAY_S)
            now_s += limits.failures * per_probe_s
            failures = ["no answer"] * limits.failures
            found = verdict.conclude(failures, now_s, "", limits)
            checked_s = now_s
        else:
            now_s += found.again_s
        if found.health is Health.DEAD:
            return now_s


def trainer_s(limits: phase_limits.Limits, symptom: Symptom) -> float:
    """From a trainer's fault until the supervisor ends its process."""
    if symptom is Symptom.EXIT:
        return 0.0  # an exit is noticed at once
    record = PhaseRecord(
        name="trainer-0", pid=1, start_time=0.0, host="", phase="forward_backward", settled=True
    )
    observed, now_s = phase_limits.Observed(record), 0.0
    while phase_limits.judge(observed, limits) is None:
        now_s += LOOK_S
        if symptom is Symptom.STUCK:  # its side thread goes on
            record = replace(record, beats=record.beats + 1)
        observed = observed.seen(record, LOOK_S)
    return now_s


def inspected_s(cause: Cause) -> float:
    """By ByteRobust's inspections. An exit is noticed at once, as by us (assumption: its table has
    intervals of inspections alone)."""
    return 0.0 if cause.symptom is Symptom.EXIT else INSPECTION_S[cause.inspector]
