"""The ranks of a group start again without it: dead ones as new processes, living ones in place.

One barrier a generation: the next one begins when every rank is dead or waits for it, so that no
rank goes ahead into a rendezvous that another one will not come to. A rank that does neither in
time is killed and started again with the dead.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torchtitan_rl_ft.escalation import RestartLimits, Rung, fault_of_exit, next_step
from torchtitan_rl_ft.host import phase_file, process, regroup
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.run_folder import RunFolder

JOIN_TIMEOUT_S = 30.0
"""How long a living rank may take to see that the others are gone, or begin again."""

POLL_S = 0.1


@dataclass(frozen=True)
class RankState:
    """One rank as its launcher sees it. `phase` and `generation` are its own word."""

    alive: bool
    phase: str = ""
    generation: int = 0


def decide(
    ranks: Mapping[int, RankState], generation: int, waited_s: float
) -> tuple[bool, frozenset[int]]:
    """(whether the next generation may begin, ranks to kill first). Pure. `waited_s`: since the
    first rank was found dead or waiting."""
    waiting = {
        rank
        for rank, state in ranks.items()
        if state.alive and state.phase == regroup.RESTARTING and state.generation == generation
    }
    dead = {rank for rank, state in ranks.items() if not state.alive}
    if not waiting and not dead:
        return False, frozenset()
    late = set(ranks) - waiting - dead
    # One that is still coming up holds nothing, and waits for one that is gone.
    hopeless = {rank for rank in late if dead and ranks[rank].phase == "starting"}
    if waited_s > JOIN_TIMEOUT_S:
        hopeless = late
    return not late, frozenset(hopeless)


@dataclass
class Regrouping:
    """Generations of one group, for its launcher."""

    folder: RunFolder
    name: str
    limits: RestartLimits
    events: EventSink
    free_port: Callable[[], int]
    generation: int = 0
    _since_s: float | None = None
    _restarts_s: list[float] = field(default_factory=list)
    _killed: set[int] = field(default_factory=set)

    def may_restart(self, rank: int, returncode: int) -> bool:
        """Whether a rank that has ended is started again alone; else its group ends."""
        if rank in self._killed and returncode == -signal.SIGKILL:
            return True  # in consequence of an end that was counted
        now_s = time.monotonic()
        step = next_step(
            fault_of_exit(returncode),
            limits={Rung.ROLE: self.limits},
            restarts_s={Rung.ROLE: self._restarts_s},
            now_s=now_s,
        )
        if step.rung is not Rung.ROLE:
            self.events.emit(
                Kind.ESCALATE,
                phase=Rung.GROUP,
                cause=f"{step.reason}: {process.describe(returncode)}",
                subject=f"{self.name}.{rank}",
            )
            return False
        self._restarts_s.append(now_s)
        self.events.emit(
            Kind.RESTART,
            phase=Rung.ROLE,
            cause=process.describe(returncode),
            subject=f"{self.name}.{rank}",
            attempt=len(self._restarts_s) + 1,
            delay_s=0.0,  # the others wait for it
        )
        return True

    def next_env(self, ranks: Mapping[int, process.Child]) -> dict[str, str] | None:
        """What the environment of ranks that are to be started says, when the next generation
        begins now. Raises OSError."""
        now_s = time.monotonic()
        states = {rank: self._state(child) for rank, child in ranks.items()}
        go, hopeless = decide(states, self.generation, now_s - (self._since_s or now_s))
        for rank in hopeless - self._killed:
            self._killed.add(rank)
            self.events.emit(
                Kind.RESTART,
                phase=Rung.ROLE,
                cause=f"did not come to generation {self.generation + 1}: {states[rank].phase}",
                subject=f"{self.name}.{rank}",
                attempt=len(self._restarts_s) + 1,
                delay_s=0.0,
            )
            process.kill(ranks[rank].id, signal.SIGKILL)
        if not go:
            begun = hopeless or any(
                not s.alive or s.phase == regroup.RESTARTING for s in states.values()
            )
            self._since_s = (self._since_s or now_s) if begun else None
            return None
        self._since_s = None
        self._killed.clear()
        self.generation += 1
        found = regroup.Generation(self.generation, self.free_port())
        regroup.write(self.folder.phases, self.name, found)
        return {
            "MASTER_PORT": str(found.master_port),
            regroup.GENERATION_ENV: str(found.generation),
        }

    def _state(self, child: process.Child) -> RankState:
        if child.returncode is not None:
            return RankState(alive=False)
        record = phase_file.read(phase_file.path_of(self.folder.phases, child.pid))
        if record is None or record.start_time != child.id.start_time:
            return RankState(alive=True, phase="starting", generation=self.generation)
        return RankState(True, record.phase, record.generation)
