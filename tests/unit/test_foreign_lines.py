"""Lines that another version has written, with content of any type, break no reader of a run."""

from __future__ import annotations

import json
import tempfile
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes.trace_events import check
from torchtitan_rl_ft.observability.events import Kind, read_events
from torchtitan_rl_ft.observability.health import HealthLimits, health
from torchtitan_rl_ft.observability.jsonl import read_jsonl
from torchtitan_rl_ft.observability.live_ettr import LiveEttr, measured_json
from torchtitan_rl_ft.observability.prometheus import RunCollector, exposition
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.observability.run_state import RunState
from torchtitan_rl_ft.observability.summary import render, summarise
from torchtitan_rl_ft.observability.trace import write_trace
from torchtitan_rl_ft.run_folder import RunFolder

ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["engine-0", "x", ""]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)
FIELDS = st.sampled_from(
    ["subject", "group", "groups", "batch", "first", "last", "new", "old", "fault", "shares",
     "trace", "pid", "samples", "from_step", "to_step", "quorum_id", "members", "participants",
     "replica_id", "last_lines", "paused_ms", "standby", "url"]
)  # fmt: skip
LINE = st.fixed_dictionaries(
    {
        "wall_s": st.floats(0, 1e10),
        "mono_s": st.floats(-10, 1e5),
        "run": st.just("r"),
        "role": st.sampled_from(["supervisor", "serving", "rollout", "trainer"]),
        "name": st.sampled_from(["supervisor", "trainer-0", "rollout", "engine-0", "x"]),
        "attempt": st.just(1),
        "pid": st.integers(1, 3),
        "kind": st.sampled_from([str(k) for k in Kind]),
        "data": st.dictionaries(FIELDS, ANYTHING, max_size=4),
    },
    optional={
        "phase": st.sampled_from(["start", "end", "report", "fault", "lend", "inject"]),
        "cause": ANYTHING,
        "step": st.integers(0, 4),
        "version": st.integers(0, 4),
    },
)
TOP = ["kind", "wall_s", "mono_s", "role", "name", "pid", "phase", "step", "version", "data"]
WRONG = st.builds(
    lambda line, over: line | over,
    LINE,
    st.dictionaries(st.sampled_from(TOP), ANYTHING, max_size=2),
)
LINES = st.lists(LINE | WRONG, max_size=25)
ROWS = st.lists(
    st.dictionaries(
        st.sampled_from(["step", "batch", "loss", "reward/mean", "ettr/strict", "participants"]),
        ANYTHING,
    ),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(LINES, ROWS)
def test_lines_of_any_content_break_no_reader(lines: list[Any], rows: list[Any]) -> None:
    """Trace, summary, live ETTR, status page and /metrics: what another version wrote is shown or
    left out."""
    with tempfile.TemporaryDirectory() as name:
        folder = RunFolder(name)
        folder.events.write_bytes(b"".join(json.dumps(x).encode() + b"\n" for x in lines))
        folder.metrics.write_bytes(b"".join(json.dumps(x).encode() + b"\n" for x in rows))
        events = list(read_events(folder.events))
        write_trace(folder.path / "t.json", events, read_jsonl(folder.metrics), {})
        check(folder.path / "t.json")
        told = summarise(
            events, read_jsonl(folder.metrics), outcome="", total_steps=4, transport=""
        )
        assert render(told, name)
        live = LiveEttr(folder.events, window_s=60.0, every_s=10.0)
        json.dumps(measured_json(live.measure_all()), allow_nan=False)
        follower = RunFollower(folder, RunState(total_steps=4, groups=1, engines=1))
        follower.poll()
        json.dumps(follower.state.to_json(5.0), allow_nan=False)
        json.dumps(follower.state.events_after(0), allow_nan=False)
        limits = HealthLimits(start_s=1.0, stall_s=1.0)
        collector = RunCollector(
            follower.state,
            lambda: live.measured,
            lambda: health(follower.state, 5.0, limits),
            lambda: 5.0,
            "r",
        )
        assert b"rl_ft_step" in exposition(collector)
