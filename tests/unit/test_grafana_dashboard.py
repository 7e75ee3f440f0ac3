"""The Grafana dashboard asks for what /metrics has."""

from __future__ import annotations

from grafana_dashboard import DASHBOARD, metric_names, queries

from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.observability.health import HealthLimits, health
from torchtitan_rl_ft.observability.live_ettr import LiveEttr
from torchtitan_rl_ft.observability.metric_names import exported_name
from torchtitan_rl_ft.observability.prometheus import RunCollector
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.observability.run_state import RunState
from torchtitan_rl_ft.run_folder import RunFolder

OF_METRICS_JSONL = (
    "reward/mean",
    "reward/std",
    "loss",
    "grad_norm",
    "policy_age/mean",
    "logprob_diff/mean",
    "participants",
    "tokens",
    "samples",
    "rollout/span_s",
    *(
        f"time/{part}_s"
        for part in ("step", "wait_batch", "forward_backward", "quorum", "reduce", "commit")
    ),
)
"""Keys that the dashboard may ask for: a run of the debug job has them (test_main_job.py)."""


def own_names(tmp_path) -> set[str]:
    """Of a run in which everything that is counted has happened."""
    folder = RunFolder(tmp_path)
    for role, kind, fields in [
        ("supervisor", Kind.RUN, {"phase": "start"}),
        ("trainer", Kind.QUORUM, {"step": 1, "quorum_id": 1, "members": ["a"]}),
        ("rollout", Kind.SEAL, {"step": 1}),
        ("rollout", Kind.COMMIT, {"step": 1}),
        ("serving", Kind.PUBLISH, {"version": 1, "step": 1}),
        ("serving", Kind.EXIT, {"subject": "engine-0", "phase": "fault", "cause": "killed"}),
        ("rollout", Kind.DROP, {"group": 1, "cause": "too old"}),
        ("rollout", Kind.CHECKPOINT, {"step": 1}),
        ("rollout", Kind.COMMIT, {"step": 2}),
    ]:
        log = EventLog(folder.events, run="r", role=role, name=role)
        log.emit(kind, **fields)
        log.close()
    state = RunState(8, 1, 1)
    RunFollower(folder, state).poll()
    measured = LiveEttr(folder.events, window_s=60.0, every_s=1.0).measure_all()
    now_s = state.last_mono_s
    verdict = health(state, now_s, HealthLimits(1.0, 1.0))
    collector = RunCollector(state, lambda: measured, lambda: verdict, lambda: now_s, "run")
    return {sample.name for metric in collector.collect() for sample in metric.samples}


def test_every_query_is_about_a_metric_that_there_is(tmp_path):
    known = own_names(tmp_path) | {exported_name(key) for key in OF_METRICS_JSONL}
    asked = {name for query in queries() for name in metric_names(query)}
    assert len(asked) > 40
    assert asked <= known, asked - known
    # Nothing that is served of the run itself is forgotten but for what needs no picture.
    assert own_names(tmp_path) - asked <= {
        "rl_ft_run_info",
        "rl_ft_elapsed_seconds",
        "rl_ft_checkpoint_step",
        "rl_ft_warnings_total",
        "rl_ft_faults_total",
        "rl_ft_heals_total",
        "rl_ft_ettr_paper_fault_free",
    }


def test_panels_have_a_place_of_their_own_and_a_data_source():
    panels = DASHBOARD["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}" and panel["targets"]
    assert len({p["id"] for p in panels}) == len(panels)
    assert {v["name"] for v in DASHBOARD["templating"]["list"]} == {"datasource", "instance"}
