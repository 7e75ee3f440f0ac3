"""What the console says of faults: who, how, what it said last; once, then how often."""

from __future__ import annotations

from typing import Any

import pytest

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.observability.notices import Notices, notice


def event(kind: Kind, name: str = "serving", **fields: Any) -> dict[str, Any]:
    known = {k: fields.pop(k) for k in ("phase", "cause", "step") if k in fields}
    return {"kind": str(kind), "name": name, "data": fields, **known}


@pytest.mark.scenario("O-2")
def test_a_death_line_has_code_pid_uptime_and_last_words() -> None:
    died = event(
        Kind.EXIT,
        phase="fault",
        cause="killed by SIGKILL",
        subject="trainer-1",
        pid=77,
        returncode=-9,
        signal=9,
        uptime_s=13.234,
        log="logs/trainer-1/attempt_1.log",
        last_lines=["a", "step 3", "out of memory"],
    )
    assert notice(died) == (
        "trainer-1 ended: killed by SIGKILL (process 77, up 13.2 s, log: "
        "logs/trainer-1/attempt_1.log); it said last: step 3 | out of memory"
    )
    died["cause"], died["data"] = "no answer", {"subject": "engine-0", "pid": 5, "returncode": 3}
    assert notice(died) == "engine-0 ended: no answer (exit code 3) (process 5, log: ?)"
    died["data"] = {"subject": "engine-0", "signal": 11}
    assert str(notice(died)).startswith("engine-0 ended: no answer (signal 11)")


@pytest.mark.scenario("O-2")
def test_a_refused_commit_is_one_line_with_replica_and_first_cause() -> None:
    told = Notices()
    refused = [
        event(Kind.REFUSE, name, step=7, cause="Connection reset\nmore", failing=["trainer-1"])
        for name in ("trainer-0", "trainer-2", "trainer-3")
    ]
    lines = [text for e in refused for text in told.of(e)]
    assert lines == ["step 7 refused, seen by trainer-0: trainer-1: Connection reset"]
    gone = [event(Kind.QUORUM, f"trainer-{g}", step=7, left=["trainer-1"]) for g in (0, 2, 3)]
    assert [t for e in gone for t in told.of(e)] == ["step 7 goes on without trainer-1"]
    assert told.of(event(Kind.QUORUM, "trainer-0", step=8)) == []
    counts = told.of(event(Kind.COMMIT, "rollout", step=7))
    assert len(counts) == 2 and all(c.startswith("(2 more like: step 7") for c in counts)
    assert told.end() == []


@pytest.mark.scenario("O-2")
def test_an_engine_that_is_dead_for_a_minute_says_one_line_per_change() -> None:
    told = Notices()
    lines: list[str] = []
    for second in range(60):
        for name in ("rollout", "serving"):
            cause = f"no generation for {second} s: no engine serves"
            lines += told.of(event(Kind.WARN, name, cause=cause))
    assert len(lines) == 2
    lines += told.of(event(Kind.RESTART, subject="serving", attempt=2))
    assert lines[2].startswith("(59 more like: warning: serving: no generation for 0 s")
    assert lines[3:] == ["serving is started again, attempt 2"]
    assert told.end() == [
        "(59 more like: warning: rollout: no generation for 0 s: no engine serves)"
    ]


def test_each_start_and_each_death_is_a_change() -> None:
    told = Notices()
    died = event(Kind.EXIT, phase="fault", cause="killed by SIGKILL", subject="engine-0", pid=1)
    started = event(Kind.RESTART, subject="engine-0", attempt=2)
    assert [len(told.of(e)) for e in (died, died, started, started)] == [1, 1, 1, 1]
    assert told.end() == []


def test_what_all_processes_warn_of_is_said_once() -> None:
    told = Notices()
    cause = "the collector at http://127.0.0.1:4318 does not answer"
    roles = ("supervisor", "serving", "trainer-0", "trainer-1")
    lines = [t for name in roles for t in told.of(event(Kind.WARN, name, cause=cause, shared=True))]
    assert lines == [f"warning: supervisor: {cause}"]
    assert told.end() == [f"(3 more like: warning: supervisor: {cause})"]
