"""What a job's `[chaos]` section asks for: which faults, whether the job can suffer them, and what
it has to be started with for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torchtitan_rl_ft.chaos import disk
from torchtitan_rl_ft.chaos.draws import drawn
from torchtitan_rl_ft.chaos.plan import (
    SOURCE_OF,
    Fault,
    FaultInvalid,
    FaultKind,
    When,
    kind_of,
    parse,
    parse_deed,
)
from torchtitan_rl_ft.chaos.schedule import Planned, keyed
from torchtitan_rl_ft.chaos.trace import TraceInvalid, load
from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.sections import ChaosSection

LEFT_OUT = {
    DebugMode.TRAIN_ONLY: ("engine", "serving", "gateway", "relay", "source"),
    DebugMode.ROLLOUT_ONLY: ("trainer", "standby", "lighthouse", "source"),
}
"""Roles that a debug mode does without."""


@dataclass(frozen=True)
class JobPlan:
    """The faults of a section. `drawn_from`: those without a moment, drawn by `chaos.mtbf_s`."""

    faults: list[Fault]
    drawn_from: list[Fault]

    @classmethod
    def of(cls, section: ChaosSection) -> JobPlan:
        """Raises FaultInvalid, TraceInvalid."""
        faults = [parse(line) for line in section.faults]
        if section.replay:
            faults += [f.fault(section.replay_by) for f in load(Path(section.replay))]
        return cls(faults, [parse_deed(line) for line in section.mtbf_faults])

    def planned(self) -> list[Planned]:
        return keyed(self.faults)

    def drawn(self, section: ChaosSection) -> Iterator[Planned]:
        if section.mtbf_s > 0 and self.drawn_from:
            yield from drawn(self.drawn_from, section.mtbf_s, section.seed)

    def engines_behind_proxy(self) -> bool:
        """Whether engines have to be started behind proxies."""
        return any(
            f.kind is FaultKind.BLACKHOLE and kind_of(f.target) == "engine" for f in self._all()
        )

    def failing_sums(self) -> bool:
        """Whether trainers have to be started with process groups that can fail."""
        return any(f.kind is FaultKind.FAIL for f in self._all())

    def _all(self) -> list[Fault]:
        return [*self.faults, *self.drawn_from]


def problems(resolved: Resolved) -> list[str]:
    """What is wrong with the faults that a job asks for, one line each: words that are not
    understood, victims and moments that this job does not have, a trace that cannot be read."""
    section = resolved.sections.chaos
    found = []
    for key, read in (("faults", parse), ("mtbf_faults", parse_deed)):
        origin = resolved.origins.get(f"chaos.{key}", "default")
        for i, line in enumerate(getattr(section, key)):
            try:
                problem = misfit(read(line), resolved)
            except FaultInvalid as e:
                problem = str(e)
            if problem is not None:
                found.append(f"chaos.{key}[{i}] = {line!r} ({origin}): {problem}")
    return [*found, *_trace_problems(resolved)]


def _trace_problems(resolved: Resolved) -> Iterator[str]:
    section = resolved.sections.chaos
    if not section.replay:
        return
    where = resolved.where("chaos.replay")
    if Path(section.replay).resolve().is_relative_to(resolved.run_folder.path):
        yield f"{where}: a run cannot repeat its own faults: record them in a file elsewhere"
        return
    try:
        faults = JobPlan.of(ChaosSection(replay=section.replay, replay_by=section.replay_by)).faults
    except TraceInvalid as e:
        yield f"{where}: {e}"
        return
    for fault in faults:
        if (problem := misfit(fault, resolved)) is not None:
            yield f"{where}: {fault.line!r}: {problem}"


def misfit(fault: Fault, resolved: Resolved) -> str | None:
    """Why the job can never suffer this fault, or None."""
    kind, steps = kind_of(fault.target), resolved.get("training.steps")
    mode = debug_mode(resolved.sections.rollout)
    if kind in LEFT_OUT.get(mode, ()):
        return f"rollout.debug_mode {mode} runs no {fault.target}"
    if (problem := _absent(kind, fault.target, resolved)) is not None:
        return problem
    if fault.moment.when in (When.STEP, When.ROLLOUT) and fault.moment.number > steps:
        return f"training.steps = {steps}, so {fault.moment.when} {fault.moment.number} never comes"
    if fault.kind is FaultKind.FAIL and not resolved.sections.fault_tolerance.enable:
        return "this job sums over no groups (fault_tolerance.enable = false)"
    return disk.too_large(disk.of(fault.target, resolved)) if fault.kind is FaultKind.FILL else None


def numbered(resolved: Resolved) -> list[str]:
    """Names of the processes of which a job has several; engines: those that take requests."""
    rollout = resolved.sections.rollout
    sizes = _sizes(resolved)
    sizes["engine"] = sum(g.engines for g in rollout.groups) or rollout.engines
    return [f"{kind}-{i}" for kind, size in sizes.items() for i in range(size)]


def _sizes(resolved: Resolved) -> dict[str, int]:
    sections = resolved.sections
    rollout, recovery = sections.rollout, sections.recovery
    engines = sum(g.engines for g in rollout.groups) or rollout.engines
    return {
        "engine": engines + rollout.standby_engines + len(rollout.external_urls),
        "trainer": sections.fault_tolerance.replica_groups,
        "standby": {"none": 0, "spare": recovery.standby_groups}.get(recovery.standby, 1),
        "relay": 0 if rollout.weight_transport == "disk" else sections.weights.holders,
    }


def _absent(kind: str, target: str, resolved: Resolved) -> str | None:
    """Why the job has no such process, or None."""
    rollout, recovery = resolved.sections.rollout, resolved.sections.recovery
    sizes = _sizes(resolved)
    if kind in ("relay", "source") and rollout.weight_transport == "disk":
        return f'this job has no {kind} (rollout.weight_transport = "disk")'
    if kind == "source":
        return _no_rank(target, resolved) or _absent(
            "trainer", target.removeprefix(SOURCE_OF), resolved
        )
    number = target.partition(".")[0].partition("-")[2]
    if kind == "standby" and not sizes[kind]:
        return 'this job has no standby trainer (recovery.standby = "none")'
    if number and int(number) >= sizes[kind]:
        return f"there is no {kind}-{number} in this job, which has {sizes[kind]} (from {kind}-0)"
    if kind == "lighthouse" and not resolved.sections.fault_tolerance.enable:
        return "this job has no lighthouse (fault_tolerance.enable = false)"
    if kind == "gateway" and rollout.router != "smg":
        return f'this job has no gateway (rollout.router = "{rollout.router}")'
    if kind == "inspector" and not recovery.run_workload_inspector_server:
        return "this job has no inspector (recovery.run_workload_inspector_server = false)"
    return None


def _no_rank(source: str, resolved: Resolved) -> str | None:
    rank, ranks = source.partition(".")[2], resolved.sections.fault_tolerance.ranks_per_group
    if rank and int(rank) >= ranks:
        return f"its groups have {ranks} ranks (from rank 0), so there is no {source}"
    return None
