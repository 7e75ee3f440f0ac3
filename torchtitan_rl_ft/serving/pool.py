"""All engines of a run: opened, brought to the target version, closed together."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from torchtitan_rl_ft.config.groups import engine_groups
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.serving.adoption import inherited_duties
from torchtitan_rl_ft.serving.deregistration import Hook
from torchtitan_rl_ft.serving.duties import TAKES_VERSIONS, Duty, Promotion, promotions
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_records import EngineRecord, Memory
from torchtitan_rl_ft.serving.external import ExternalSlot
from torchtitan_rl_ft.serving.groups import SlotPlan, chosen, shortage
from torchtitan_rl_ft.serving.loans import Loan
from torchtitan_rl_ft.serving.memory import ReleaseFailed, release
from torchtitan_rl_ft.serving.pair import Server, pairs
from torchtitan_rl_ft.serving.shared import Shared, Target
from torchtitan_rl_ft.serving.slot import Slot
from torchtitan_rl_ft.serving.states import EngineState


class PoolFailed(Exception):
    """Fewer engines than `rollout.min_engines` can ever serve again. `never_up`: none has come
    up at all, in spite of all tries."""

    def __init__(self, message: str, *, never_up: bool) -> None:
        super().__init__(message)
        self.never_up = never_up


class EnginePool:
    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.slots = [_slot(plan, shared) for plan in shared.plans]
        self._assigning: asyncio.Task[None] | None = None
        shared.engines = lambda: self.engines

    def open(
        self,
        adopted: Mapping[int, EngineRecord] | None = None,
        *,
        memory_lent: bool = False,
        loans: Mapping[int, Loan] | None = None,
    ) -> None:
        """`adopted`: living engines of an earlier serving role, by slot; where it had none, or
        has lost one, a new one is started; with `memory_lent` not before the memory is back, nor
        where the place is lent (`loans`)."""
        adopted, loans = adopted or {}, loans or {}
        self._shared.memory_lent = memory_lent
        self._assigning = asyncio.create_task(self._assign_duties())
        self._assigning.add_done_callback(lambda _: self._shared.changes.notify())
        duties = inherited_duties(self._shared.plans, adopted)
        for slot in self.slots:
            slot.assign(duties[slot.index])
            slot.open(
                adopted.get(slot.index),
                lost=bool(adopted) and slot.index not in adopted,
                loan=loans.get(slot.index),
            )

    async def close(self) -> None:
        if self._assigning is not None:
            self._assigning.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._assigning
        await asyncio.gather(*(slot.close() for slot in self.slots))
        await self._shared.deregistration.close()

    async def _assign_duties(self) -> None:
        """Have standby engines take the places of those that are lost, at once."""
        while True:
            await self._shared.changes.wait_until(lambda: bool(self._promotions()), math.inf)
            for promotion in self._promotions():
                old, new = self.slots[promotion.replaced], self.slots[promotion.promoted]
                old.assign(Duty.STANDBY if old.given_up is None else Duty.QUARANTINED)
                new.assign(Duty.ACTIVE)
                cause = f"takes the place of {old.name}"
                self._shared.events.emit(Kind.PROMOTE, cause=cause, subject=new.name)
                self._shared.changes.notify()
                if new.engine is not None:
                    await asyncio.to_thread(self._shared.records.put, new.engine.record())

    def _promotions(self) -> list[Promotion]:
        return promotions([slot.place for slot in self.slots])

    def on_deregister(self, hook: Hook) -> None:
        """Have `hook` forget each engine that retires, before it is killed."""
        self._shared.deregistration.hooks.append(hook)

    @property
    def engines(self) -> Iterator[Engine]:
        """The present engine of each slot that has one."""
        return (s.engine for s in self.slots if s.engine is not None)

    @property
    def target(self) -> Target | None:
        return self._shared.target

    def require(self, targets: Mapping[str, Target]) -> None:
        """Have every engine of a group, now and later, hold the group's target. Those that hold
        another version take no more requests from now on."""
        self._shared.targets.update(targets)
        if any(t.release.version > 0 for t in targets.values()):
            self.take_memory_back()
        for engine in self.engines:
            target = targets.get(engine.group.name)
            if target is None:
                continue
            if engine.state in (EngineState.SERVING, EngineState.PAUSED):
                engine.move(EngineState.STALE, f"version {target.release.version} is required")
        self._shared.changes.notify()

    def serving(self, version: int) -> list[Engine]:
        """Engines that can answer with the policy's `version`: a half of disaggregated ones only
        where the other half can too."""
        ready = [e for e in self.engines if e.plan.takes_versions and e.serves(version)]
        whole = {e.plan.unit for e in ready if e.group.role == "prefill"}
        whole &= {e.plan.unit for e in ready if e.group.role == "decode"}
        return [e for e in ready if e.group.role == "regular" or e.plan.unit in whole]

    def answering(self, version: int) -> int:
        """How many engines answer with the policy's `version`, at once or as soon as somebody asks
        (their memory is lent)."""
        if not self._shared.memory_lent or version != self._shared.version:
            return len(self.serving(version))
        return sum(e.plan.takes_versions and bool(e.client.released) for e in self.engines)

    def servers(self, name: str) -> list[Server]:
        """What can answer a request for group `name` now, as that group should. Raises
        GroupUnknown."""
        names = {g.name for g in chosen(engine_groups(self._shared.rollout), name)}
        ready = []
        for engine in self.engines:
            target = self._shared.target_for(engine.plan)
            if target is None or engine.group.name not in names:
                continue
            if engine.serves(target.release.version):
                ready.append(engine)
        whole = [e for e in ready if e.group.role in ("regular", "frozen")]
        return [*whole, *pairs(ready)]

    async def lend_memory(self, timeout_s: float) -> list[int]:
        """Have every engine give its memory up; slots of those that did. One that would not, or
        is not ready to, is retired, and replaced when the memory is taken back. Raises
        ReleaseFailed naming them, when their memory is free as well."""
        self._shared.memory_lent = True
        present = [e for e in self.engines if not e.client.released]
        alive = [e for e in present if e.state is not EngineState.RETIRED]
        results = await asyncio.gather(
            *(self._release(e, timeout_s) for e in alive), return_exceptions=True
        )
        failed = [r for r in results if r is not None]
        for fault in failed:
            if not isinstance(fault, ReleaseFailed):
                raise fault
        # What is retired holds its memory until it is dead.
        leaving = [e for e in present if e.condemned or not e.client.released]
        await self._shared.changes.wait_until(
            lambda: not any(e in leaving for e in self.engines),
            self._shared.rollout.cleanup_timeout,
        )
        if failed:
            raise ReleaseFailed("; ".join(map(str, failed)))
        return sorted(e.slot for e in self.engines if e.client.released)

    async def _release(self, engine: Engine, timeout_s: float) -> None:
        """Durable before and after: a later serving role must not start an engine, nor wait for
        one, because it knows too little."""
        put = self._shared.records.put
        await asyncio.to_thread(put, engine.record(Memory.RELEASING))
        await release(engine, timeout_s)
        await asyncio.to_thread(put, engine.record())

    @property
    def damaged(self) -> int | None:
        """The required version, when it can be installed no more and no engine holds it: nobody
        can go on before it is published again."""
        version = self._shared.version
        return version if self._shared.damaged == version and not self.answering(version) else None

    def take_memory_back(self) -> None:
        """Engines take their memory back as they install what is required of them."""
        if self._shared.memory_lent:
            self._shared.memory_lent = False
            self._shared.changes.notify()

    def groups(self) -> list[dict[str, Any]]:
        """Each group and how many of its engines hold what they should."""
        found = []
        for group in engine_groups(self._shared.rollout):
            target = self._shared.targets.get(group.name)
            version = target.release.version if target is not None else None
            present = [e for e in self.engines if e.group.name == group.name]
            current = sum(version is not None and e.serves(version) for e in present)
            found.append(
                {
                    "name": group.name,
                    "role": group.role,
                    "engines": group.engines,
                    "serving": current,
                    "version": version or None,  # frozen groups have none
                    "digest": target.proof.model_digest if target is not None else None,
                }
            )
        return found

    async def check(self, timeout_s: float) -> tuple[int, list[int]]:
        """Probe every engine that serves, now and all at once, whatever the waits. Returns how
        many, and the slots of those that were found dead: they are out of routing by then. An
        engine without a verdict within `timeout_s` stays under its check."""
        engines = [e for e in self.engines if e.state in (EngineState.SERVING, EngineState.SUSPECT)]
        if engines:
            tasks = [asyncio.create_task(self._verdict(e)) for e in engines]
            _, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()  # the waiting, not the check
        return len(engines), sorted(e.slot for e in engines if e.gone.is_set())

    async def _verdict(self, engine: Engine) -> None:
        await self._shared.prober.check(engine)
        if engine.condemned:  # by this check or an earlier one
            await engine.gone.wait()

    def all_current(self, version: int) -> bool:
        """Every engine that is up and meant to serve `version` does, and there is one. Engines
        that start, stand by, or die, hold nobody up."""
        policy = [e for e in self.engines if e.plan.takes_versions]
        meant = [e for e in policy if e.live and e.duty in TAKES_VERSIONS]
        meant = [e for e in meant if e.serves(version) or self._shared.may_join(e)]
        return bool(meant) and all(e.serves(version) for e in meant)

    async def run_until_failed(self) -> None:
        """Raises PoolFailed when the floor cannot be held; an error of a slot's own code goes
        through."""
        while True:
            await self._shared.changes.wait_until(self._broken, math.inf)
            for failure in self._failures():
                raise failure
            self._check_floor()

    def _broken(self) -> bool:
        return self._shortage() is not None or any(self._failures())

    def _failures(self) -> Iterator[BaseException]:
        """Errors of this package's own code."""
        found = [slot.failure for slot in self.slots]
        if (task := self._assigning) is not None and task.done() and not task.cancelled():
            found.append(task.exception())
        return (f for f in found if f is not None)

    def _shortage(self) -> str | None:
        given_up = {s.index for s in self.slots if s.given_up is not None}
        return shortage(self._shared.plans, given_up, self._shared.rollout.min_engines)

    def _check_floor(self) -> None:
        if (missing := self._shortage()) is not None:
            given_up = [s for s in self.slots if s.given_up is not None]
            last = max(given_up, key=lambda s: s.given_up_mono_s)
            never_up = not any(s.came_up for s in self.slots)
            raise PoolFailed(f"{missing}: {last.given_up}", never_up=never_up)


def _slot(plan: SlotPlan, shared: Shared) -> Slot:
    return Slot(plan, shared) if plan.external_url is None else ExternalSlot(plan, shared)
