"""What benchmarks/overhead.py makes of its lives."""

import json
import sys

import httpx
import pytest

from benchmarks import overhead
from benchmarks.overhead import Life, figures, receiving


def life(*step_s: float, cpu_s: float = 2.0, scrapes: int = 0, exports: int = 0) -> Life:
    return Life(list(step_s), cpu_s, scrapes, exports)


def test_the_difference_is_that_of_each_rounds_medians():
    found = figures(
        [
            {"on": life(1.0, 1.02, 9.0, cpu_s=2.2, scrapes=3, exports=5), "off": life(1.0)},
            # The machine was slower in this round, for both.
            {"off": life(2.0), "on": life(2.04, cpu_s=2.2, scrapes=4, exports=5)},
        ]
    )
    assert found["added_ms"] == pytest.approx(30)
    assert found["added_percent"] == pytest.approx(2)
    assert found["added_error_ms"] == pytest.approx(10)
    assert found["cpu_added_percent"] == pytest.approx(10)
    assert (found["scrapes"], found["exports"], found["rounds"]) == (7, 10, 2)


def test_one_round_has_no_error():
    assert figures([{"on": life(1.0), "off": life(1.0)}])["added_error_ms"] is None


def test_the_receiver_counts_what_it_is_sent():
    with receiving() as sink:
        for path in ("/v1/traces", "/v1/metrics"):
            answer = httpx.post(sink.endpoint + path, content=b"x" * 100, trust_env=False)
            assert answer.status_code == 200
        assert sink.requests == 2


def test_a_quick_run_leaves_the_results_alone(tmp_path, monkeypatch, capsys):
    full, quick = tmp_path / "results.json", tmp_path / "outputs" / "quick.json"
    monkeypatch.setattr(overhead, "RESULTS", full)
    monkeypatch.setattr(overhead, "QUICK", quick)
    lives = [{"on": life(1.5), "off": life(1.0)}]
    monkeypatch.setattr(overhead, "measure", lambda rounds, steps: lives)
    monkeypatch.setattr(sys, "argv", ["overhead", "--quick", "--verify"])
    assert overhead.main() == 1  # 50 % were added
    assert json.loads(quick.read_text())["aims"]["added_percent"]["met"] is False
    assert not full.exists() and "MISSED added_percent" in capsys.readouterr().out
