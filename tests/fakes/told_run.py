"""The files of a run that goes on, as its roles would have written them: two groups, two engines;
one of each is lost and comes back."""

from __future__ import annotations

import json
import time
from typing import Any

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import RunFolder

NASTY = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&amp;"
STEPS = 30
LENGTH_S = 100.0
MEMBERS = ("torchtitan_ft_00000", "torchtitan_ft_00001")


class ToldRun:
    """`tell` appends an event, now or at a moment of the past."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.start_s = folder, time.monotonic() - LENGTH_S
        self._wall_s = time.time() - time.monotonic()
        folder.path.mkdir(parents=True, exist_ok=True)

    def tell(
        self, name: str, kind: Kind, *, at_s: float | None = None, by: int = 100, **fields: Any
    ) -> None:
        """`at_s`: since the start of the run. `by`: the process that tells."""
        mono_s = time.monotonic() if at_s is None else self.start_s + at_s
        own = {k: fields.pop(k) for k in ("phase", "cause", "step", "version") if k in fields}
        line = {
            "wall_s": self._wall_s + mono_s,
            "mono_s": mono_s,
            "run": self.folder.path.name,
            "role": "trainer" if name.startswith("trainer") else name,
            "name": name,
            "attempt": 1,
            "pid": by,
            "kind": kind,
            **own,
            "data": fields,
        }
        with open(self.folder.events, "a") as f:
            f.write(json.dumps(line) + "\n")

    def metrics(self, step: int, **row: float) -> None:
        with open(self.folder.metrics, "a") as f:
            f.write(json.dumps({"step": step, **row}) + "\n")

    def engine(
        self, name: str, old: str, new: str, at_s: float, version: int | None = None
    ) -> None:
        known = {} if version is None else {"version": version}
        self.tell("serving", Kind.TRANSITION, at_s=at_s, subject=name, old=old, new=new, **known)

    def write(self) -> None:
        """All of it until now."""
        self.tell("supervisor", Kind.RUN, at_s=0.0, by=1, phase="start")
        for i, name in enumerate(("lighthouse", "serving", "rollout", "trainer-0", "trainer-1")):
            self.tell("supervisor", Kind.SPAWN, at_s=0.1, subject=name, pid=10 + i, log="/log")
        for name in ("lighthouse", "serving", "rollout"):
            self.tell(name, Kind.READY, at_s=1.0, url="http://127.0.0.1:9")
        for slot in (0, 1):
            engine = f"engine-{slot}"
            self.tell("serving", Kind.SPAWN, at_s=1.5, subject=engine, pid=20 + slot)
            self.engine(engine, "starting", "stale", 8.0)
            self.engine(engine, "installing", "serving", 9.0, version=1)
        for step in range(1, STEPS + 1):
            self._step(step, 10.0 + 3.0 * (step - 1))

    def _step(self, step: int, at_s: float) -> None:
        alone = 12 <= step < 16
        groups = 1 if alone else 2
        self.tell("rollout", Kind.ISSUE, at_s=at_s, first=step, last=step, groups=1)
        self.tell("rollout", Kind.ACCEPT, at_s=at_s + 0.8, group=step)
        self.tell("rollout", Kind.SEAL, at_s=at_s + 0.9, step=step, batch=step, samples=8)
        for g in range(groups):
            trainer, pid = f"trainer-{g}", 13 + g
            quorum = {"quorum_id": 2 if alone else 3 if step >= 16 else 1}
            known = {"members": MEMBERS[:groups], "participants": groups, "rank": g}
            self.tell(trainer, Kind.QUORUM, at_s=at_s + 1.0, by=pid, step=step, **quorum, **known)
            for phase, after_s in (("forward_backward", 1.1), ("commit", 2.5), ("report", 2.9)):
                self.tell(trainer, Kind.PHASE, at_s=at_s + after_s, by=pid, phase=phase, step=step)
        self.tell("rollout", Kind.COMMIT, at_s=at_s + 2.8, step=step, participants=groups)
        self.tell("serving", Kind.PUBLISH, at_s=at_s + 2.85, step=step, version=step + 1)
        if step == 7:
            self._lose_engine(at_s + 0.3)
        if step == 11:
            self._lose_trainer(at_s + 2.95)
        if step % 10 == 0:
            self.tell("rollout", Kind.CHECKPOINT, at_s=at_s + 2.9, step=step)
        self.metrics(
            step,
            **{"reward/mean": 0.2 + 0.6 * step / STEPS, "reward/std": 0.1, "loss": 1.0 / step},
            **{"time/step_s": 2.8, "policy_age/mean": 0.5, "participants": groups, "tokens": 90},
        )

    def _lose_engine(self, at_s: float) -> None:
        lost = {"subject": "engine-1", "cause": f"killed by SIGKILL {NASTY}"}
        self.tell("serving", Kind.EXIT, at_s=at_s, phase="fault", last_lines=["A LOG"], **lost)
        self.tell("serving", Kind.RESTART, at_s=at_s + 0.1, attempt=2, delay_s=0.0, **lost)
        self.tell("serving", Kind.SPAWN, at_s=at_s + 0.2, subject="engine-1", pid=31)
        self.engine("engine-1", "starting", "stale", at_s + 9.0)
        self.engine("engine-1", "installing", "serving", at_s + 9.5, version=9)
        self.tell("rollout", Kind.DROP, at_s=at_s + 1.0, group=900, cause="too old: policy age 9")

    def _lose_trainer(self, at_s: float) -> None:
        lost = {"subject": "trainer-1", "cause": "killed by SIGKILL"}
        self.tell("supervisor", Kind.EXIT, at_s=at_s, phase="fault", **lost)
        self.tell("supervisor", Kind.RESTART, at_s=at_s, phase="role", attempt=2, **lost)
        self.tell("supervisor", Kind.SPAWN, at_s=at_s + 0.1, subject="trainer-1", pid=14)
        self.tell("trainer-1", Kind.PHASE, at_s=at_s + 8.0, by=14, phase="attach", step=12)
        healed = {"source": "trainer-0", "bytes": 1000, "quorum_s": 0.1}
        times = {"transfer_s": 0.1, "load_s": 0.1, "from_step": 0}
        self.tell("trainer-1", Kind.HEAL, at_s=at_s + 12.5, by=14, step=15, **healed, **times)
