"""Attempts at windows on real tensors: groups are threads, and their sums are made by hand."""

import copy
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fakes.run_host import made_up_batch
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)

from torchtitan_rl_ft.journal.records import digest
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.replica.group import Quorum, ReplicaGroup
from torchtitan_rl_ft.replica.live_state import LiveState
from torchtitan_rl_ft.trainer.attempt import Guards, Parts, Placement, Work
from torchtitan_rl_ft.trainer.coverage import Claim
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.outer_optimizer import outer_optimizer
from torchtitan_rl_ft.trainer.policy_loss import PolicyLoss
from torchtitan_rl_ft.trainer.window_work import WindowWork
from torchtitan_rl_ft.trainer.windows import WindowAttempt

VOCAB = 16
SYNC_STEPS = 4
BATCH = made_up_batch(1, 0, list(range(8)))
WAIT_S = 20


class Killed(Exception):
    """The process of a group ends here."""


class Meeting:
    """The process group over replica groups of one quorum. Who is killed breaks it for all."""

    def __init__(self, size):
        self.parts = [None] * size
        self.barrier = threading.Barrier(size)

    def sum(self, rank, tensor):
        self.parts[rank] = tensor.clone()
        self.barrier.wait(WAIT_S)
        total = torch.stack(self.parts).sum(0)
        self.barrier.wait(WAIT_S)
        tensor.copy_(total)


class FakeGroup:
    """torchft's manager as `ReplicaGroup` shows it: a failed sum refuses the commit."""

    config = ReplicaGroup.Config()

    def __init__(self):
        self.meeting = self.rank = self.error = None
        self.steps_set = []

    def join(self, meeting, rank):
        self.meeting, self.rank, self.error = meeting, rank, None

    def all_reduce(self, tensor):
        if self.error is None:
            try:
                self.meeting.sum(self.rank, tensor)
            except threading.BrokenBarrierError as e:
                self.error = e
        return lambda: None

    def errored(self):
        return self.error

    def report_error(self, error):
        self.error = error

    def should_commit(self, local):
        return local and self.error is None

    def set_step(self, step):
        self.steps_set.append(step)


class Progress:
    def progress(self):
        return {}

    def load_progress(self, progress):
        pass


class Trainer:
    """A group of one rank with a model of bigrams."""

    def __init__(self, method="local_sgd", **outer):
        torch.manual_seed(5)
        self.model = torch.nn.Sequential(
            torch.nn.Embedding(VOCAB, 8), torch.nn.Linear(8, VOCAB)
        ).float()
        self.optimizers = OptimizersContainer.Config(
            param_groups=default_adamw(lr=0.02).param_groups, implementation="for-loop"
        ).build(model_parts=[self.model])
        schedulers = LRSchedulersContainer.Config(warmup_steps=1).build(
            optimizers=self.optimizers, training_steps=20
        )
        self.loss, self.group, self.events = (
            PolicyLoss(PolicyLoss.Config()),
            FakeGroup(),
            EventList(),
        )
        config = ReplicaGroup.Config(**outer)
        self.outer = outer_optimizer([self.model], method, config)
        self.state = LiveState(
            [self.model], self.optimizers, schedulers, Progress(), outer=self.outer.tensors
        )
        self.poisoned, self.kill_at, self.steps_done = set(), None, []
        parameters = list(self.model.parameters())
        parts = Parts(
            group=self.group,
            placement=Placement(0, 1, None),
            parameters=parameters,
            loss=self.loss,
            forward_backward=self.forward_backward,
            clip=lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
            enter=lambda phase: None,
            rows=4,
            seq_len=32,
            fixed_rows=False,
            guards=Guards(),
        )
        self.attempt = WindowAttempt(
            parts,
            link=GroupLink(),
            work=WindowWork(parameters, self.state.optimizer_tensors),
            outer=self.outer,
            norm=lambda: torch.nn.utils.clip_grad_norm_(parameters, float("inf")),
            inner_update=self.update,
            discard=self.optimizers.zero_grad,
            seed=lambda inner: None,
            sync_steps=SYNC_STEPS,
            events=self.events,
        )

    def forward_backward(self, rows):
        logits = self.model(rows.input_BS)
        loss, _ = self.loss(logits, rows.labels_BSC)
        if self.poisoned & set(rows.samples.tolist()):
            loss = loss * float("nan")
        loss.backward()
        return loss

    def update(self):
        if self.kill_at is not None and len(self.steps_done) + 1 == self.kill_at:
            self.group.meeting.barrier.abort()
            raise Killed
        self.steps_done.append(self.model[0].weight.detach().clone())
        self.optimizers.step()

    def parameters(self):
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}


def work(trainer, quorum, step=0, token="ab" * 16, batch=BATCH):
    board = trainer.attempt.board(quorum)
    claim = Claim(step, token, digest(batch.to_bytes()), batch.n_samples, board=board)
    return Work(claim, batch, quorum, nonce=3)


def together(*trainers, step=0, healed=()):
    """One attempt of a quorum of `trainers`; committed ones apply it. Results, in their order."""
    meeting, results = Meeting(len(trainers)), [None] * len(trainers)

    def one(rank, trainer):
        trainer.group.join(meeting, rank)
        trainer.steps_done.clear()
        quorum = Quorum(len(trainers), rank, 1, healed=trainer in healed)
        try:
            results[rank] = trainer.attempt.run(work(trainer, quorum, step))
        except Killed:
            return
        if results[rank].committed:
            trainer.attempt.apply()

    threads = [threading.Thread(target=one, args=pair) for pair in enumerate(trainers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return results


def assert_equal(a, b):
    for name, p in a.items():
        torch.testing.assert_close(p, b[name], rtol=0, atol=0)


def heal(joiner, donor):
    joiner.state.load_state_dict(copy.deepcopy(donor.state.state_dict()))
    joiner.attempt.void()


@pytest.mark.row("G9")
@pytest.mark.parametrize("fragments", [1, 2])
def test_local_sgd_is_the_mean_of_the_groups_weighted_by_their_samples(fragments):
    a, b = Trainer(num_fragments=fragments), Trainer(num_fragments=fragments)
    before = a.parameters()
    local = []
    settle = WindowWork.settle

    def spy(window):  # what each group holds just before the outer step
        local.append(([p.clone() for p in window._parameters], window.tally.done.copy()))
        settle(window)

    a.attempt._window.settle = lambda: spy(a.attempt._window)
    b.attempt._window.settle = lambda: spy(b.attempt._window)
    results = together(a, b)
    assert [r.committed for r in results] == [True, True]
    assert [len(t.steps_done) for t in (a, b)] == [SYNC_STEPS, SYNC_STEPS]
    assert_equal(a.parameters(), b.parameters())
    counts = [done.sum() for _, done in local]
    assert sum(counts) == BATCH.n_samples
    for i, (name, now) in enumerate(a.parameters().items()):
        mean = sum(n * p[i] for n, (p, _) in zip(counts, local, strict=True)) / sum(counts)
        torch.testing.assert_close(now, mean)
        assert not torch.equal(now, before[name])
    assert results[0].outcome.stats[0] == BATCH.arrays["loss_mask"].sum()


def test_diloco_moves_the_base_by_the_outer_rate_and_remembers_the_direction():
    one, other = Trainer("diloco", outer_lr=0.5, outer_momentum=0.9), Trainer()
    before = one.parameters()
    together(one)
    together(other)
    for name, mean in other.parameters().items():
        g = before[name] - mean
        torch.testing.assert_close(one.parameters()[name], before[name] - 0.5 * 1.9 * g)
        torch.testing.assert_close(one.outer.tensors()[name], g)


@pytest.mark.row("G9")
def test_a_loss_at_inner_step_3_of_4_costs_the_lost_groups_work_alone():
    a, b = (Trainer("diloco", outer_lr=0.7, outer_momentum=0.5) for _ in range(2))
    base = copy.deepcopy(a.state.state_dict())
    b.kill_at = 3
    refused, dead = together(a, b)
    assert dead is None and not refused.committed and not refused.numeric
    own_work = a.steps_done[-1]
    # The model holds the base: donors, checkpoints and publishing see nothing of the work.
    now = a.state.state_dict()
    assert_equal(now["parameters"], base["parameters"])
    assert_equal(now["optimizers"][0], base["optimizers"][0])
    assert a.attempt._window.tally.done.sum() == BATCH.n_samples // 2

    (alone,) = together(a)
    assert alone.committed
    assert 0 < len(a.steps_done) <= SYNC_STEPS  # the lost group's share, not its own
    assert not torch.equal(a.steps_done[0], base["parameters"]["0.0.weight"])
    assert not torch.equal(a.steps_done[0], own_work)
    assert alone.outcome.stats[0] == BATCH.arrays["loss_mask"].sum()

    back = Trainer("diloco", outer_lr=0.7, outer_momentum=0.5)
    heal(back, a)
    assert_equal(back.outer.tensors(), a.outer.tensors())
    committed = together(a, back, step=1, healed=(back,))
    assert all(r.committed for r in committed)
    assert_equal(a.parameters(), back.parameters())
    assert_equal(a.outer.tensors(), back.outer.tensors())


@pytest.mark.row("G9")
def test_a_group_that_comes_back_in_the_middle_holds_the_base_and_does_what_is_left():
    a, b = Trainer(), Trainer()
    b.kill_at = 3
    together(a, b)
    back = Trainer()
    heal(back, a)  # in the quorum, while the work of `a` lies on the shelf
    results = together(a, back, healed=(back,))
    assert all(r.committed for r in results)
    assert len(a.steps_done) == len(back.steps_done) == 2  # half a share each
    assert_equal(a.parameters(), back.parameters())


@pytest.mark.row("G9")
def test_after_a_sync_that_failed_nothing_is_done_again():
    a, b = Trainer(), Trainer()
    vote = a.group.should_commit
    a.group.should_commit = b.group.should_commit = lambda local: False
    assert not any(r.committed for r in together(a, b))
    a.group.should_commit, b.group.should_commit = vote, FakeGroup.should_commit.__get__(b.group)
    results = together(a, b)
    assert all(r.committed for r in results)
    assert a.steps_done == b.steps_done == []


@pytest.mark.row("G9")
def test_groups_that_were_apart_void_what_both_did():
    a, b = Trainer(), Trainer()
    for t in (a, b):  # each alone does the whole window, none may commit
        t.group.should_commit = lambda local: False
        together(t)
    del a.group.should_commit, b.group.should_commit
    results = together(a, b)
    assert all(r.committed for r in results)
    assert a.steps_done == b.steps_done == []
    assert a.attempt._window.tally.done.all() and not b.attempt._window.tally.done.any()
    assert_equal(a.parameters(), b.parameters())


def test_a_group_that_was_healed_forgets_its_work():
    a, b = Trainer(), Trainer()
    b.kill_at = 4
    together(a, b)
    heal(a, Trainer())
    (result,) = together(a, healed=(a,))
    assert result.committed and len(a.steps_done) == SYNC_STEPS


def test_one_group_on_another_history_refuses_before_any_inner_step():
    a, b = Trainer(), Trainer()
    meeting = Meeting(2)
    a.group.join(meeting, 0)
    b.group.join(meeting, 1)
    quorum = Quorum(2, 1, 1)
    other = threading.Thread(target=b.attempt.abstain, args=(BATCH, quorum))
    other.start()
    result = a.attempt.run(work(a, Quorum(2, 0, 1)))
    other.join(WAIT_S)
    assert not result.committed and "abstained" in result.cause and a.steps_done == []


# Numbers that are not finite ---------------------------------------------------------------------


@pytest.mark.row("I2")
def test_a_group_whose_numbers_are_bad_is_left_out_healed_and_equal_again():
    a, b = (Trainer("diloco", outer_momentum=0.5) for _ in range(2))
    b.poisoned = set(range(BATCH.n_samples))  # whatever it computes
    base = b.parameters()
    results = together(a, b, step=4)
    assert not any(r.committed for r in results) and all(r.numeric for r in results)
    assert b.group.steps_set == [0] and a.group.steps_set == []
    assert_equal(b.parameters(), base)
    heal(b, a)
    results = together(a, b, step=4, healed=(b,))
    assert all(r.committed for r in results)
    assert b.steps_done == [] and len(a.steps_done) > 0
    assert_equal(a.parameters(), b.parameters())
    assert all(torch.isfinite(p).all() for p in a.parameters().values())
    b.poisoned = set()  # in the next window it works again
    assert all(r.committed for r in together(a, b, step=5))
    assert len(b.steps_done) == SYNC_STEPS


@pytest.mark.row("I2")
def test_a_group_that_found_no_donor_keeps_its_place_in_the_history():
    a, b = Trainer(), Trainer()
    b.poisoned = set(range(BATCH.n_samples))
    together(a, b, step=4)
    b.poisoned = set()
    (result,) = together(b, step=4)  # the other has died meanwhile
    assert result.committed and b.group.steps_set == [0, 4]


@pytest.mark.row("I2")
def test_a_bad_sample_is_skipped_by_all_and_nobody_is_healed():
    a, b = Trainer(), Trainer()
    a.poisoned = b.poisoned = set(range(BATCH.n_samples))
    before = a.parameters()
    results = together(a, b)
    assert all(r.numeric and not r.committed for r in results)
    assert "not finite" in results[0].cause
    assert a.group.steps_set == b.group.steps_set == []
    assert_equal(a.parameters(), before)


@pytest.mark.row("I2")
def test_one_bad_sample_costs_neither_work_nor_more_than_one_heal():
    a, b = Trainer(), Trainer()
    a.poisoned = b.poisoned = {3}
    together(a, b, step=4)
    (first,) = [t for t in (a, b) if t.group.steps_set]
    other = a if first is b else b
    heal(first, other)
    results = together(a, b, step=4, healed=(first,))  # the other meets the sample now
    assert all(r.numeric and not r.committed for r in results)
    assert other.group.steps_set == [] and first.steps_done == []
    left = np.flatnonzero(~other.attempt._window.tally.done)
    assert 3 in left and len(left) <= BATCH.n_samples // SYNC_STEPS
    a.poisoned = b.poisoned = set()
    assert all(r.committed for r in together(a, b, step=4))


@pytest.mark.row("I2")
def test_work_that_overflowed_is_given_up_also_when_nobody_else_is_there():
    (a,) = (Trainer(),)
    update = a.update

    def overflow():
        update()
        with torch.no_grad():
            a.model[1].bias[0] = float("inf")

    a.attempt._inner_update = overflow
    assert together(a)[0].numeric
    a.attempt._inner_update = update
    assert together(a)[0].committed
    assert all(torch.isfinite(p).all() for p in a.parameters().values())


@pytest.mark.row("I2")
def test_a_skipped_inner_step_loses_no_sample():
    (a,) = (Trainer(),)
    a.poisoned = {3}
    (refused,) = together(a)
    assert refused.numeric and len(a.steps_done) == SYNC_STEPS - 1
    a.poisoned = set()
    (result,) = together(a)
    assert result.committed and len(a.steps_done) == 1
    assert result.outcome.stats[0] == BATCH.arrays["loss_mask"].sum()


@pytest.mark.row("I2")
def test_parameters_that_overflow_in_an_inner_step_never_reach_the_others():
    a, b = Trainer(), Trainer()
    update = b.update

    def overflow():
        update()
        with torch.no_grad():
            b.model[1].bias[0] = float("inf")

    b.attempt._inner_update = overflow
    results = together(a, b)
    assert all(r.numeric and not r.committed for r in results)
    assert all(
        torch.isfinite(p).all() for p in (*a.parameters().values(), *b.parameters().values())
    )


def test_a_base_that_differs_is_found_before_it_is_committed():
    a, b = (Trainer("diloco", outer_momentum=0.5) for _ in range(2))
    for t in (a, b):
        t.attempt._guards = Guards(hashed=t.attempt.equal_tensors)
    assert all(r.committed for r in together(a, b))  # unlike inner optimizers do not matter
    with torch.no_grad():
        b.model[1].bias[0] += 1e-6
    results = together(a, b, step=1)
    assert not any(r.committed for r in results)
    assert [d.groups for d in results[0].differing] == [(1,)]
    assert results[0].differing[0].name == "1.bias"


def test_an_inner_step_whose_tokens_are_all_masked_is_done_without_a_step():
    (a,) = (Trainer(),)
    masked = copy.deepcopy(BATCH)
    masked.arrays["weights"][:] = 0
    a.group.join(Meeting(1), 0)
    result = a.attempt.run(work(a, Quorum(1, 0, 1), batch=masked))
    assert result.committed and a.steps_done == [] and result.outcome.loss == 0.0


def test_a_window_that_is_long_for_the_quorum_is_told_once():
    (a,) = (Trainer(),)
    a.group.config = SimpleNamespace(quorum_timeout_s=0)
    together(a)
    together(a, step=1)
    warnings = [e for e in a.events.events if e["kind"] == Kind.WARN]
    assert len(warnings) == 1 and "quorum_timeout_s" in warnings[0]["cause"]


def test_inner_gradients_are_means_over_the_inner_step():
    """As long as a step of sync mode, whatever part of the window they hold."""
    (a,) = (Trainer(),)
    seen = []
    a.attempt._forward_backward = lambda rows: (seen.append(rows), a.forward_backward(rows))[1]
    together(a)
    per_step = SYNC_STEPS
    micro = len(seen) // per_step
    for i in range(per_step):
        weights = [float(m.labels_BSC[..., 1].sum()) for m in seen[i * micro : (i + 1) * micro]]
        assert np.sum(weights) == pytest.approx(1.0, rel=1e-5)
