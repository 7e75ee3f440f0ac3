"""What holds of the ETTR of every run, whatever happened in it."""

import dataclasses
import math
import tempfile
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.run_events import Log
from torchtitan_rl_ft.observability.ettr import measure, samples
from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.observability.live_ettr import LiveEttr
from torchtitan_rl_ft.observability.outage import PHASES
from torchtitan_rl_ft.observability.outages import outages

pytestmark = pytest.mark.row("K1")

SECONDS = st.floats(0.0, 20.0, allow_nan=False)
CALM = st.tuples(st.just("step"), SECONDS, SECONDS)
STAYS = st.one_of(
    st.tuples(st.just("kill_trainer"), st.integers(0, 1), SECONDS, SECONDS, SECONDS, st.booleans()),
    st.tuples(st.just("role"), st.sampled_from(["rollout", "serving", "lighthouse"]), SECONDS),
    st.tuples(st.just("engine"), st.integers(0, 1), SECONDS, SECONDS),
    st.tuples(st.just("stop"), st.sampled_from(["trainer-0", "engine-1", "rollout"]), SECONDS),
    st.tuples(st.just("dropped"), SECONDS),
    st.tuples(st.just("given_up"), SECONDS, st.booleans()),
    st.tuples(st.just("refuse"), SECONDS),
)
"""What changes nothing of what was before it."""

FAULTS = st.one_of(
    STAYS,
    st.tuples(st.just("supersede"), st.integers(0, 3)),
    st.tuples(st.just("life"), st.booleans(), SECONDS),
)


def play(deeds, startup_s):
    log = Log(groups=2, engines=2)
    log.start(startup_s=startup_s)
    for deed, *args in deeds:
        DEEDS[deed](log, *args)
    return log.events


def step(log, rollout_s, train_s):
    log.rollout(rollout_s)
    log.train(train_s)


def kill_trainer(log, index, after_s, restart_s, reconnect_s, rolling):
    log.kill_trainer(
        index, after_s=after_s, restart_s=restart_s, reconnect_s=reconnect_s, rolling=rolling
    )


def role(log, name, down_s):
    log.emit("supervisor", Kind.EXIT, phase="fault", cause="killed", subject=name)
    log.spawn(name)
    log.now_s += down_s
    log.emit(name, Kind.READY, url="http://x")


def engine(log, index, detect_s, restart_s):
    name = f"engine-{index}"
    log.engine(name, "suspect", cause="silent")
    log.now_s += detect_s
    log.engine(name, "retired")
    log.emit("serving", Kind.EXIT, phase="fault", cause="killed", subject=name)
    log.spawn(name, by="serving")
    log.now_s += restart_s
    log.engine(name, "serving", version=1)


def stop(log, name, for_s):
    where = {"cause": f"stop {name}", "fault": "stop", "subject": name}
    log.emit("chaos", Kind.CHAOS, phase="inject", **where)
    log.now_s += for_s
    log.emit("chaos", Kind.CHAOS, phase="lift", **where)


def refuse(log, after_s):
    for name in log.groups:
        log.phase(name, "quorum")
        log.phase(name, "forward_backward")
    log.now_s += after_s
    for name in log.groups:
        log.emit(name, Kind.REFUSE, cause="a sum failed", step=log.step + 1, batch=1)
        log.phase(name, "waiting_for_batch")


def given_up(log, rollout_s, sealed):
    groups = log.issue()
    log.now_s += rollout_s
    log.accept(groups)
    if not sealed:
        log.emit("rollout", Kind.DROP, cause="too old", group=groups[0])
        log._batch.clear()
        return
    log.seal()
    log.emit("rollout", Kind.DROP, cause="not finite", step=log._sealed, batch=1, groups=groups)
    log._sealed -= 1


def life(log, ended, pause_s):
    if ended:
        log.emit("supervisor", Kind.RUN, phase="end", cause="stopped")
    log.now_s += pause_s
    log.start(startup_s=1.0, phase="resume")


DEEDS = {
    "step": step,
    "kill_trainer": kill_trainer,
    "role": role,
    "engine": engine,
    "stop": stop,
    "supersede": lambda log, back: log.supersede(max(0, log.step - back)),
    "dropped": lambda log, s: log.rollout(s, dropped=True),
    "refuse": refuse,
    "given_up": given_up,
    "life": life,
}


def hold(events, whole_run=False):
    found = measure(events, whole_run=whole_run)
    if found is None:
        return None
    for figure in (found.strict, found.paper):
        assert 0.0 <= figure.ratio <= 1.0 and 0.0 <= figure.after_startup <= 1.0
        assert figure.fault_free is None or figure.ratio - 1e-9 <= figure.fault_free <= 1.0
        lost_s = [s for causes in figure.lost_s.values() for s in causes.values()]
        assert min(lost_s, default=0.0) >= 0.0
        missing_s = (1.0 - figure.ratio) * found.slot_s
        assert math.fsum(lost_s) == pytest.approx(missing_s, rel=1e-6, abs=1e-6)
    assert found.strict.ratio <= found.paper.ratio + 1e-9
    for outage in found.outages:
        assert tuple(outage.phase_s) == PHASES and min(outage.phase_s.values()) >= 0.0
        assert sum(outage.phase_s.values()) == pytest.approx(outage.total_s, abs=1e-6)
        if outage.done_s is not None:
            assert outage.total_s == pytest.approx(outage.done_s - outage.began_s, abs=1e-6)
        assert outage.samples_lost >= 0 and outage.samples_replayed >= 0
    return found


@settings(max_examples=80, deadline=None)
@given(st.lists(st.one_of(CALM, FAULTS), max_size=12), SECONDS)
def test_of_any_history(deeds, startup_s):
    events = play(deeds, startup_s)
    hold(events, whole_run=True)
    found = hold(events)
    for sample in samples(events, 30.0, 7.0):
        values = dataclasses.astuple(sample)[1:]
        assert all(0.0 <= v <= 1.0 for v in values)
        assert sample.strict <= sample.paper + 1e-9
    if found is not None:
        last = samples(events, 30.0, 7.0)[-1:]
        assert all(s.strict == pytest.approx(found.strict.ratio, abs=1e-9) for s in last)


@settings(max_examples=25, deadline=None)
@given(st.lists(CALM, min_size=1, max_size=12), SECONDS)
def test_without_a_fault_only_waits_are_lost(deeds, startup_s):
    found = hold(play(deeds, startup_s))
    assert found.outages == []
    for figure in (found.strict, found.paper):
        for causes in figure.lost_s.values():
            assert {c for c, s in causes.items() if s > 0} <= {"wait"}
        if found.wall_s > 0 and found.step_s is not None:
            assert figure.fault_free == pytest.approx(figure.ratio, abs=1e-6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.one_of(CALM, FAULTS), min_size=3, max_size=8), st.randoms())
def test_lines_that_come_in_any_order_break_nothing(deeds, random):
    """Several processes write; some lines are missing, some are of a clock that jumped."""
    events = [e for e in play(deeds, 1.0) if random.random() > 0.1]
    random.shuffle(events)
    moved = [dataclasses.replace(e, wall_s=e.wall_s + random.choice([0, -1e6])) for e in events]
    hold(moved)
    hold(moved, whole_run=True)
    outages(moved)


QUARTERS = st.integers(1, 80).map(lambda n: n / 4)
STEPS = st.tuples(st.just("step"), QUARTERS, QUARTERS)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.one_of(STEPS, STEPS, STEPS, STAYS), min_size=12, max_size=40),
    st.integers(0, 999),
    st.sampled_from([1.0, 20.0]),
)
def test_who_looks_on_comes_to_what_is_measured_at_the_end(deeds, seed, every_s):
    """Reading pieces of lines, forgetting what is old."""
    events, random = play(deeds, 1.0), Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        live = LiveEttr(path, window_s=50.0, every_s=every_s)
        lines = b"".join(e.to_line() for e in events)
        with open(path, "ab", buffering=0) as f:
            while lines:
                n = random.randint(1, 4000)
                f.write(lines[:n])
                lines = lines[n:]
                live.measure()
        found, wanted = live.measure_all().ettr, measure(events)
    if wanted is None:
        assert found is None
        return
    assert found.outages == wanted.outages and found.steps == wanted.steps
    assert (found.wall_s, found.slot_s) == pytest.approx((wanted.wall_s, wanted.slot_s))
    for one, other in ((found.strict, wanted.strict), (found.paper, wanted.paper)):
        assert one.ratio == pytest.approx(other.ratio, abs=1e-6)
        assert one.fault_free == pytest.approx(other.fault_free, abs=1e-5)
        lost_s = [s for causes in one.lost_s.values() for s in causes.values()]
        missing_s = (1.0 - one.ratio) * found.slot_s
        assert math.fsum(lost_s) == pytest.approx(missing_s, rel=1e-6, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.builds(
            Event,
            wall_s=SECONDS,
            mono_s=st.floats(-10.0, 100.0),
            run=st.just("r"),
            role=st.sampled_from(["supervisor", "serving", "rollout", "trainer"]),
            name=st.sampled_from(["trainer-0", "rollout", "engine-0", "x"]),
            attempt=st.just(1),
            pid=st.integers(1, 3),
            kind=st.sampled_from(list(Kind)),
            phase=st.sampled_from([None, "start", "end", "report", "fault", "lend", "wedged"]),
            step=st.one_of(st.none(), st.integers(0, 4)),
            version=st.one_of(st.none(), st.integers(0, 4)),
            data=st.dictionaries(
                st.sampled_from(
                    ["subject", "group", "groups", "first", "last", "new", "fault", "shares"]
                ),
                st.one_of(st.none(), st.integers(0, 5), st.sampled_from(["engine-0", "serving"])),
            ),
        ),
        max_size=25,
    )
)
def test_lines_that_make_no_sense_break_nothing(events):
    hold(events)
    outages(events)
