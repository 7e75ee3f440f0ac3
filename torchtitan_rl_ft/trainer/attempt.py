"""One attempt at one step: from this rank's view of the batch to the group's vote."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
from torchtitan_rl_ft.trainer.rerun import Disputed, Finding, Rerun, Share, Verdict
from torchtitan_rl_ft.trainer.rows import MicroBatch, micro_batches, row_length, unpack
from torchtitan_rl_ft.trainer.state_hashes import Difference, differences, hashes

LOSS, NORM = 0, 1  # columns of the board: a rank's share of the loss, its gradients' norm
OWN_COLUMNS = 2


class StateDiffers(Exception):
    """Replica groups do not hold the same bits."""


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
    findings: tuple[Finding, ...] = ()
    """What computing the result again has shown."""

    differing: tuple[Difference, ...] = ()
    """Where groups hold other bits than the rest."""


@dataclass(frozen=True)
class Guards:
    """What is looked at beside the proof."""

    finite: bool = True
    """Loss and gradients (recovery.check_for_nan_in_loss_and_grad)."""

    rerun: Rerun | None = None
    hashed: Callable[[], Mapping[str, torch.Tensor]] | None = None
    """What all groups hold alike: local tensors by name."""

    hash_interval: int = 1
    """Steps between two comparisons of `hashed`."""


@dataclass(frozen=True)
class Parts:
    """What an attempt works with."""

    group: ReplicaGroup
    placement: Placement
    parameters: list[torch.nn.Parameter]
    loss: PolicyLoss
    forward_backward: Callable[[MicroBatch], torch.Tensor]
    clip: Callable[[], torch.Tensor]
    enter: Callable[[str], None]
    rows: int
    seq_len: int
    fixed_rows: bool
    guards: Guards


class Attempt:
    """Forward, backward, sums, proof and vote on given seams."""

    def __init__(self, parts: Parts, *, reseed: Callable[[], None]) -> None:
        """`reseed`: the step's random numbers from their start."""
        self._group, self._placement = parts.group, parts.placement
        self._parameters, self._loss = parts.parameters, parts.loss
        self._forward_backward = parts.forward_backward
        self._clip, self._enter = parts.clip, parts.enter
        self._rows, self._seq_len, self._fixed_rows = parts.rows, parts.seq_len, parts.fixed_rows
        self._reseed, self._guards = reseed, parts.guards

    def run(self, work: Work) -> Result:
        """Gradients are left in the parameters, clipped, when the result is committed."""
        assert work.quorum.rank is not None
        self._enter("forward_backward")
        checked = self._compute_again(work)
        samples, loss, recorded = self._compute(work, work.quorum.rank)
        gradients = local_gradients(self._parameters)
        own = measure(loss, gradients, with_total=self._guards.rerun is not None)
        self._enter("reduce")
        sum_over_groups(gradients, self._group.all_reduce)
        vector = coverage.fill(
            work.claim,
            samples,
            rank=work.quorum.rank,
            nonce=work.nonce,
            speaks=self._placement.speaks,
            nonfinite=self._guards.finite and not own.finite,
            loss=loss,
            stats=self._loss.take_stats(),
            recorded=recorded,
            row=self._row(work, own, checked),
        )
        self._sum(vector)
        return self._vote(work, vector)

    def recorded(self, batch: SealedBatch) -> int:
        """Values that ride along with the proof of a step on `batch`."""
        return batch.n_tokens if self._loss.config.record else 0

    def board(self, quorum: Quorum) -> tuple[int, int]:
        """Rows and columns of what the ranks tell one another. They depend on the quorum alone, so
        that a group at another step sends as much as the others."""
        columns = OWN_COLUMNS
        if self._guards.rerun is not None:
            columns += self._guards.rerun.columns(quorum.participants)
        if self._guards.hashed is not None:
            columns += len(self._guards.hashed())
        return quorum.participants * self._placement.degree, columns

    def abstain(self, batch: SealedBatch, quorum: Quorum) -> None:
        """Keep the collectives of the others alive without taking part, so that they refuse at
        once instead of waiting for us until their timeout."""
        for p in self._parameters:
            p.grad = None
        sum_over_groups(local_gradients(self._parameters), self._group.all_reduce)
        rows, columns = self.board(quorum)
        riders = self.recorded(batch) + rows * columns
        self._sum(coverage.abstain(batch.n_samples, speaks=self._placement.speaks, n_riders=riders))
        self._group.should_commit(False)

    def _compute_again(self, work: Work) -> dict[int, Share]:
        """The shares of other groups that this one checks. Leaves no trace."""
        rerun = self._guards.rerun
        if rerun is None:
            return {}
        made = {}
        assert work.quorum.rank is not None
        members = work.quorum.members
        for group in rerun.shares(work.claim.step + 1, members, work.quorum.rank):
            _, loss, _ = self._compute(work, group)
            made[group] = measure(loss, local_gradients(self._parameters), with_total=True)
            self._loss.take_stats()
            for p in self._parameters:
                p.grad = None
            self._reseed()
        return made

    def _row(self, work: Work, own: Share, checked: dict[int, Share]) -> tuple[int, np.ndarray]:
        """This rank's numbers on the board."""
        quorum, guards = work.quorum, self._guards
        assert quorum.rank is not None
        numbers = [np.array([own.loss, own.square**0.5]) if own.finite else np.zeros(OWN_COLUMNS)]
        if guards.rerun is not None:
            results = {**checked, quorum.rank: own}
            numbers.append(guards.rerun.row(quorum.participants, results))
        if guards.hashed is not None:
            tensors = guards.hashed()
            due = work.claim.step % guards.hash_interval == 0
            numbers.append(hashes(tensors) if due else np.zeros(len(tensors)))
        place = quorum.rank * self._placement.degree + self._placement.rank
        return place, np.concatenate(numbers)

    def _compute(self, work: Work, group: int) -> tuple[np.ndarray, float, np.ndarray | None]:
        """The samples that this rank has in the share of `group` (a place in the quorum), its part
        of their loss, and the policy's log-probs [T] of the samples when they are recorded."""
        lengths = work.batch.lengths()
        shards = work.quorum.participants * self._placement.degree
        first = group * self._placement.degree
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
        findings: tuple[Finding, ...] = ()
        differing: tuple[Difference, ...] = ()
        # A collective inside the group, so on every rank, also on one whose sums have failed.
        norm = float(self._clip())
        if self._group.errored() is None:
            try:
                if flaw:
                    numeric = True
                    raise NumericError(flaw)
                outcome = coverage.check(vector, work.claim, work.quorum.participants)
                differing = self._differences(outcome, work)
                findings = self._findings(outcome, work)
                _refuse_bad(differing, findings)
                numeric = self._guards.finite and (outcome.nonfinite > 0 or not math.isfinite(norm))
                if numeric:
                    raise NumericError(
                        f"loss or gradients of {outcome.nonfinite} rank(s) are not finite "
                        f"(gradient norm {norm})"
                    )
            except (CoverageError, NumericError, StateDiffers, Disputed) as e:
                cause = str(e)
                self._group.report_error(e)
        committed = self._group.should_commit(not cause)
        if not committed and not cause:
            error = self._group.errored()
            cause = f"{type(error).__name__}: {error}" if error else "a rank or the quorum refused"
        return Result(committed, cause, numeric, outcome, norm, findings, differing)

    def _findings(self, outcome: coverage.Outcome, work: Work) -> tuple[Finding, ...]:
        rerun = self._guards.rerun
        if rerun is None:
            return ()
        part = rerun_part(outcome.board, rerun)
        return tuple(rerun.look(work.claim.step + 1, work.quorum.members, part))

    def _differences(self, outcome: coverage.Outcome, work: Work) -> tuple[Difference, ...]:
        guards = self._guards
        if guards.hashed is None or work.claim.step % guards.hash_interval:
            return ()
        names = list(guards.hashed())
        table = outcome.board[:, -len(names) :]
        return tuple(differences(table, names, self._placement.degree))


def all_finite(tensors: list[torch.Tensor]) -> bool:
    """A norm that overflows counts as not finite."""
    norms = torch._foreach_norm([t for t in tensors if t.numel()])
    return bool(torch.isfinite(torch.stack(norms)).all()) if norms else True


def rerun_part(board: np.ndarray, rerun: Rerun) -> np.ndarray:
    """The columns of the board that are about computing again."""
    groups = len(board) // rerun.degree
    return board[:, OWN_COLUMNS : OWN_COLUMNS + rerun.columns(groups)]


def _refuse_bad(differing: tuple[Difference, ...], findings: tuple[Finding, ...]) -> None:
    """Raises StateDiffers or Disputed when a step that shows these must not be committed."""
    if differing:
        more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
        raise StateDiffers(f"{differing[0]}{more}")
    if wrong := [f for f in findings if f.verdict is not Verdict.TRANSIENT]:
        raise Disputed("; ".join(map(str, wrong)))


def measure(loss: float, gradients: list[torch.Tensor], *, with_total: bool) -> Share:
    """What one computation gave on this rank; the gradients' sum only `with_total`."""
    held = [g for g in gradients if g.numel()]
    if not held:
        return Share(loss, 0.0, 0.0, math.isfinite(loss))
    square = float(torch.stack(torch._foreach_norm(held)).double().square().sum())
    total = float(sum(g.sum(dtype=torch.float64) for g in held)) if with_total else 0.0
    return Share(loss, square, total, math.isfinite(loss) and math.isfinite(square))
