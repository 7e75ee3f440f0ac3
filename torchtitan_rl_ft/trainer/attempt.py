"""One attempt at one step: from this rank's view of the batch to the group's vote."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from torchtitan_rl_ft.journal.records import SealedBatch
from torchtitan_rl_ft.journal.views import view
from torchtitan_rl_ft.replica.group import Quorum, ReplicaGroup
from torchtitan_rl_ft.trainer import coverage
from torchtitan_rl_ft.trainer.coverage import Claim, CoverageError
from torchtitan_rl_ft.trainer.gradients import local_gradients, sum_over_groups
from torchtitan_rl_ft.trainer.policy_loss import PolicyLoss
from torchtitan_rl_ft.trainer.rows import MicroBatch, micro_batches, row_length, unpack


class NumericError(Exception):
    """Loss or gradients are not finite."""


@dataclass(frozen=True)
class Placement:
    """This rank inside its group: data-parallel rank and degree, and how to sum over them."""

    rank: int
    degree: int
    group: dist.ProcessGroup | None

    @property
    def speaks(self) -> bool:
        """Carries the group's own slots of the coverage vector. Tensor-parallel peers all do:
        each sums over the groups with the ranks at its own place."""
        return self.rank == 0

    def sum(self, vector: torch.Tensor) -> None:
        if self.group is not None and self.degree > 1:
            dist.all_reduce(vector, group=self.group)


@dataclass(frozen=True)
class Work:
    """What one attempt is about."""

    claim: Claim
    batch: SealedBatch
    quorum: Quorum
    nonce: int


@dataclass(frozen=True)
class Result:
    """A vote's outcome; `outcome` and `grad_norm` count only when committed."""

    committed: bool
    cause: str
    numeric: bool
    outcome: coverage.Outcome | None
    grad_norm: float


class Attempt:
    """Forward, backward, sums, proof and vote on given seams."""

    def __init__(
        self,
        *,
        group: ReplicaGroup,
        placement: Placement,
        parameters: list[torch.nn.Parameter],
        loss: PolicyLoss,
        forward_backward: Callable[[MicroBatch], torch.Tensor],
        clip: Callable[[], torch.Tensor],
        enter: Callable[[str], None],
        rows: int,
        seq_len: int,
        fixed_rows: bool,
    ) -> None:
        self._group, self._placement = group, placement
        self._parameters, self._loss = parameters, loss
        self._forward_backward, self._clip, self._enter = forward_backward, clip, enter
        self._rows, self._seq_len, self._fixed_rows = rows, seq_len, fixed_rows

    def run(self, work: Work) -> Result:
        """Gradients are left in the parameters, clipped, when the result is committed."""
        self._enter("forward_backward")
        samples, loss, recorded = self._compute(work)
        gradients = local_gradients(self._parameters)
        finite = math.isfinite(loss) and all_finite(gradients)
        self._enter("reduce")
        sum_over_groups(gradients, self._group.all_reduce)
        vector = coverage.fill(
            work.claim,
            samples,
            rank=work.quorum.rank or 0,
            nonce=work.nonce,
            speaks=self._placement.speaks,
            nonfinite=not finite,
            loss=loss,
            stats=self._loss.take_stats(),
            recorded=recorded,
        )
        self._sum(vector)
        return self._vote(work, vector)

    def recorded(self, batch: SealedBatch) -> int:
        """Values that ride along with the proof of a step on `batch`."""
        return batch.n_tokens if self._loss.config.record else 0

    def abstain(self, batch: SealedBatch, quorum: Quorum) -> None:
        """Keep the collectives of the others alive without taking part, so that they refuse at
        once instead of waiting for us until their timeout."""
        for p in self._parameters:
            p.grad = None
        sum_over_groups(local_gradients(self._parameters), self._group.all_reduce)
        self._sum(
            coverage.abstain(
                batch.n_samples, speaks=self._placement.speaks, n_recorded=self.recorded(batch)
            )
        )
        self._group.should_commit(False)

    def _compute(self, work: Work) -> tuple[np.ndarray, float, np.ndarray | None]:
        """This rank's samples, its share of the loss, and the policy's log-probs [T] of its
        samples when they are recorded."""
        assert work.quorum.rank is not None
        lengths = work.batch.lengths()
        shards = work.quorum.participants * self._placement.degree
        first = work.quorum.rank * self._placement.degree
        views = [view(lengths, first + d, shards) for d in range(self._placement.degree)]
        samples = views[self._placement.rank]
        # FSDP's collectives run in every backward: ranks of one group take equally many.
        count = max(1, *(-(-len(v) // self._rows) for v in views))
        total = 0.0
        record = self._loss.config.record
        logprobs = np.zeros(work.batch.n_tokens) if record else None
        for micro_batch in micro_batches(
            work.batch,
            samples,
            rows=self._rows,
            length=row_length(work.batch, self._seq_len, self._fixed_rows),
            count=count,
        ):
            total += float(self._forward_backward(micro_batch).detach())
            self._enter("forward_backward")  # it comes forward
            if logprobs is not None:
                unpack(work.batch, micro_batch, self._loss.take_logprobs(), logprobs)
        return samples, total, logprobs

    def _sum(self, vector: torch.Tensor) -> None:
        self._placement.sum(vector)
        self._group.all_reduce(vector)()

    def _vote(self, work: Work, vector: torch.Tensor, flaw: str = "") -> Result:
        """`flaw`: numbers that this rank knows to be not finite already."""
        self._enter("commit")
        outcome, cause, numeric = None, "", False
        # A collective inside the group, so on every rank, also on one whose sums have failed.
        norm = float(self._clip())
        if self._group.errored() is None:
            try:
                if flaw:
                    numeric = True
                    raise NumericError(flaw)
                outcome = coverage.check(vector, work.claim, work.quorum.participants)
                if outcome.nonfinite or not math.isfinite(norm):
                    numeric = True
                    raise NumericError(
                        f"loss or gradients of {outcome.nonfinite} rank(s) are not finite "
                        f"(gradient norm {norm})"
                    )
            except (CoverageError, NumericError) as e:
                cause = str(e)
                self._group.report_error(e)
        committed = self._group.should_commit(not cause)
        if not committed and not cause:
            error = self._group.errored()
            cause = f"{type(error).__name__}: {error}" if error else "a rank or the quorum refused"
        return Result(committed, cause, numeric, outcome, norm)


def all_finite(gradients: list[torch.Tensor]) -> bool:
    norms = torch._foreach_norm([g for g in gradients if g.numel()])
    return bool(torch.isfinite(torch.stack(norms)).all()) if norms else True
