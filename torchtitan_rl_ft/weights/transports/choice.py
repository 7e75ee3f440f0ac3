"""Which transport a job uses: decided once, when it starts, for all its roles. Pure; what it asks
of the machine is in facts.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Transport = Literal["disk", "nixl"]

VERSIONS_HELD = 2
"""That a holder keeps in memory: the one it hands on, and the next one."""


class TransportUnavailable(Exception):
    """The transport that the configuration names cannot be used; the message says why."""


@dataclass(frozen=True)
class Facts:
    """What the choice depends on."""

    nixl_problem: str | None
    """Why NIXL does not work here; None: it does."""

    policies_travel: bool = True
    """False without a trainer or without engines: nothing is moved then."""

    external_engines: bool = False
    """Engines of somebody else, which load from a file system that they share with trainers."""

    image_bytes: int = 0
    """Size of one version; 0: not known."""

    copies: int = 0
    """Versions that are held at once on this machine, counted in whole images."""

    free_bytes: int = 0
    """What the memory for them has room for."""

    memory_folder: str = ""


@dataclass(frozen=True)
class Choice:
    transport: Transport
    reason: str


def copies_held(holders: int, groups: int) -> int:
    """In whole images: every relay has one, the sources of a replica group have one together."""
    return VERSIONS_HELD * (holders + groups)


def choose(wanted: Literal["auto", "disk", "nixl"], facts: Facts) -> Choice:
    """The transport in use, and why. Raises TransportUnavailable when `nixl` was asked for and
    cannot be."""
    if wanted == "disk":
        return Choice("disk", "as configured")
    if not facts.policies_travel:
        return Choice("disk", "no policy travels in this mode")
    if (problem := why_not_nixl(facts)) is None:
        return Choice("nixl", "as configured" if wanted == "nixl" else "NIXL works here")
    if wanted == "nixl":
        raise TransportUnavailable(problem)
    return Choice("disk", problem)


def why_not_nixl(facts: Facts) -> str | None:
    """None: weights can travel over UCX."""
    if facts.external_engines:
        return "engines of rollout.external_urls load from a shared file system only"
    if facts.nixl_problem is not None:
        return facts.nixl_problem
    needed = facts.image_bytes * facts.copies
    if needed > facts.free_bytes:
        return (
            f"{facts.memory_folder} has room for {_gb(facts.free_bytes)}, {facts.copies} copies of "
            f"the weights need {_gb(needed)} (weights.memory_folder, weights.holders)"
        )
    return None


def _gb(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
