"""ETTR, both definitions, against hand computations."""

import math

import pytest

from tests.unit.run_events import Log
from torchtitan_rl_ft.observability.ettr import CAUSES, Accounts, measure, samples
from torchtitan_rl_ft.observability.ettr_text import ettr_rows
from torchtitan_rl_ft.observability.events import Kind


def lost(figure):
    return {
        role: {cause: round(s, 6) for cause, s in causes.items() if s > 1e-9}
        for role, causes in figure.lost_s.items()
        if any(s > 1e-9 for s in causes.values())
    }


def calm(log, steps=5):
    """2 s of rollout and 3 s of training, step after step."""
    for _ in range(steps):
        log.rollout(2.0)
        log.train(3.0)


def job(groups=1, engines=1):
    log = Log(groups=groups, engines=engines)
    log.start(startup_s=10.0)
    return log


def test_nothing_committed_has_no_ratio():
    assert measure([]) is None
    assert measure(job().events) is None
    assert samples(job().events, 10.0, 1.0) == []


def test_a_run_without_a_fault_loses_start_up_and_waits():
    log = job()
    calm(log)
    found = measure(log.events)
    assert (found.wall_s, found.startup_s, found.step_s, found.steps) == (35.0, 10.0, 5.0, 5)
    assert found.slot_s == 70.0
    # The trainer works 3 s of 5, the engine 2 s: 25 of 70 slot-seconds.
    assert found.strict.ratio == pytest.approx(25 / 70)
    assert found.strict.after_startup == pytest.approx(0.5)
    assert lost(found.strict) == {"trainer": {"wait": 20.0}, "engine": {"wait": 25.0}}
    assert ("lost", "to faults nothing; to waiting engine 25.0 s, trainer 20.0 s (of 70.0 s slot "
            "time, strict)") in ettr_rows(found)  # fmt: skip
    # By the paper the job makes progress all the time after its start-up.
    assert found.paper.ratio == pytest.approx(25 / 35)
    assert found.paper.after_startup == 1.0
    assert lost(found.paper) == {"trainer": {"wait": 10.0}, "engine": {"wait": 10.0}}
    for figure in (found.strict, found.paper):
        assert figure.fault_free == pytest.approx(figure.ratio)


def test_a_lost_trainer_while_nobody_rolls_out():
    """Killed 1 s into its training; 4 s restart, 2 s reconnect, 3 s to the commit."""
    log = job()
    calm(log)
    log.rollout(2.0)
    log.kill_trainer(0, after_s=1.0, restart_s=4.0, reconnect_s=2.0)
    log.train(3.0)
    found = measure(log.events)
    assert found.wall_s == 35.0 + 2.0 + 1.0 + 6.0 + 3.0
    [outage] = found.outages
    assert outage.phase_s == pytest.approx(
        {"detect": 0.0, "restart": 4.0, "reconnect": 2.0, "redo": 3.0}
    )
    # 6 steps' worth of 3 s of training and 2 s of rollout; the 1 s before the kill is lost.
    assert found.strict.ratio == pytest.approx(30 / (2 * 47))
    assert lost(found.strict)["trainer"] == pytest.approx(
        # Both slots stand still for 6 s; the trainer has to do 1 s again; it waits as ever.
        {"restart": 8.0, "reconnect": 4.0, "redo": 1.0, "wait": 10.0 + 6 * 2.0}
    )
    # By the paper too nothing goes on: in sync mode the engines have nothing to do.
    assert found.paper.ratio == pytest.approx((2 * 47 - 20 - 12 - 1) / (2 * 47))
    assert found.strict.fault_free == pytest.approx(30 / (2 * 40))
    assert found.step_s == 5.0


def test_rollouts_that_go_on_while_the_trainers_recover_count_half_by_the_paper():
    """Equal roles, all trainers gone for 6 s, rollouts running: credit 0.5."""
    log = job()
    calm(log)
    log.rollout(2.0)
    log.kill_trainer(0, after_s=0.0, restart_s=4.0, reconnect_s=2.0, rolling=True)
    log.train(3.0)
    found = measure(log.events)
    assert found.paper.ratio == pytest.approx((2 * (35.0 - 10.0 + 5.0) + 6.0) / (2 * 46.0))
    assert lost(found.paper)["trainer"] == pytest.approx(
        {"restart": 4.0, "reconnect": 2.0, "wait": 10.0}
    )


def test_a_superseded_step_counts_in_neither():
    log = job()
    calm(log, 4)
    log.supersede(to_step=3)
    log.train(3.0)
    found = measure(log.events)
    assert found.steps == 4
    assert lost(found.strict)["trainer"]["redo"] == pytest.approx(3.0)
    assert lost(found.paper)["trainer"]["redo"] == pytest.approx(3.0)


def test_rollout_of_a_superseded_step_counts_again_when_that_is_trained_again():
    log = job()
    calm(log, 4)
    counted = measure(log.events).strict.ratio
    log.supersede(to_step=2)
    both = measure(log.events)
    assert both.strict.ratio == pytest.approx(counted / 2)  # trainer and engine lose two steps each
    log.emit("rollout", Kind.DROP, cause="not finite", step=4, batch=4, groups=[4])
    assert lost(measure(log.events).strict)["engine"]["redo"] == pytest.approx(2.0)
    log.train(3.0)
    engine = lost(measure(log.events).strict)["engine"]
    assert engine["redo"] == pytest.approx(2.0) and engine["wait"] == pytest.approx(10.0 + 12 + 3)


def test_rollout_that_was_thrown_away_counts_by_the_paper_alone():
    log = job()
    calm(log, 2)
    log.rollout(2.0, dropped=True)
    log.rollout(2.0)
    log.train(3.0)
    found = measure(log.events)
    assert lost(found.strict)["engine"]["redo"] == pytest.approx(2.0)
    assert "redo" not in lost(found.paper).get("engine", {})
    assert found.paper.after_startup == 1.0


def test_what_was_rolled_out_and_dropped_before_it_was_trained_is_lost_work():
    log = job()
    calm(log, steps=1)
    groups = log.issue()
    log.now_s += 2.0
    log.accept(groups)
    log.emit("rollout", Kind.DROP, cause="too old: policy age 9, at most 1", group=groups[0])
    log._batch.clear()
    calm(log, steps=1)
    found = measure(log.events)
    assert lost(found.strict)["engine"]["redo"] == 2.0
    assert found.strict.ratio == pytest.approx(10 / (2 * 22))


def test_the_batches_after_a_dropped_one_move_up():
    """Three batches of 2 s each; the second one is given up, the third is trained in its step."""
    log = job()
    for step in (1, 2, 3):
        groups = log.issue()
        log.now_s += 2.0
        log.emit("rollout", Kind.ACCEPT, group=groups[0])
        log.emit("rollout", Kind.SEAL, step=step, batch=step, samples=4, groups=groups)
    log.emit("rollout", Kind.DROP, step=2, batch=2, cause="not finite", groups=[2])
    log.train(3.0)
    log.train(3.0)
    found = measure(log.events)
    assert lost(found.strict)["engine"] == {"wait": 10.0 + 6.0, "redo": 2.0}
    assert found.strict.ratio == pytest.approx((4 + 6) / (2 * 22))


def test_a_group_weighs_as_much_as_it_has_ranks():
    log = Log(groups=1, engines=1, ranks={"trainer": 3, "engine": 1})
    log.start(startup_s=0.0)
    calm(log)
    found = measure(log.events)
    assert found.slots == {"trainer-0": 3.0, "engine-0": 1.0}
    assert found.strict.ratio == pytest.approx((3 * 3 + 2 * 1) / (4 * 5))


def test_windows_see_only_their_own_time():
    log = job()
    calm(log)
    log.rollout(2.0)
    log.kill_trainer(0, after_s=0.0, restart_s=4.0, reconnect_s=2.0)
    log.train(3.0)
    calm(log, 4)
    found = samples(log.events, 10.0, 5.0)
    assert [s.at_s for s in found] == [*(5.0 * i for i in range(1, 14)), 66.0]
    assert found[0].strict == found[0].paper == 0.0
    assert found[6].strict == pytest.approx(25 / 70)  # at 35 s: before the fault
    assert found[6].strict_window == pytest.approx(0.5)
    assert found[-1].strict == pytest.approx(measure(log.events).strict.ratio)
    assert found[-1].strict_window == pytest.approx(0.5)
    assert min(s.paper_window for s in found[2:]) < 1.0


def test_a_follower_that_forgets_comes_to_the_same():
    log = job(groups=2, engines=2)
    for i in range(30):
        calm(log, 3)
        if i % 4 == 1:
            log.rollout(2.0)
            log.kill_trainer(i % 2, after_s=0.5, restart_s=4.0, reconnect_s=2.0)
            log.train(3.0)
    accounts = Accounts()
    for event in log.events:
        accounts.add(event)
        if event.kind is Kind.COMMIT:
            accounts.compact(keep_s=60.0)
    kept = sum(len(s.phases) + len(s.attempts) for s in accounts.slots.slots.values())
    assert kept < 400
    found, expected = accounts.settled(), measure(log.events)
    ettr = found.ettr()
    for kind in ("strict", "paper"):
        one, other = getattr(ettr, kind), getattr(expected, kind)
        assert one.ratio == pytest.approx(other.ratio)
        assert one.after_startup == pytest.approx(other.after_startup)
        assert one.fault_free == pytest.approx(other.fault_free)
        assert lost(one) == {r: pytest.approx(c, rel=1e-5) for r, c in lost(other).items()}
    assert (ettr.step_s, ettr.steps, ettr.wall_s) == (expected.step_s, 30 * 3 + 8, expected.wall_s)
    window, whole = found.samples(50.0, 50.0)[-1], samples(log.events, 50.0, 50.0)[-1]
    assert window.strict_window == pytest.approx(whole.strict_window)


@pytest.mark.parametrize(("window_s", "every_s"), [(0.0, 1.0), (1.0, 0.0), (1.0, -1.0)])
def test_a_window_without_a_length_is_refused(window_s, every_s):
    with pytest.raises(ValueError, match="must be above 0"):
        samples([], window_s, every_s)


def test_lost_slot_seconds_sum_to_what_is_missing():
    log = job(groups=2, engines=2)
    calm(log)
    log.rollout(2.0)
    log.kill_trainer(1, after_s=0.5, restart_s=4.0, reconnect_s=2.0)
    log.train(3.0)
    found = measure(log.events)
    for figure in (found.strict, found.paper):
        sums = math.fsum(s for causes in figure.lost_s.values() for s in causes.values())
        assert sums == pytest.approx((1 - figure.ratio) * found.slot_s)
        assert all(tuple(causes) == CAUSES for causes in figure.lost_s.values())
