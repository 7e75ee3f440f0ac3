"""One record per fault, its phases against hand computations, and what no log may break."""

import pytest

from tests.unit.run_events import START_S, Log
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.observability.outages import Outages, outages

pytestmark = pytest.mark.row("K1")


def job(groups=1, engines=1):
    log = Log(groups=groups, engines=engines)
    log.start(startup_s=10.0)
    for _ in range(2):
        log.rollout(2.0)
        log.train(3.0)
    return log


def only(log):
    [found] = outages(log.events)
    return found


def phases(outage):
    return {p: s for p, s in outage.phase_s.items() if s}


def exit_(log, name, cause="killed by SIGKILL", by="supervisor", phase="fault"):
    log.emit(by, Kind.EXIT, phase=phase, cause=cause, subject=name)


def test_a_run_without_a_fault_has_none():
    log = job()
    exit_(log, "trainer-0", "exit code 0", phase="finished")
    log.emit("supervisor", Kind.RUN, phase="end", cause="complete")
    assert outages(log.events) == []


def test_a_trainer_that_is_killed():
    log = job()
    log.rollout(2.0)
    log.kill_trainer(0, after_s=1.0, restart_s=4.0, reconnect_s=2.0)
    killed_s = log.now_s - 6.0
    log.train(3.0)
    found = only(log)
    assert (found.role, found.name, found.cause) == ("trainer", "trainer-0", "killed by SIGKILL")
    assert (found.began_s, found.detected_s, found.retired_s) == (killed_s, killed_s, killed_s)
    assert (found.replaced_s, found.done_s) == (killed_s + 4.0, killed_s + 9.0)
    assert phases(found) == {"restart": 4.0, "reconnect": 2.0, "redo": 3.0}
    assert (found.samples_lost, found.samples_replayed) == (0, 4)
    assert "trainer-0: killed by SIGKILL: 9.00 s (restart 4.00" in found.line()


def test_the_injection_begins_it_where_it_is_known():
    log = job()
    log.emit("chaos", Kind.CHAOS, phase="inject", cause="kill engine-0", fault="kill",
             subject="engine-0")  # fmt: skip
    log.now_s += 1.5
    log.engine("engine-0", "retired")
    log.now_s += 0.5
    exit_(log, "engine-0", by="serving")
    log.spawn("engine-0", by="serving")
    log.now_s += 8.0
    log.emit("serving", Kind.READY, subject="engine-0")
    log.engine("engine-0", "stale")
    log.now_s += 2.0
    log.engine("engine-0", "serving", version=7)
    found = only(log)
    assert phases(found) == {"detect": 1.5, "restart": 8.5, "reconnect": 2.0}
    assert (found.version_before, found.version_after, found.injected) == (0, 7, "kill")
    assert found.cause == "injected: kill engine-0; killed by SIGKILL"


def test_a_suspect_that_is_cleared_was_away():
    log = job()
    log.engine("engine-0", "suspect", cause="does not answer")
    log.now_s += 3.0
    log.engine("engine-0", "serving", version=2)
    assert phases(only(log)) == {"reconnect": 3.0}


def test_a_process_that_is_stopped_for_a_while_and_seen_by_nobody():
    log = job()
    where = {"cause": "stop trainer-0 for 4 s", "fault": "stop", "subject": "trainer-0"}
    log.emit("chaos", Kind.CHAOS, phase="inject", **where)
    log.now_s += 4.0
    log.emit("chaos", Kind.CHAOS, phase="lift", **where)
    log.train(3.0)
    assert phases(only(log)) == {"detect": 4.0, "reconnect": 3.0}


def test_a_failing_sum_is_over_with_the_next_commit():
    log = job()
    log.emit("chaos", Kind.CHAOS, phase="inject", cause="fail trainer-0 all-reduce", fault="fail",
             subject="trainer-0")  # fmt: skip
    log.now_s += 1.0
    log.emit("trainer-0", Kind.REFUSE, cause="a sum failed", batch=1, step=3)
    log.train(3.0)
    assert phases(only(log)) == {"detect": 1.0, "redo": 3.0}


def test_a_wedged_rank_was_silent_for_its_limit():
    log = job()
    log.now_s += 6.0
    log.emit("supervisor", Kind.FAULT, phase="wedged", cause="no sign of life", limit_s=6.0,
             subject="trainer-0")  # fmt: skip
    log.now_s += 1.0
    log.kill_trainer(0, after_s=0.0, restart_s=4.0, reconnect_s=2.0)
    log.train(3.0)
    assert phases(only(log)) == {"detect": 6.0, "restart": 5.0, "reconnect": 2.0, "redo": 3.0}


def test_a_group_that_begins_again_in_its_processes():
    log = job()
    log.emit("trainer-0", Kind.RESTART, phase="in_process", cause="a step failed",
             subject="trainer-0", attempt=1)  # fmt: skip
    log.now_s += 1.0
    log.phase("trainer-0", "attach")
    log.now_s += 2.0
    log.train(3.0)
    assert phases(only(log)) == {"restart": 1.0, "reconnect": 2.0, "redo": 3.0}


def test_a_process_whose_end_nobody_told_is_known_by_its_successor():
    log = job()
    log.phase("trainer-0", "quorum")
    last_s = log.now_s
    log.now_s += 5.0
    log._pids["trainer-0"] = 999
    log.phase("trainer-0", "attach")
    log.train(3.0)
    found = only(log)
    assert found.began_s == last_s and phases(found) == {"detect": 5.0, "redo": 3.0}


def test_a_second_fault_before_the_first_is_over_is_a_record_of_its_own():
    log = job()
    log.kill_trainer(0, after_s=0.0, restart_s=4.0, reconnect_s=2.0)
    log.kill_trainer(0, after_s=0.0, restart_s=4.0, reconnect_s=2.0)
    log.train(3.0)
    first, second = outages(log.events)
    assert (first.overtaken, first.done_s, first.total_s) == (True, None, 6.0)
    assert first.until_s == second.began_s and second.total_s == 9.0


def test_the_end_of_an_engine_whose_connection_broke_first_is_told():
    log = job(engines=2)
    log.engine("engine-0", "suspect", cause="Connection reset by peer")
    log.emit("serving", Kind.EXIT, phase="fault", cause="Connection reset by peer",
             subject="engine-0", signal=9)  # fmt: skip
    assert only(log).cause == "Connection reset by peer; ended by SIGKILL"


def test_a_spare_takes_the_place_of_a_lost_engine():
    log = job(engines=2)
    log.engine("engine-0", "suspect", cause="does not answer")
    log.now_s += 1.0
    log.engine("engine-0", "retired")
    log.emit("serving", Kind.PROMOTE, cause="takes the place of engine-0", subject="engine-1")
    log.now_s += 0.5
    log.engine("engine-1", "serving", version=2)
    log.now_s += 1.0
    exit_(log, "engine-0", by="serving")
    log.spawn("engine-0", by="serving")
    log.now_s += 9.0
    log.engine("engine-0", "standby")
    found = only(log)
    assert phases(found) == {"restart": 1.0, "reconnect": 0.5} and found.name == "engine-0"


@pytest.mark.parametrize("role", ["lighthouse", "rollout", "serving"])
def test_the_other_roles(role):
    log = job()
    log.issue(2)
    exit_(log, role)
    log.spawn(role)
    log.now_s += 2.0
    log.emit(role, Kind.READY, url="http://x")
    if role == "rollout":
        log.phase("rollout", "rollout")
    log.now_s += 1.0
    if role == "serving":
        log.engine("engine-0", "serving", version=2)
    found = only(log)
    assert found.role == role and found.done_s is not None
    assert found.phase_s["restart"] == 2.0
    assert found.samples_replayed == (8 if role == "rollout" else 0)


def test_the_gateway_before_the_engines_is_back_when_it_answers():
    log = job()
    exit_(log, "gateway", by="serving")
    log.now_s += 0.5
    log.spawn("gateway", by="serving")
    log.now_s += 1.0
    log.emit("serving", Kind.READY, subject="gateway", url="http://x")
    found = only(log)
    assert (found.role, found.name, found.total_s) == ("gateway", "gateway", 1.5)
    assert found.done_s is not None and found.phase_s["restart"] == 1.5


def test_one_that_lasts_reaches_to_the_last_event():
    log = job()
    exit_(log, "engine-0", by="serving")
    log.now_s += 7.0
    log.phase("rollout", "rollout")
    found = only(log)
    assert found.done_s is None and found.total_s == 7.0 and "not over" in found.line()


def test_a_supervisor_that_was_killed():
    log = job()
    last_s = log.now_s
    log.now_s += 5.0
    log.start(startup_s=1.0, phase="reattach")
    log.train(3.0)
    found = only(log)
    assert (found.role, found.began_s, found.total_s) == ("supervisor", last_s, 9.0)


def test_a_supervisor_that_ended_by_itself_is_no_fault():
    log = job()
    log.emit("supervisor", Kind.RUN, phase="end", cause="stopped by SIGINT")
    log.now_s += 5.0
    log.start(startup_s=1.0, phase="resume")
    log.train(3.0)
    assert outages(log.events) == []


def test_the_host_was_started_again_between_two_lives():
    """Its monotonic clock has begun anew."""
    log = job()
    log.now_s = 3.0
    log.start(startup_s=1.0, phase="resume")
    log.train(3.0)
    found = only(log)
    assert found.began_s == 3.0 < START_S and found.total_s == 4.0


def test_dropped_and_superseded_samples_are_of_the_fault():
    log = job()
    log.rollout(2.0)
    exit_(log, "trainer-0")
    log.emit("rollout", Kind.SUPERSEDE, from_step=2, to_step=1)
    log.emit("rollout", Kind.DROP, cause="too old: policy age 9, at most 1", group=3)
    log.emit("rollout", Kind.DROP, cause="filter: no signal", group=3)
    found = only(log)
    assert (found.samples_lost, found.samples_replayed) == (4, 4)


def sealed(log, steps):
    """Batches of 4 samples that are waiting to be trained: batch 10 of step 1, and so on."""
    for step in steps:
        [group] = log.issue()
        log.accept([group])
        log.emit("rollout", Kind.SEAL, step=step, batch=10 * step, samples=4, groups=[group])


def refuse(log, name, batch, step):
    log.emit(name, Kind.REFUSE, cause="a sum failed", batch=batch, step=step)


@pytest.mark.parametrize("noticed_first", [True, False])
def test_a_batch_that_is_trained_again_is_told_once(noticed_first):
    log = Log(groups=3)
    log.start()
    sealed(log, [1, 2])
    for name in log.groups:
        log.phase(name, "forward_backward")
    log.now_s += 1.0
    if noticed_first:
        exit_(log, "trainer-0")
    refuse(log, "trainer-1", 10, 1)
    refuse(log, "trainer-2", 10, 1)
    for name in ("trainer-0", "trainer-1"):
        log.now_s += 0.1
        exit_(log, name)
    assert sum(o.samples_replayed for o in outages(log.events)) == 4
    log.commit(["trainer-2"])
    log.phase("trainer-2", "forward_backward")
    refuse(log, "trainer-2", 20, 2)
    assert sum(o.samples_replayed for o in outages(log.events)) == 8


def test_an_issue_of_more_groups_than_there_can_be_is_none():
    log = job()
    log.emit("rollout", Kind.ISSUE, groups=1, first=-(10**15), last=10**15)
    exit_(log, "rollout")
    assert only(log).samples_replayed == 0


def test_a_group_that_is_lost_with_its_step_committed_costs_no_sample():
    log = job(groups=2)
    log.rollout(1.0)
    for name in log.groups:
        log.phase(name, "forward_backward")
        log.phase(name, "commit")
    log.commit()
    exit_(log, "trainer-0")
    assert only(log).samples_replayed == 0


def test_batches_after_a_dropped_one_move_up():
    log = Log(groups=2)
    log.start()
    sealed(log, [1])
    log.emit("rollout", Kind.SEAL, step=2, batch=20, samples=400, groups=[90])
    sealed(log, [3])
    log.emit("rollout", Kind.DROP, step=2, batch=20, cause="not finite", groups=[90])
    log.commit()
    for name in log.groups:
        log.phase(name, "forward_backward")  # of step 2, with what was the batch of step 3
    exit_(log, "trainer-0")
    found = only(log)
    assert (found.samples_replayed, found.samples_lost) == (4, 0)


def test_records_that_were_handed_out_do_not_change_any_more():
    log = job()
    found = Outages()
    for event in log.events:
        found.add(event)
    log.events.clear()
    exit_(log, "lighthouse")
    found.add(log.events[-1])
    [before] = found.all()
    log.now_s += 2.0
    log.emit("lighthouse", Kind.READY, url="http://x")
    found.add(log.events[-1])
    [after] = found.all()
    assert (before.done_s, before.total_s) == (None, 0.0) and after.total_s == 2.0
