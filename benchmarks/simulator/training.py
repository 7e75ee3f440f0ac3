"""The pipeline of rollout and training as rates between events, and what its time is worth.

Pure: no clock, no randomness. Between two events rollout and training go on at constant rates, so
time is passed in pieces as long as the next event allows.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from benchmarks.simulator.cluster import Cluster, Workload, slowdown
from torchtitan_rl_ft.rollout.schedule import Policy, wanted

EPSILON = 1e-6
"""Of prompt groups and seconds: two events so close are one."""


class Trainer(StrEnum):
    STARTING = "starting"  # of the whole job, at first
    WAITING = "waiting"  # for a batch
    TRAINING = "training"
    SAVING = "saving"  # the blocking part of a checkpoint
    UNNOTICED = "unnoticed"  # dead, and nobody knows
    RESTARTING = "restarting"


GONE = frozenset({Trainer.UNNOTICED, Trainer.RESTARTING})
IDLE = GONE | {Trainer.SAVING}
"""Trainers do not compute."""


@dataclass
class Account:
    """Seconds. `paper`: as `observability/ettr.py` measures it on live runs. `credit`: RobustRL's
    own words taken literally, for its figures: every compute stage counts, done again or not, and
    while trainers restart or save, rollouts' share of the machines as long as rollouts live,
    whether or not the bound on their age lets them generate. `trainer`: by what
    trainers did; `redo`: training of steps that had been committed before."""

    wall_s: float = 0.0
    paper_s: float = 0.0
    credit_s: float = 0.0
    redo_s: float = 0.0
    trainer_s: Counter[Trainer] = field(default_factory=Counter)

    def minus(self, other: Account) -> Account:
        return Account(
            self.wall_s - other.wall_s,
            self.paper_s - other.paper_s,
            self.credit_s - other.credit_s,
            self.redo_s - other.redo_s,
            Counter({k: v - other.trainer_s[k] for k, v in self.trainer_s.items()}),
        )

    def add(self, other: Account, times: int = 1) -> None:
        self.wall_s += times * other.wall_s
        self.paper_s += times * other.paper_s
        self.credit_s += times * other.credit_s
        self.redo_s += times * other.redo_s
        for key, seconds in other.trainer_s.items():
            self.trainer_s[key] += times * seconds

    def copy(self) -> Account:
        trainer_s = Counter(self.trainer_s)
        return Account(self.wall_s, self.paper_s, self.credit_s, self.redo_s, trainer_s)


class Pipeline:
    """Rollout makes prompt groups ahead of training, as far as our own schedule allows (`wanted`);
    training takes a batch when it is complete; a commit pauses rollout for the weights' sync."""

    def __init__(self, work: Workload, cluster: Cluster, save_every: int) -> None:
        self.work, self.cluster, self.save_every = work, cluster, save_every
        self.rules = work.rules
        self.committed = 0
        self.furthest = 0  # commits at the most, before any was lost
        self.produced = 0.0  # prompt groups since the start of history
        self.engines_up = cluster.engines
        self.groups_lost = 0
        self.job_down = True
        self.pause_s = 0.0
        self.trainer = Trainer.STARTING
        self.left_s = work.startup_s
        self.account = Account()
        self._bound = (-1, -1, 0.0)
        self._attempt_paper_s = 0.0  # of the step in training

    @property
    def done(self) -> bool:
        return self.committed >= self.work.steps and self.trainer is not Trainer.SAVING

    @property
    def redoing(self) -> bool:
        return self.committed < self.furthest

    # What happens next --------------------------------------------------------------------

    def rate(self) -> float:
        """Prompt groups per second now."""
        if self.job_down or self.pause_s > 0 or self.engines_up == 0:
            return 0.0
        if self.produced >= self.bound() - EPSILON:
            return 0.0
        share = 1.0 if self.cluster.one_host else self.engines_up / self.cluster.engines
        return share * self.work.prompts_per_step / self.work.rollout_s

    def bound(self) -> float:
        """Groups that may be made before the next commit."""
        planned = int((self.produced + EPSILON) / self.work.prompts_per_step)
        planned = max(planned, self.committed)
        if self._bound[:2] != (planned, self.committed):
            # A version per commit, the first with the initial weights.
            policy = Policy(self.committed, self.committed)
            more = wanted(self.rules, policy, planned)
            bound = float(planned * self.work.prompts_per_step + more)
            self._bound = (planned, self.committed, bound)
        return self._bound[2]

    def next_change_s(self) -> float:
        """How long everything goes on as it does now."""
        changes = [math.inf]
        if self.trainer in (Trainer.STARTING, Trainer.TRAINING, Trainer.SAVING):
            changes.append(self.left_s)
        if self.pause_s > 0 and not self.job_down:
            changes.append(self.pause_s)
        if (rate := self.rate()) > 0:
            per_step = self.work.prompts_per_step
            to_batch = per_step - (self.produced + EPSILON) % per_step + EPSILON
            changes.append(min(to_batch, self.bound() - self.produced) / rate)
        return min(changes)

    def advance(self, seconds: float) -> int:
        """Pass `seconds`, at most until the next change; how many steps were committed."""
        rate = self.rate()
        self._book(seconds, rate > 0)
        self.produced += rate * seconds
        if not self.job_down:
            self.pause_s = max(0.0, self.pause_s - seconds)
            if self.pause_s < EPSILON:
                self.pause_s = 0.0
        if self.trainer not in (Trainer.STARTING, Trainer.TRAINING, Trainer.SAVING):
            return self._settle()
        self.left_s -= seconds
        return self._settle() if self.left_s < EPSILON or self.trainer is Trainer.WAITING else 0

    def _settle(self) -> int:
        commits = 0
        if self.trainer is Trainer.STARTING:
            self.job_down = False
            self.trainer = Trainer.WAITING
        elif self.trainer is Trainer.SAVING:
            self.trainer = Trainer.WAITING
        elif self.trainer is Trainer.TRAINING:
            commits = self._commit()
        if self.trainer is Trainer.WAITING:
            self._take_batch()
        return commits

    def _commit(self) -> int:
        self.committed += 1
        self.furthest = max(self.furthest, self.committed)
        self.pause_s = self.work.sync_s
        self.trainer = Trainer.WAITING
        if self.committed % self.save_every == 0 and self.work.save_blocking_s > 0:
            self.trainer, self.left_s = Trainer.SAVING, self.work.save_blocking_s
        return 1

    def _take_batch(self) -> None:
        needed = (self.committed + 1) * self.work.prompts_per_step
        if self.committed < self.work.steps and self.produced >= needed - 2 * EPSILON:
            self.trainer = Trainer.TRAINING
            self.left_s = self.work.train_s * self._slowdown()
            self._attempt_paper_s = 0.0

    def _slowdown(self) -> float:
        groups, machines = self.cluster.trainer_groups, self.cluster.trainer_machines
        if not self.groups_lost or self.cluster.one_host:
            return 1.0
        return slowdown(groups, self.groups_lost, machines)

    # What faults and recoveries do ---------------------------------------------------------

    def lose_attempt(self) -> None:
        """The step in work is lost; its batch is kept. Other groups go on with it at once."""
        self._forget_attempt()
        if self.trainer is Trainer.TRAINING:
            self.trainer = Trainer.WAITING
            self._take_batch()

    def lose_trainers(self, why: Trainer) -> None:
        self._forget_attempt()
        self.trainer = why

    def lose_job(self, why: Trainer) -> None:
        self._forget_attempt()
        self.job_down = True
        self.trainer = why

    def _forget_attempt(self) -> None:
        """Training that came to nothing counts nowhere."""
        if self.trainer is Trainer.TRAINING:
            self.account.paper_s -= self._attempt_paper_s
            self._attempt_paper_s = 0.0

    def trainers_back(self, step: int) -> None:
        self.committed = step
        self.trainer = Trainer.WAITING
        self._take_batch()

    def job_back(self, step: int, *, rollouts_kept: bool) -> None:
        """All machines are up again. Rollout goes on from the journal, or from the last commit."""
        if not rollouts_kept:
            self.produced = float(step * self.work.prompts_per_step)
        self.job_down = False
        self.pause_s = 0.0
        self.engines_up = self.cluster.engines
        self.groups_lost = 0
        self.trainers_back(step)

    def lose_engine(self, engines: int, *, progress_kept: bool) -> int:
        """`engines` engines are gone, as far as there are so many; how many are. Without a journal
        their share of the batch in work is rolled out again."""
        lost = min(engines, self.engines_up)
        if lost and not progress_kept:
            per_step = self.work.prompts_per_step
            self.produced -= self.produced % per_step * lost / self.engines_up
        self.engines_up -= lost
        return lost

    # What time is worth --------------------------------------------------------------------

    def _book(self, seconds: float, rollouts_run: bool) -> None:
        self.account.wall_s += seconds
        self.account.trainer_s[self.trainer] += seconds
        training = self.trainer is Trainer.TRAINING
        if training and self.redoing:
            self.account.redo_s += seconds
        if self.job_down:
            return
        trainers, rollouts = self.cluster.trainer_share, 1 - self.cluster.trainer_share
        idle = self.trainer in IDLE
        self.account.credit_s += seconds * (rollouts if idle and self.engines_up else not idle)
        # A slot that waits counts, unless nobody works for an outage.
        if self.trainer not in GONE or rollouts_run:
            self.account.paper_s += seconds * rollouts * self.engines_up / self.cluster.engines
        if not idle and not (training and self.redoing):
            groups = self.cluster.trainer_groups
            paper_s = seconds * trainers * (groups - self.groups_lost) / groups
            self.account.paper_s += paper_s
            self._attempt_paper_s += paper_s if training else 0.0

    def signature(self) -> tuple[float, ...]:
        """Equal at two commits: what follows them is equal too, until something fails."""
        ahead = self.produced - self.committed * self.work.prompts_per_step
        place = self.committed % self.save_every
        return (round(ahead, 4), place, self.engines_up, self.groups_lost, self.redoing)

    def skip(self, steps: int, each: Account, times: int) -> None:
        """`times` periods of `steps` steps in which nothing fails, `each` worth that account."""
        self.committed += steps * times
        self.furthest = max(self.furthest, self.committed)
        self.produced += float(steps * times * self.work.prompts_per_step)
        self.account.add(each, times)


def strict_s(committed: int, work: Workload, cluster: Cluster) -> float:
    """Slot-seconds, over all slots, whose output is in a history of `committed` steps."""
    share = cluster.trainer_share
    return committed * (share * work.train_s + (1 - share) * work.rollout_s)
