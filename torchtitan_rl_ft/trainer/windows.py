"""One attempt at a window: inner steps on this group's share, outer sync, proof and vote.

    opening (who has done what) -> inner steps on what this group owes -> sums over the groups of
    the weighted deltas and of the coverage -> commit vote -> outer step

To the step protocol a window is one step (trainer/stepper.py). A refused attempt leaves the model
at the base and the work on the shelf (trainer/window_work.py), so the next attempt goes on with
it: what a lost group had done is all that is done again.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable

import numpy as np
import torch

from torchtitan_rl_ft.journal.records import SealedBatch
from torchtitan_rl_ft.journal.views import view
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.replica.group import Quorum
from torchtitan_rl_ft.replica.shards import local_shard
from torchtitan_rl_ft.trainer import coverage, window_plan
from torchtitan_rl_ft.trainer.attempt import (
    Attempt,
    Parts,
    Result,
    Work,
    all_finite,
    measure,
)
from torchtitan_rl_ft.trainer.coverage import CoverageError
from torchtitan_rl_ft.trainer.gradients import local_gradients, sum_over_groups
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.outer_optimizer import OuterOptimizer
from torchtitan_rl_ft.trainer.rows import micro_batches, row_length, unpack
from torchtitan_rl_ft.trainer.window_plan import Opening, Plan
from torchtitan_rl_ft.trainer.window_work import WindowWork

logger = logging.getLogger(__name__)

SLOW_SHARE = 0.5  # of quorum_timeout_s: a joiner waits for as long as an attempt takes


class WindowAttempt(Attempt):
    """Instead of an `Attempt` where training is semi-synchronous."""

    def __init__(
        self,
        parts: Parts,
        *,
        link: GroupLink,
        work: WindowWork,
        outer: OuterOptimizer,
        norm: Callable[[], torch.Tensor],
        inner_update: Callable[[], None],
        discard: Callable[[], None],
        seed: Callable[[int], None],
        sync_steps: int,
        events: EventSink,
    ) -> None:
        """`parts.clip`: of an inner step's gradients; `norm`: of gradients, which are left as they
        are. `inner_update`: one step of the inner optimizer. `seed`: the random numbers of an
        inner step."""
        super().__init__(dataclasses.replace(parts, clip=norm), reseed=lambda: seed(0))
        self._link, self._window, self._outer, self._events = link, work, outer, events
        self._clip_inner, self._inner_update = parts.clip, inner_update
        self._discard, self._seed, self._sync_steps = discard, seed, sync_steps
        self._unfit_at: object = None  # the window in which this group's numbers went wrong
        self._heal_wanted = self._warned = False

    # The interface of an attempt --------------------------------------------------------

    def run(self, work: Work) -> Result:
        """When the result is committed, parameters hold this group's own work until `apply`."""
        started_mono_s = time.monotonic()
        self._own_up(work)
        self._window.open(_key(work), work.batch.n_samples, work.claim.n_recorded)
        try:
            result = self._attempt(work)
        except BaseException:
            self._window.shelve()
            raise
        if not result.committed:
            self._window.shelve()
        self._watch(time.monotonic() - started_mono_s)
        return result

    def apply(self) -> None:
        """The outer step: the base, moved by the mean that the groups agreed on. Gradients hold
        the mean pseudo-gradient."""
        self._window.settle()
        self._outer.step()

    def abstain(self, batch: SealedBatch, quorum: Quorum) -> None:
        vector = window_plan.abstention(
            batch.n_samples, quorum.participants, speaks=self._placement.speaks
        )
        self._sum(vector)
        self._group.should_commit(False)

    def equal_tensors(self) -> dict[str, torch.Tensor]:
        """What all groups hold alike at equal step, by name: not the inner optimizer."""
        names = self._outer.names()
        held = zip(self._parameters, self._window.base(), strict=True)
        outer = {f"outer {name}": t for name, t in self._outer.tensors().items()}
        return {names[id(p)]: base for p, base in held} | outer

    def void(self) -> None:
        """The model was given another state."""
        self._window.void()

    # Opening ----------------------------------------------------------------------------

    def _own_up(self, work: Work) -> None:
        """A group that asked to be healed but had no peer goes on as what it is: torchft must not
        take its step for 0, or it would take an older state for newer."""
        if self._heal_wanted and not work.quorum.healed:
            self._group.set_step(work.claim.step)
        self._heal_wanted = False

    def _attempt(self, work: Work) -> Result:
        rank, participants = work.quorum.rank, work.quorum.participants
        assert rank is not None
        self._enter("reduce")
        plan, cause = self._open(work, rank)
        if plan is None:
            self._group.report_error(CoverageError(cause))
            self._group.should_commit(False)
            return Result(False, cause, False, None, 0.0)
        if not plan.keeps[rank]:
            logger.warning("this group's work is void: another group did some of it too")
            self._window.give_up()
        todo = np.flatnonzero(plan.owner == rank)
        lengths = work.batch.lengths()
        flaw = ""
        for samples in window_plan.inner_batches(
            todo, lengths, participants=participants, sync_steps=self._sync_steps
        ):
            flaw = self._inner_step(work.batch, samples) or flaw
        if not self._work_is_finite():
            flaw = "parameters are not finite after the inner steps"
            self._window.give_up()
        return self._sync(work, rank, flaw, plan)

    def _open(self, work: Work, rank: int) -> tuple[Plan | None, str]:
        vector = window_plan.opening_vector(
            work.claim,
            rank=rank,
            participants=work.quorum.participants,
            done=self._window.tally.done,
            unfit=self._unfit_at == _key(work),
            speaks=self._placement.speaks,
        )
        self._sum(vector)
        opening, cause = self._read_opening(vector, work)
        # One rank may have lost its peers and another not: inner steps are collectives of all.
        if not self._link.all_agree(opening is not None) or opening is None:
            return None, cause or "another rank of this group lost its peers"
        return window_plan.plan(opening, work.batch.lengths()), ""

    def _read_opening(self, vector: torch.Tensor, work: Work) -> tuple[Opening | None, str]:
        if (error := self._group.errored()) is not None:
            return None, f"{type(error).__name__}: {error}"
        try:
            return window_plan.read_opening(vector, work.claim, work.quorum.participants), ""
        except CoverageError as e:
            return None, str(e)

    # Inner steps ------------------------------------------------------------------------

    def _inner_step(self, batch: SealedBatch, samples: np.ndarray) -> str:
        """Train on `samples`; returns what was not finite, in which case nothing has changed and
        the samples are still to be done."""
        tally = self._window.tally
        weight = float(_sum_by_sample(batch, batch.arrays["weights"])[samples].sum())
        if weight > 0:  # else all their tokens are masked: nothing to learn from
            self._seed(tally.inner_steps)
            self._discard()
            loss, stats, logprobs = self._forward(batch, samples, weight)
            norm = float(self._clip_inner())
            if not self._link.all_agree(math.isfinite(loss) and math.isfinite(norm)):
                self._discard()
                return f"an inner step's loss ({loss}) or gradients (norm {norm}) are not finite"
            self._inner_update()
            tally.loss += loss * weight
            tally.stats += stats
            if tally.logprobs is not None and logprobs is not None:
                tally.logprobs += logprobs
        tally.done[samples] = True
        tally.inner_steps += 1
        return ""

    def _forward(
        self, batch: SealedBatch, samples: np.ndarray, weight: float
    ) -> tuple[float, torch.Tensor, np.ndarray | None]:
        """Gradients of the mean over `samples`: the batch's weights, of which they hold `weight`,
        divided by it, so that an inner step is as long as a step of sync mode."""
        scaled = dataclasses.replace(
            batch, arrays={**batch.arrays, "weights": batch.arrays["weights"] / weight}
        )
        lengths, degree = batch.lengths(), self._placement.degree
        mine = [samples[view(lengths[samples], d, degree)] for d in range(degree)]
        total, record = 0.0, self._loss.config.record
        logprobs = np.zeros(batch.n_tokens) if record else None
        for rows in micro_batches(
            scaled,
            mine[self._placement.rank],
            rows=self._rows,
            length=row_length(batch, self._seq_len, self._fixed_rows),
            count=max(1, *(-(-len(m) // self._rows) for m in mine)),
        ):
            self._enter("forward_backward")  # it comes forward
            total += float(self._forward_backward(rows).detach())
            if logprobs is not None:
                unpack(batch, rows, self._loss.take_logprobs(), logprobs)
        stats = self._loss.take_stats()
        assert stats is not None
        return total, stats.cpu(), logprobs

    def _work_is_finite(self) -> bool:
        shards = [local_shard(p.detach()) for p in self._parameters]
        return self._link.all_agree(all_finite(shards))

    # Outer sync -------------------------------------------------------------------------

    def _sync(self, work: Work, rank: int, flaw: str, plan: Plan) -> Result:
        self._enter("reduce")
        self._discard()
        tally, claim = self._window.tally, work.claim
        gradients = local_gradients(self._parameters)
        if not flaw:
            # All samples are done once, or the proof fails: the counts n_i sum to N.
            share = float(tally.done.sum()) / claim.n_samples
            self._window.write_pseudo_gradients(gradients, share)
        own = measure(tally.loss, gradients, with_total=False)
        by_parameter = {id(p): g for p, g in zip(self._parameters, gradients, strict=True)}
        for fragment in self._outer.fragments:
            sum_over_groups([by_parameter[id(p)] for p in fragment], self._group.all_reduce)
        vector = coverage.fill(
            claim,
            np.flatnonzero(tally.done) if self._placement.speaks else np.zeros(0, dtype=np.int64),
            rank=rank,
            nonce=work.nonce,
            speaks=self._placement.speaks,
            nonfinite=bool(flaw),
            loss=tally.loss,
            stats=tally.stats,
            recorded=tally.logprobs,
            row=self._row(work, own, {}),
        )
        flags = torch.zeros(work.quorum.participants, dtype=torch.float64)
        flags[rank] = float(bool(flaw) and self._placement.speaks)
        total = torch.cat([vector, flags])
        self._sum(total)
        vector, sick = total[: len(vector)], total[len(vector) :] > 0
        # Samples of a step that was not finite are missing from the proof: that is not its fault.
        found = f"{int(sick.sum())} group(s): {flaw or 'numbers are not finite'}"
        result = self._vote(work, vector, found if sick.any() else "")
        # The flags count only where the sums have not failed; one rank decides for its group.
        others_well = any(not sick[r] for r in plan.workers() if r != rank)
        alone = result.numeric and bool(sick[rank]) and others_well
        if self._link.ask(lambda: alone):
            self._part_with_bad_numbers(work)
        return result

    def _part_with_bad_numbers(self, work: Work) -> None:
        """While others' numbers are finite the machine is suspect before the samples are: this
        group leaves its work to the others, takes a peer's state, and sits the window out."""
        logger.warning("this group's numbers are not finite, others' are: it is healed")
        self._unfit_at, self._heal_wanted = _key(work), True
        self._window.give_up()
        self._group.set_step(0)

    def _watch(self, seconds: float) -> None:
        limit_s = self._group.config.quorum_timeout_s * SLOW_SHARE
        if seconds > limit_s and not self._warned:
            self._warned = True
            cause = (
                f"an attempt at a window took {seconds:.1f} s; a group that comes back waits for "
                "its end in the quorum, so fault_tolerance.quorum_timeout_s = "
                f"{self._group.config.quorum_timeout_s} should be more than twice as long"
            )
            self._events.emit(Kind.WARN, cause=cause)


def _key(work: Work) -> tuple[int, str, str]:
    return work.claim.step, work.claim.token, work.claim.digest


def _sum_by_sample(batch: SealedBatch, values: np.ndarray) -> np.ndarray:
    """`values` [T] summed over each sample, [N]."""
    offsets = batch.arrays["sample_offsets"]
    running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return running[offsets[1:]] - running[offsets[:-1]]
