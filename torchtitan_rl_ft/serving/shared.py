"""What the engines of a pool have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.observability.events import EventSink
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.deregistration import Deregistration
from torchtitan_rl_ft.serving.duties import TAKES_VERSIONS, Boundary
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_records import EngineRecords
from torchtitan_rl_ft.serving.groups import SlotPlan
from torchtitan_rl_ft.serving.launch import Launcher
from torchtitan_rl_ft.serving.prober import Prober
from torchtitan_rl_ft.serving.unit import Unit
from torchtitan_rl_ft.weights.installer import Installer
from torchtitan_rl_ft.weights.proof import Proof
from torchtitan_rl_ft.weights.transports.base import Release


@dataclass(frozen=True)
class Target:
    """The version that the engines of a group are to hold, and how they prove that they do."""

    release: Release
    proof: Proof


@dataclass
class Shared:
    """Parts that every slot and every life of a pool uses."""

    rollout: RolloutSection
    plans: Sequence[SlotPlan]
    folder: RunFolder
    events: EventSink
    launcher: Launcher
    http: aiohttp.ClientSession
    installers: Mapping[int, Installer]
    """Slot -> what gives its engines versions, by the transport of its node."""

    prober: Prober
    records: EngineRecords
    changes: Changes
    deregistration: Deregistration
    targets: dict[str, Target] = field(default_factory=dict)
    """Group -> what its engines are to hold. Frozen groups have version 0, which is none of the
    policy's: their own checkpoint."""

    engines: Callable[[], Iterable[Engine]] = tuple
    """The present engines of the pool."""
    memory_lent: bool = False
    """The trainer has the memory of colocated engines: none takes it back, and none starts."""

    damaged: int | None = None
    """A version whose files cannot be installed any more, as the last engine to try has found."""

    units: dict[int, Unit] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic

    def unit(self, plan: SlotPlan) -> Unit:
        return self.units.setdefault(plan.unit, Unit())

    @property
    def target(self) -> Target | None:
        """That of the groups that take the policy's versions."""
        return next((t for t in self.targets.values() if t.release.version > 0), None)

    def target_for(self, plan: SlotPlan) -> Target | None:
        return self.targets.get(plan.group.name)

    @property
    def version(self) -> int:
        """The version that is required; 0 before the first publish."""
        return self.target.release.version if self.target is not None else 0

    def boundary(self, plan: SlotPlan) -> Boundary:
        """For the replacement of an engine that is lost now. A frozen one waits for no version."""
        refill_start = self.rollout.refill_start if plan.takes_versions else "at_once"
        return Boundary(refill_start, self.version)

    def may_start(self, boundary: Boundary) -> bool:
        return not self.memory_lent and boundary.may_start(*self._standing(None))

    def may_join(self, engine: Engine) -> bool:
        """Whether `engine` may take the required version and requests."""
        if self.memory_lent:
            return False
        return engine.joins is None or engine.joins.may_join(*self._standing(engine))

    def _standing(self, but: Engine | None) -> tuple[int, int, int]:
        others = sum(
            e.live and e.duty in TAKES_VERSIONS and e.plan.takes_versions and e is not but
            for e in self.engines()
        )
        return self.version, others, self.rollout.min_engines
