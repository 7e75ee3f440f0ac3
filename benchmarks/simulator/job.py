"""One simulated job: its pipeline in time, the faults that meet it, a strategy that answers."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import simpy

from benchmarks.simulator.cluster import Cluster, Workload
from benchmarks.simulator.failures import Fault
from benchmarks.simulator.history import History
from benchmarks.simulator.strategies.base import Strategy
from benchmarks.simulator.training import Account, Pipeline, Trainer, strict_s

Steps = Generator[simpy.Event, Any, None]


@dataclass(frozen=True)
class Result:
    """`strict` and `paper`: the two ETTRs; `credit`: see `Account`. `outages_s`: of each fault of a
    trainer, from the fault until trainers were back."""

    wall_s: float
    steps: int
    strict: float
    paper: float
    credit: float
    account: Account
    outages_s: tuple[float, ...]
    faults: int
    job_restarts: int


class Job:
    """What strategies act on. All times are seconds of the simulation."""

    def __init__(
        self,
        work: Workload,
        cluster: Cluster,
        strategy: Strategy,
        faults: Sequence[Fault],
        horizon_s: float = math.inf,
    ) -> None:
        self.env = simpy.Environment()
        self.work, self.cluster, self.strategy = work, cluster, strategy
        self.horizon_s = horizon_s
        self.history = History(cluster.trainer_groups)
        self.pipeline = Pipeline(work, cluster, strategy.save_every)
        self.epoch = 0  # of the job as a whole: what began in an earlier one is over
        self.job_restarts = 0
        self._outages_s: list[float] = []
        self._faults_met = 0
        self._passed_s = 0.0
        self._awaited: dict[int, simpy.Event] = {}
        self._seen: dict[tuple[float, ...], tuple[int, Account]] = {}
        self._open_s: list[float] = []
        timed = sorted((f for f in faults if f.at_s is not None), key=lambda f: f.at_s or 0.0)
        self.env.process(self._strike_timed(timed))
        for fault in faults:
            if fault.at_s is None:
                self.env.process(self._strike_after_step(fault))
        self._main = self.env.process(self._run())

    def run(self) -> Result:
        self.env.run(until=self._main)
        wall_s = self._passed_s
        useful_s = strict_s(self.history.step, self.work, self.cluster)
        return Result(
            wall_s,
            self.history.step,
            useful_s / wall_s,
            self.pipeline.account.paper_s / wall_s,
            self.pipeline.account.credit_s / wall_s,
            self.pipeline.account,
            tuple(self._outages_s),
            self._faults_met,
            self.job_restarts,
        )

    # Time ---------------------------------------------------------------------------------

    def _run(self) -> Steps:
        while not self.pipeline.done and self.env.now < self.horizon_s:
            yield from self._skip()
            left_s = min(self.pipeline.next_change_s(), self.horizon_s - self.env.now)
            if left_s == math.inf and not math.isfinite(self.env.peek()):
                raise RuntimeError(f"nothing happens any more at {self.env.now:g} s")
            try:
                if left_s == math.inf:
                    yield self.env.event()
                else:
                    yield self.env.timeout(left_s)
            except simpy.Interrupt:
                pass
            self.catch_up()

    def catch_up(self) -> None:
        """The pipeline is brought to this moment."""
        passed_s = self.env.now - self._passed_s
        self._passed_s = self.env.now
        if self.pipeline.advance(passed_s):
            self._committed()

    def _committed(self) -> None:
        self.history.commit()
        step = self.pipeline.committed
        if step % self.strategy.save_every == 0:
            durable_s = self.env.now + self.work.save_blocking_s + self.work.save_async_s
            self.history.save(durable_s)
        if (event := self._awaited.pop(step, None)) is not None:
            event.succeed()

    def _skip(self) -> Steps:
        """Steps in which nothing fails are one event, once they repeat themselves."""
        pipeline = self.pipeline
        if pipeline.trainer is not Trainer.TRAINING or pipeline.left_s < pipeline.work.train_s:
            return
        key = (*pipeline.signature(), round(pipeline.pause_s, 4))
        before = self._seen.get(key)
        self._seen[key] = (pipeline.committed, pipeline.account.copy())
        if before is None:
            return
        steps = pipeline.committed - before[0]
        each = pipeline.account.minus(before[1])
        # What is scheduled now is not ours: a fault, a recovery.
        until_s = min(self.env.peek(), self.horizon_s) - self.env.now
        goal = min([self.work.steps - 3, *(s - 1 for s in self._awaited)])
        times = min(until_s / each.wall_s, (goal - pipeline.committed) / steps)
        if steps <= 0 or times < 2 or pipeline.redoing:
            return
        whole = int(times) - 1
        yield self.env.timeout(whole * each.wall_s)
        self._passed_s = self.env.now
        pipeline.skip(steps, each, whole)
        for _ in range(steps * whole):
            self.history.commit()
            if self.history.step % self.strategy.save_every == 0:
                self.history.save(self.env.now)
        self._seen.clear()

    def after_step(self, step: int) -> simpy.Event:
        """Triggered by the first commit of `step`."""
        return self._awaited.setdefault(step, self.env.event())

    def next_commit(self) -> simpy.Event:
        return self._awaited.setdefault(self.pipeline.furthest + 1, self.env.event())

    # Faults -------------------------------------------------------------------------------

    def _strike_timed(self, faults: Sequence[Fault]) -> Steps:
        for fault in faults:
            assert fault.at_s is not None
            yield self.env.timeout(fault.at_s - self.env.now)
            self._strike(fault)

    def _strike_after_step(self, fault: Fault) -> Steps:
        if fault.after_step > 0:
            yield self.after_step(fault.after_step)
        elif self.work.startup_s:
            yield self.env.timeout(self.work.startup_s)
        yield self.env.timeout(fault.offset_s)
        self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self._faults_met += 1
        if fault.role == "trainer":
            self._open_s.append(self.env.now)
        self.env.process(self.strategy.answer(self, fault))

    # What strategies do -------------------------------------------------------------------

    def new_epoch(self) -> int:
        """Whatever is under way is over."""
        self.epoch += 1
        return self.epoch

    @contextmanager
    def changing(self) -> Iterator[Pipeline]:
        """The pipeline, at this moment; what it does next is planned anew afterwards."""
        self.catch_up()
        self._seen.clear()
        yield self.pipeline
        if self._main.is_alive and self._main is not self.env.active_process:
            self._main.interrupt()

    def lose_group(self, group: int, *, noticed: bool) -> bool:
        """Whether other groups are left. They give the step up at once, or hang until it is
        noticed."""
        with self.changing() as pipeline:
            if self.history.is_alive(group):
                self.history.lose(group, self.env.now)
                pipeline.groups_lost += 1
            left = self.history.alive > 0
            if pipeline.job_down:
                return left
            if noticed and left:
                pipeline.lose_attempt()
            else:
                pipeline.lose_trainers(Trainer.RESTARTING if noticed else Trainer.UNNOTICED)
        return left

    def go_on_without(self) -> None:
        """The groups that are left have noticed."""
        with self.changing() as pipeline:
            if not pipeline.job_down and self.history.alive > 0:
                pipeline.trainers_back(self.history.step)

    def restarting(self) -> None:
        with self.changing() as pipeline:
            if pipeline.trainer is Trainer.UNNOTICED and self.history.alive == 0:
                pipeline.lose_trainers(Trainer.RESTARTING)

    def group_back(self, group: int) -> None:
        with self.changing() as pipeline:
            alone = self.history.alive == 0
            step = self.history.join(group)
            pipeline.groups_lost -= 1
            if alone and not pipeline.job_down:
                pipeline.trainers_back(step)
        self._close_outages()

    def job_down(self) -> None:
        with self.changing() as pipeline:
            self.history.lose_all(self.env.now)
            pipeline.lose_job(Trainer.RESTARTING)
        self.job_restarts += 1

    def job_back(self, *, rollouts_kept: bool) -> None:
        with self.changing() as pipeline:
            for group in range(self.cluster.trainer_groups):
                step = self.history.join(group)
            pipeline.job_back(step, rollouts_kept=rollouts_kept)
        self._close_outages()

    def lose_engines(self, engines: int, *, progress_kept: bool) -> int:
        with self.changing() as pipeline:
            return pipeline.lose_engine(engines, progress_kept=progress_kept)

    def engines_back(self, engines: int) -> None:
        with self.changing() as pipeline:
            pipeline.engines_up = min(pipeline.engines_up + engines, self.cluster.engines)

    def pause(self) -> None:
        """No role can go on, none has lost anything."""
        with self.changing() as pipeline:
            pipeline.lose_job(Trainer.RESTARTING)

    def unpause(self) -> None:
        with self.changing() as pipeline:
            pipeline.job_down = False
            pipeline.trainers_back(self.history.step)

    def _close_outages(self) -> None:
        self._outages_s += [self.env.now - began_s for began_s in self._open_s]
        self._open_s.clear()
