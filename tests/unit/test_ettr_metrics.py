"""The ETTR of a run that goes on, as its lines of metrics tell it."""

import pytest

from tests.unit.run_events import Log
from torchtitan_rl_ft.observability.ettr import measure, samples
from torchtitan_rl_ft.observability.ettr_metrics import KEYS, EttrMetrics
from torchtitan_rl_ft.observability.live_ettr import LiveEttr


def write(path, events):
    with open(path, "ab") as f:
        f.writelines(e.to_line() for e in events)


def told(metrics, live):
    """The values of the look that a line has begun."""
    metrics()
    live._thread.join()
    return metrics()


def test_lines_tell_what_a_report_would(tmp_path):
    path, now_s = tmp_path / "events.jsonl", 0.0
    live = LiveEttr(path, window_s=40.0, every_s=20.0, clock_s=lambda: now_s)
    metrics = EttrMetrics(live, 20.0, clock_s=lambda: now_s)
    assert told(metrics, live) == dict.fromkeys(KEYS)
    log, read = Log(groups=2, engines=2), 0
    log.start(startup_s=10.0)
    for i in range(60):
        log.rollout(2.0)
        if i % 7 == 3:
            log.kill_trainer(i % 2, after_s=0.5, restart_s=4.0, reconnect_s=2.0)
        log.train(3.0)
        if i % 10 == 9:
            write(path, log.events[read:])
            with open(path, "ab") as f:
                f.write(b"no line of this version\n")
            read, now_s = len(log.events), now_s + 100.0
            told(metrics, live)
            now_s += 100.0
            found, expected = told(metrics, live), samples(log.events, 40.0, 20.0)[-1]
            values = (expected.strict, expected.paper)
            assert (found["ettr/strict"], found["ettr/paper"]) == pytest.approx(values, abs=1e-5)
            windows = (expected.strict_window, expected.paper_window)
            known = (found["ettr/strict_window"], found["ettr/paper_window"])
            assert known == pytest.approx(windows, abs=1e-5)
            whole = measure(log.events)
            beside = [found[k] for k in KEYS[4:]]
            free = [whole.strict.fault_free, whole.paper.fault_free, whole.step_s]
            assert beside == pytest.approx(free, abs=1e-5)


def test_between_two_looks_a_line_costs_nothing(tmp_path):
    live = LiveEttr(tmp_path / "none.jsonl", window_s=40.0, every_s=20.0)
    metrics = EttrMetrics(live, 20.0, clock_s=lambda: 5.0)
    metrics()
    first = live._thread
    metrics()
    assert live._thread is first
