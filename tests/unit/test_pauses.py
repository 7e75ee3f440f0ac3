"""How long a pause usually is: in bounded memory, the same for who looks on and who looks back."""

import pytest
from run_events import Log

from torchtitan_rl_ft.observability.ettr import Accounts, measure
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.observability.pauses import Pauses


def test_of_a_hundred_pauses_95_are_usual():
    assert Pauses().usual_s() is None
    lengths = [0.1] * 90 + [0.5] * 5 + [3.0] * 5
    found = Pauses().with_more(lengths[:50]).with_more(lengths[50:])
    assert 0.5 <= found.usual_s() <= 0.5 * 1.01
    assert Pauses().with_more([0.0]).usual_s() == pytest.approx(1e-6, rel=0.01)
    assert found.with_more([3.0] * 1000).usual_s() == pytest.approx(3.0, rel=0.01)


def steps(log, count, pause_s):
    for _ in range(count):
        log.rollout(0.25)
        log.now_s += pause_s
        log.train(0.25)
        log.now_s += pause_s


@pytest.mark.row("K1")
def test_who_looks_on_charges_a_long_outage_as_who_looks_back():
    """Steps get slower before an engine is lost: what a pause usually is is known of the whole run,
    not of what was not summed up yet."""
    log = Log(engines=2)
    log.start()
    steps(log, 400, 0.05)
    steps(log, 15, 0.8)
    log.emit("serving", Kind.EXIT, phase="fault", cause="killed by SIGKILL", subject="engine-1")
    log.engine("engine-1", "retired")
    steps(log, 20, 0.8)
    log.spawn("engine-1", by="serving")
    log.engine("engine-1", "serving", version=1)
    steps(log, 5, 0.05)
    back, on = measure(log.events), Accounts()
    for event in log.events:
        on.add(event)
        if event.kind is Kind.COMMIT:
            on.compact(40.0, least_s=10.0)
    assert on.settled().ettr().paper.ratio == pytest.approx(back.paper.ratio, abs=0.005)
    charged = {f.lost_s["engine"]["restart"] for f in (back.paper, on.settled().ettr().paper)}
    assert max(charged) > 60 and max(charged) - min(charged) < 1
