"""The rollout loop: prompts to journaled samples to sealed batches, until the run is over.

One task rolls out one prompt group. After every change (a task's end, a commit, a new policy)
`_advance` seals what is complete, drops what is too old, and starts what `schedule` allows. All
state that matters is in the journal; what is kept here can be rebuilt from it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchtitan_rl_ft.journal.drop_kinds import CRASHED, TOO_LONG, TOO_OLD
from torchtitan_rl_ft.journal.errors import JournalError
from torchtitan_rl_ft.journal.exits import ExitNote
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.store import NewGroup, PromptGroup
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.rollout import schedule
from torchtitan_rl_ft.rollout.dump_writer import DumpWriter
from torchtitan_rl_ft.rollout.engine_check import EngineCheck
from torchtitan_rl_ft.rollout.evaluation import evaluate
from torchtitan_rl_ft.rollout.generation import ServedPolicy
from torchtitan_rl_ft.rollout.group_rollout import Dropped, GroupRollout
from torchtitan_rl_ft.rollout.partials import PartialKeeper
from torchtitan_rl_ft.rollout.pipeline import Pipeline
from torchtitan_rl_ft.rollout.policy_watch import PolicyWatch
from torchtitan_rl_ft.rollout.protocols import DataSource, HeldOutSource, Prompt
from torchtitan_rl_ft.rollout.sealing import AcceptedGroup, seal
from torchtitan_rl_ft.rollout.starvation import RolloutStalled, Starvation
from torchtitan_rl_ft.run_folder import write_atomic

logger = logging.getLogger(__name__)

ENDS_THE_ROLE = (JournalError, RolloutStalled, OSError)
"""Not the fault of one group. An OSError: events cannot be written."""

TICK_S = 1.0  # limits are looked at this often when nothing happens


@dataclass(frozen=True)
class LoopSettings:
    rules: schedule.Rules
    advantage_norm: Literal["std", "none"]
    loss_norm: Literal["token", "sample"]
    newest_version_only: bool
    """Train no token of a sample that is older than the sample's newest."""
    max_concurrent_groups: int
    max_group_crashes: int
    """Errors in the code that rolls out a group before its prompt is dropped."""
    max_prompt_tokens: int
    eval_prompts: int
    eval_path: Path
    drain_timeout_s: float
    final_policy_timeout_s: float
    trainers: bool = True
    """False: nobody trains. The policy stays as it is, and the run is over when every batch is
    sealed and dumped."""


class RolloutLoop:
    """Runs on one event loop, together with the ledger's routes."""

    def __init__(
        self,
        ledger: Ledger,
        source: DataSource,
        rollout: GroupRollout,
        watch: PolicyWatch,
        starvation: Starvation,
        settings: LoopSettings,
        events: EventSink,
        *,
        engine_check: EngineCheck | None = None,
        dumps: DumpWriter | None = None,
        partials: PartialKeeper | None = None,
        drain_note: ExitNote | None = None,
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Takes up what the journal holds: the source's position, pending prompts (rolled out
        again) and accepted groups. `engine_check` comes before every batch and after the
        evaluation. `drain_note`: where a role that is killed while it drains finds that. Raises
        ValueError when the position is of another source."""
        self._ledger, self._journal = ledger, ledger.journal
        self._source, self._rollout, self._watch = source, rollout, watch
        self._starvation, self._settings, self._events = starvation, settings, events
        self._rules, self._engine_check = settings.rules, engine_check
        self._dumps, self._partials = dumps, partials
        self._mono_s = mono_s
        self._wake = asyncio.Event()
        self._queue: deque[PromptGroup] = deque(self._journal.pending())
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, PromptGroup] = {}  # of the tasks
        self._crashes: Counter[int] = Counter()
        self._beside: list[asyncio.Task[None]] = []
        self._accepted = {g.group_id: _accepted(g) for g in self._journal.accepted()}
        self._started_mono_s: dict[int, float] = {}
        self._exhausted = False
        self._drain_note = drain_note
        found = drain_note.read() if drain_note is not None else None
        self._draining = found[1] if found is not None else None
        self._drain_until_mono_s = mono_s() + settings.drain_timeout_s
        self._phase = ""
        self._pipeline = Pipeline(mono_s)
        ledger.on_published(self._pipeline.announced)
        if (cursor := self._journal.cursor()) is not None and hasattr(source, "load_state_dict"):
            source.load_state_dict(cursor)
        self._journal.on_change(self.wake)

    # From outside -----------------------------------------------------------------------

    def wake(self) -> None:
        """Something has changed: look again. Call it on the event loop's thread."""
        self._wake.set()

    def drain(self, reason: str) -> None:
        """Start nothing new; end the run as drained once what is in flight has been accepted.
        Raises OSError when that cannot be written down."""
        if self._draining is None:
            if self._drain_note is not None:
                self._drain_note.write(self._journal.tip.step, reason)
            self._draining = reason
            self._drain_until_mono_s = self._mono_s() + self._settings.drain_timeout_s
        self.wake()

    def status(self) -> dict[str, Any]:
        policy = self._watch.current
        return {
            "phase": self._phase,
            "mode": self._rules.mode,
            "step": self._journal.tip.step,
            "total_steps": self._rules.total_steps,
            "sealed": len(self._journal.plan),
            "policy": None if policy is None else {"version": policy.version, "step": policy.step},
            "in_flight": len(self._tasks),
            "queued": len(self._queue),
            "accepted": len(self._accepted),
            "sealed_ahead": self._journal.sealed_ahead,
            "draining": self._draining,
            "trouble": self._starvation.reason,
            "serving_unavailable": self._watch.unavailable,
            "counts": self._journal.counts(),
        }

    # The loop ---------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the ledger has an outcome. Raises RolloutStalled, JournalError, DumpWriteError;
        tasks are ended in every case."""
        self._beside = [asyncio.create_task(self._watch.run())]
        if self._partials is not None:
            self._beside.append(asyncio.create_task(self._partials.run()))
        if self._dumps is not None:
            self._dumps.take_up()
            self._beside.append(asyncio.create_task(self._dumps.run()))
        for task in self._beside:
            task.add_done_callback(lambda _: self.wake())
        try:
            while self._ledger.outcome is None:
                self._wake.clear()
                self._check_beside()
                self._starvation.working(len(self._tasks))
                self._starvation.check()
                self._ledger.try_exit()
                if self._ledger.exit_asked:  # what is in flight may still be accepted
                    self._enter("exiting")
                elif self._draining is not None:
                    self._end_drained()
                elif self._complete():
                    await self._finish()
                    continue
                else:
                    self._advance()
                await self._woken()
                self._collect()
        finally:
            await _cancelled([*self._beside, *self._tasks.values()])
            if self._engine_check is not None:
                await self._engine_check.close()
            self._tasks.clear()

    def _check_beside(self) -> None:
        """Raises what has ended a task that never ends by itself."""
        for task in self._beside:
            if task.done():
                task.result()

    async def _woken(self) -> None:
        """Wait for `wake`, or a tick. Not `wait_for`: in Python 3.11 that can lose a cancellation
        (SIGTERM) that comes together with the wake-up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TICK_S):
                await self._wake.wait()

    def _collect(self) -> None:
        """Take the ended tasks away. Raises what ends the role."""
        for group_id in [i for i, task in self._tasks.items() if task.done()]:
            error = self._tasks.pop(group_id).exception()
            group = self._groups.pop(group_id)
            if isinstance(error, ENDS_THE_ROLE):
                raise error
            if error is not None:
                self._crashed(group, error)

    def _crashed(self, group: PromptGroup, error: BaseException) -> None:
        """One group's crash ends no other group: its prompt, which is still pending in the
        journal, is rolled out again."""
        group_id = group.group_id
        self._crashes[group_id] += 1
        self._pipeline.failed(1)
        cause = f"{CRASHED} {self._crashes[group_id]} times, the last one: {_named(error)}"
        if self._crashes[group_id] >= self._settings.max_group_crashes:
            self._drop(group_id, cause)
            return
        self._events.emit(Kind.WARN, cause=f"group {group_id} {cause}", group=group_id)
        self._queue.append(group)

    def _advance(self) -> None:
        policy = self._policy()
        if policy is None:
            self._enter("waiting_for_policy")
            return
        while self._seal_next(policy):
            policy = self._policy() or policy
        planned = len(self._journal.plan)
        room = schedule.wanted(self._rules, policy, planned) - len(self._accepted)
        self._issue(room - len(self._tasks) - len(self._queue))
        self._start(room)
        self._check_exhausted()
        self._enter("rollout" if self._tasks else "waiting_for_trainers")

    def _policy(self) -> schedule.Policy | None:
        served = self._watch.current
        if served is None:
            return None
        self._pipeline.served(served.version, self._watch.seen_mono_s)
        if not self._settings.trainers:
            return schedule.constant_policy(served.version, len(self._journal.plan))
        return schedule.known_policy(
            served.version, served.step, served.token, self._journal.tokens
        )

    def _seal_next(self, policy: schedule.Policy) -> bool:
        """Seal the next batch if its groups are there; True when it was."""
        planned = len(self._journal.plan)
        if planned >= self._rules.total_steps or (self._dumps is not None and self._dumps.full):
            return False
        version = schedule.version_at(policy, planned)
        waiting = [schedule.Waiting(i, g.min_version) for i, g in self._accepted.items()]
        choice = schedule.choose(self._rules, waiting, version)
        for group_id in choice.too_old:
            age = version - self._accepted.pop(group_id).min_version
            self._drop(group_id, f"{TOO_OLD}: policy age {age}, at most {self._rules.max_age}")
        if not choice.seal:
            return False
        if self._engine_check is not None and not self._engine_check.done():
            return False
        batch = seal(
            [self._accepted[i] for i in choice.seal],
            version=version,
            advantage_norm=self._settings.advantage_norm,
            loss_norm=self._settings.loss_norm,
            newest_version_only=self._settings.newest_version_only,
        )
        now = self._mono_s()
        started = [self._started_mono_s.pop(i) for i in choice.seal if i in self._started_mono_s]
        batch.meta["rollout/span_s"] = now - min(started, default=now)
        if self._engine_check is not None:
            batch.meta["rollout/engine_check_s"] = self._engine_check.took_s
        left = len(self._accepted) - len(choice.seal)
        batch.meta.update(self._pipeline.take(left, self._journal.sealed_ahead + 1))
        sealed = self._journal.seal(batch, choice.seal)
        if self._dumps is not None:
            self._dumps.sealed(sealed.step)
        for group_id in choice.seal:
            del self._accepted[group_id]
        self._starvation.sealed(bool(batch.arrays["advantages"].any()))
        return True

    # Prompts ----------------------------------------------------------------------------

    def _issue(self, count: int) -> None:
        """Draw prompts and make them pending, together with the source's position."""
        if count <= 0 or self._exhausted:
            return
        try:
            prompts = list(self._source.next(count))
        except Exception as e:  # user code: it ends the role by name, its traceback is in the log
            logger.exception("the data source failed")
            raise RolloutStalled(f"the data source failed: {_named(e)}") from e
        self._exhausted = len(prompts) < count
        groups = [NewGroup(p.to_json(), f"{p.epoch}:{p.index}") for p in prompts]
        state_dict = getattr(self._source, "state_dict", None)
        if groups:
            ids = self._journal.issue(groups, state_dict() if state_dict else None)
            self._events.emit(Kind.ISSUE, groups=len(ids), first=ids[0], last=ids[-1])
            for group_id, group in zip(ids, groups, strict=True):
                self._queue.append(PromptGroup(group_id, group.key, group.prompt))

    def _check_exhausted(self) -> None:
        """Raises RolloutStalled when a batch that is left to seal cannot be filled any more."""
        busy = self._tasks or self._queue
        if self._settings.trainers:
            busy = busy or self._journal.sealed_ahead
        left = self._rules.total_steps - len(self._journal.plan)
        if (
            self._exhausted
            and not busy
            and left
            and len(self._accepted) < self._rules.groups_per_step
        ):
            raise RolloutStalled(
                f"the data source has no more prompts, and {left} of {self._rules.total_steps} "
                "steps are left: lower training.steps or give it more"
            )

    def _start(self, room: int) -> None:
        """Start tasks for queued prompts, so that at most `room` are in flight."""
        limit = min(room, self._settings.max_concurrent_groups)
        while self._queue and len(self._tasks) < limit:
            group = self._queue.popleft()
            prompt = Prompt.from_json(group.prompt)
            length = len(self._rollout.encode(prompt))
            if length > self._settings.max_prompt_tokens:
                most = self._settings.max_prompt_tokens
                self._drop(group.group_id, f"{TOO_LONG}: {length} tokens, at most {most}")
                continue
            self._started_mono_s[group.group_id] = self._mono_s()
            task = asyncio.create_task(self._roll_out(group.group_id, prompt))
            task.add_done_callback(lambda _: self.wake())
            self._tasks[group.group_id] = task
            self._groups[group.group_id] = group

    async def _roll_out(self, group_id: int, prompt: Prompt) -> None:
        unfinished = None
        if self._partials is not None:
            unfinished = self._partials.of(group_id, self._rollout.samples)
        result = await self._rollout.run(
            f"group-{group_id}", prompt, unfinished=unfinished, why_useless=self._why_useless
        )
        self._pipeline.failed(result.failures)
        if isinstance(result, Dropped):
            self._drop(group_id, result.reason)
            return
        self._journal.accept(
            group_id,
            result.arrays,
            min_version=result.min_version,
            max_version=result.max_version,
        )
        self._accepted[group_id] = AcceptedGroup(
            group_id, result.arrays, result.min_version, result.max_version
        )
        self._starvation.accepted()
        took_s = round(self._mono_s() - self._started_mono_s[group_id], 3)
        told: dict[str, Any] = {"group": group_id, "took_s": took_s, "trace": result.trace}
        if result.trace is None:
            del told["trace"]
        self._events.emit(Kind.ACCEPT, version=result.min_version, **told)

    def _why_useless(self, oldest_version: int) -> str | None:
        """Why samples with tokens of that version can go into no batch any more, or None."""
        policy = self._policy()
        if policy is None:
            return None
        age = schedule.version_at(policy, len(self._journal.plan)) - oldest_version
        if age <= self._rules.max_age:
            return None
        return f"too old: policy age {age}, at most {self._rules.max_age}"

    def _drop(self, group_id: int, reason: str) -> None:
        self._started_mono_s.pop(group_id, None)
        self._journal.drop(group_id, reason)
        self._starvation.dropped(reason)

    # Ends -------------------------------------------------------------------------------

    def _end_drained(self) -> None:
        self._enter("draining")
        idle = not self._tasks and (self._dumps is None or self._dumps.idle)
        if idle or self._mono_s() >= self._drain_until_mono_s:
            self._ledger.set_outcome("drained", self._draining or "")

    async def _finish(self) -> None:
        """All steps are committed: evaluate the final policy, then end the run.

        Returns early when the history was rewound meanwhile.
        """
        self._enter("waiting_for_dumps")
        await self._dumped()
        self._enter("waiting_for_final_policy")
        policy = await self._final_policy()
        if policy is None:
            return
        if self._settings.eval_prompts > 0:
            self._enter("evaluation")
            await self._evaluate(policy)
        if self._complete():
            total = self._rules.total_steps
            done = f"all {total} steps are committed"
            if not self._settings.trainers:
                done = f"all {total} rollouts are dumped"
            self._ledger.set_outcome("done", done)

    def _complete(self) -> bool:
        reached = self._journal.tip.step if self._settings.trainers else len(self._journal.plan)
        return reached >= self._rules.total_steps

    async def _dumped(self) -> None:
        """Every sealed batch is dumped. Raises DumpWriteError."""
        while self._dumps is not None and not self._dumps.idle:
            self._wake.clear()
            self._check_beside()
            await self._woken()

    async def _final_policy(self) -> ServedPolicy | None:
        """The policy of the tip, once it is served; None when there is work again."""
        limit_s = self._settings.final_policy_timeout_s
        end = self._mono_s() + limit_s
        while self._complete() and self._ledger.outcome is None and self._draining is None:
            self._wake.clear()
            tip, policy = self._journal.tip, self._watch.current
            if policy is not None and (policy.step, policy.token) == (tip.step, tip.token):
                return policy
            if self._mono_s() >= end:
                raise RolloutStalled(
                    f"the policy of the last step ({tip.step}) was not served within {limit_s:g} s"
                )
            await self._woken()
        return None

    async def _evaluate(self, policy: ServedPolicy) -> None:
        if not isinstance(self._source, HeldOutSource):
            self._events.emit(Kind.WARN, cause="no evaluation: the data source has no held_out(n)")
            return
        prompts = self._source.held_out(self._settings.eval_prompts)
        found = await evaluate(self._rollout, prompts, policy, self._settings.max_concurrent_groups)
        if self._engine_check is not None:
            await self._engine_check.run()
        text = json.dumps(found.to_json(), indent=1, allow_nan=False)
        write_atomic(self._settings.eval_path, text.encode() + b"\n")
        if found.reward is None:
            first = next((a["failed"] for a in found.answers if "failed" in a), "no prompts")
            self._events.emit(Kind.WARN, cause=f"evaluation without a reward: {first}")
            return
        self._events.emit(
            Kind.EVAL,
            step=policy.step,
            version=policy.version,
            reward=found.reward,
            prompts=found.prompts,
            failed=found.failed,
        )

    def _enter(self, phase: str) -> None:
        if phase != self._phase:
            self._phase = phase
            self._pipeline.entered(phase)
            self._events.emit(Kind.PHASE, phase=phase, step=self._journal.tip.step)


def _named(error: BaseException) -> str:
    """The error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def _accepted(group: PromptGroup) -> AcceptedGroup:
    assert group.min_version is not None and group.max_version is not None
    return AcceptedGroup(group.group_id, group.samples, group.min_version, group.max_version)


async def _cancelled(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
