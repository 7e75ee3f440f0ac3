"""Devices of engines and trainers, counted. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from torchtitan_rl_ft.config.groups import engine_groups
from torchtitan_rl_ft.config.sections import EngineGroup, FaultToleranceSection, RolloutSection

_RANK_OPTIONS = (
    ("--tp-size", "--tensor-parallel-size", "--tp"),
    ("--pp-size", "--pipeline-parallel-size"),
)
"""SGLang's degrees that multiply to the ranks of an engine. Data parallelism with
`--enable-dp-attention` splits the tensor-parallel ranks; without it, it multiplies them."""

_DATA_PARALLEL = ("--dp-size", "--data-parallel-size", "--dp")


def option(arguments: Sequence[str], names: Sequence[str]) -> str | None:
    """The last value of an option in a command line (`--a v` or `--a=v`)."""
    found = None
    for i, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else (arguments[i + 1] if i + 1 < len(arguments) else None)
    return found


def engine_ranks(arguments: Sequence[str]) -> int:
    """Ranks, and so devices, of an engine with these arguments; over all its nodes.

    Raises ValueError when a degree is no number.
    """
    ranks = 1
    for names in _RANK_OPTIONS:
        ranks *= int(option(arguments, names) or 1)
    if "--enable-dp-attention" not in arguments:
        ranks *= int(option(arguments, _DATA_PARALLEL) or 1)
    return ranks


def group_devices(rollout: RolloutSection, group: EngineGroup) -> int:
    """Devices of all engines of a group."""
    return group.engines * engine_ranks([*rollout.engine_args, *group.engine_args])


def engine_devices(rollout: RolloutSection) -> int:
    """Devices of all engines that the job starts."""
    return sum(group_devices(rollout, g) for g in engine_groups(rollout))


def trainer_devices(ft: FaultToleranceSection) -> int:
    """One for each rank of each replica group."""
    return ft.replica_groups * ft.ranks_per_group


def slot_ranks(ft: FaultToleranceSection, rollout: RolloutSection) -> dict[str, int]:
    """Ranks of a trainer group and of an engine: what a slot weighs in ETTR."""
    return {"trainer": ft.ranks_per_group, "engine": engine_ranks(rollout.engine_args)}


def exceeded(trainer: int, engines: int) -> str | None:
    """Why trainers on `trainer` devices cannot share those of the engines, or None.

    Colocated trainers may grow smaller or stay, also when they reattach to a retained session;
    they cannot have more devices than its engines hold.
    """
    if trainer <= engines:
        return None
    return (
        f"colocated trainers take {trainer} devices, the engines hold {engines}: fewer ranks, or "
        'rollout.placement = "separate"'
    )
