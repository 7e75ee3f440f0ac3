"""The pure parts of benchmarks/ettr_live.py: traces, arms, saved results, tables and plots."""

import contextlib
import json
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import ettr_live
from benchmarks.live import plots, tables
from benchmarks.live.accounts import key_of
from benchmarks.live.arms import LOADS, Arm, config_hash, plan
from benchmarks.live.driver import Disturbed, Exits, Job, _first_exit
from benchmarks.live.results import Results
from benchmarks.live.trace import TraceFault, draw
from torchtitan_rl_ft.chaos.plan import FaultKind, When, parse
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.run_folder import ProcessId

SHAPE = {"steps": 100, "step_s": 1.5, "groups": 2, "engines": 2}
ARM = Arm("role_isolated", "trainers", "short", 100, 0, standby="spare")


def test_one_trainer_fault_at_a_uniform_time_in_every_window():
    windows, fractions = Counter(), []
    for seed in range(200):
        trace = draw("trainers", seed=seed, **SHAPE)
        assert [f.step // 10 for f in trace] == list(range(10))
        assert {f.subject for f in trace} <= {"trainer-0", "trainer-1"}
        windows.update(f.step for f in trace)
        fractions += [f.phase_offset_s / 1.5 for f in trace]
    assert 0 not in windows and max(windows) == 99  # after the first commit, before the end
    later = [windows[s] for s in range(10, 99)]
    assert min(later) > 5 and max(later) < 50
    assert 0.45 < sum(fractions) / len(fractions) < 0.55 and max(fractions) < 1


def test_faults_of_all_roles_are_in_the_order_of_time():
    trace = draw("all_roles", seed=3, **SHAPE)
    assert trace == sorted(trace, key=lambda f: (f.step, f.phase_offset_s))
    assert Counter(f.subject.split("-")[0] for f in trace) == {
        "trainer": 10,
        "engine": 10,
        "rollout": 5,
    }
    assert draw("none", seed=3, **SHAPE) == []


def test_a_trace_depends_on_its_seed_and_is_in_the_language_of_faults():
    trace = draw("trainers", seed=1, **SHAPE)
    assert trace == draw("trainers", seed=1, **SHAPE) != draw("trainers", seed=2, **SHAPE)
    longer = draw("trainers", seed=1, **{**SHAPE, "step_s": 3.0})
    assert [(f.step, f.subject) for f in longer] == [(f.step, f.subject) for f in trace]
    fault = parse(trace[0].line)
    assert (fault.kind, fault.target) == (FaultKind.KILL, trace[0].subject)
    assert (fault.moment.when, fault.moment.number) == (When.STEP, trace[0].step)
    assert fault.moment.plus_s == trace[0].phase_offset_s
    assert TraceFault(**trace[0].to_json()) == trace[0]


def test_the_plan_has_each_arm_once_and_first_what_others_are_placed_by():
    for quick in (True, False):
        arms = plan(quick=quick)
        assert len({(a.load, a.seed, a.name) for a in arms}) == len(arms)
        calm = set()
        for arm in arms:
            if arm.strategy == "no_fault":
                calm.add((arm.load, arm.seed))
            assert (arm.load, arm.seed) in calm
        strategies = {(a.strategy, a.faults, a.checkpoint_every_steps) for a in arms}
        assert {
            ("full_restart", "trainers", 1),
            ("full_restart", "trainers", 5),
            ("full_restart", "all_roles", 1),
            ("role_isolated", "trainers", 1),
            ("role_isolated", "all_roles", 1),
        } <= strategies
    assert {a.seed for a in plan(quick=False)} == {0, 1, 2}
    assert {a.load for a in plan(quick=False)} == set(LOADS)
    assert {a.steps for a in plan(quick=False, steps=12)} == {12}


def test_the_baseline_loses_its_rollouts_and_has_no_standby():
    keys = replace(ARM, strategy="full_restart", standby="none").keys
    told = dict(zip(keys[::2], keys[1::2], strict=True))
    assert told["--recovery.partial_interval_tokens"] == "0" and "--recovery.standby" not in told
    ours = dict(zip(ARM.keys[::2], ARM.keys[1::2], strict=True))
    assert ours["--recovery.standby"] == "spare" and told["--rollout.retain_ttl"] == "0"
    differ = {k for k in told.keys() | ours.keys() if told.get(k) != ours.get(k)}
    assert differ == {"--recovery.partial_interval_tokens", "--recovery.standby"}


def test_a_hash_is_of_the_arm_and_its_trace():
    trace = draw("trainers", seed=0, **SHAPE)
    same = config_hash(ARM, trace)
    assert same == config_hash(replace(ARM), list(trace))
    others = [
        config_hash(replace(ARM, steps=90), trace),
        config_hash(replace(ARM, standby="none"), trace),
        config_hash(ARM, trace[:-1]),
        config_hash(ARM, [replace(trace[0], phase_offset_s=0.5), *trace[1:]]),
    ]
    assert len({same, *others}) == 5


def test_of_the_plan_what_is_wanted_and_what_it_is_placed_by():
    full = plan(quick=False, seeds=[0])
    keys = [key_of(a) for a in ettr_live.wanted(full, "trainers")]
    assert keys[:2] == ["short/0/no_fault", "short/0/role_isolated/trainers/spare"]
    assert len(keys) == 13 and not any("all_roles" in k for k in keys)
    assert {k.split("/")[0] for k in keys} == {"short", "long", "sync"}
    keys = [key_of(a) for a in ettr_live.wanted(full, "sync/0/full_restart")]
    assert [k.split("/")[2] for k in keys] == ["no_fault", "full_restart", "full_restart"]
    assert ettr_live.wanted(full, "other") == []


@pytest.mark.parametrize("words", [["--only", "other"], ["--steps", "9"]])
def test_what_cannot_be_measured_is_said_at_once(tmp_path, monkeypatch, capsys, words):
    out = tmp_path / "live.json"
    monkeypatch.setattr(sys, "argv", ["ettr_live", "--out", str(out), *words])
    try:
        code = ettr_live.main()
    except SystemExit as e:
        code = e.code
    assert code == 2 and words[1] in capsys.readouterr().err and not out.exists()


def test_the_folder_of_an_arm_that_was_cut_off_stays(tmp_path):
    folders = [ettr_live.unused(tmp_path / "keep", "short-0-no_fault") for _ in range(3)]
    names = ["short-0-no_fault", "short-0-no_fault.1", "short-0-no_fault.2"]
    assert [f.name for f in folders] == names and all(f.is_dir() for f in folders)


A_BENCHMARK = """
import sys, time
from pathlib import Path
from benchmarks.live.driver import Job
with Job(Path(sys.argv[1]) / "run") as job:
    job.spawn("supervisor", "sleep", "600")
    print(job.processes["supervisor"].pid, flush=True)
    time.sleep(600)
"""


def test_a_job_ends_with_a_benchmark_that_is_killed(tmp_path):
    command = [sys.executable, "-c", A_BENCHMARK, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        job = ProcessId.of(int(benchmark.stdout.readline()))
        try:
            assert job.alive()
        finally:
            benchmark.kill()
    end = time.monotonic() + 30
    while job.alive():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("struck", [True, False])
def test_a_restart_of_the_job_is_for_faults_of_the_trace_alone(tmp_path, struck):
    with Job(tmp_path / "run") as job:
        job.folder.path.mkdir(parents=True)
        exits, log = Exits(job), EventLog(job.folder.events, run="r", role="x", name="x")
        job.spawn("supervisor", "sleep", "600")
        victim = ProcessId.of(job.spawn("victim", "sleep", "600").pid)
        start_time = victim.start_time
        log.emit(Kind.SPAWN, subject="engine-0", pid=victim.pid, start_time=start_time)
        if struck:
            log.emit(Kind.CHAOS, phase="inject", subject="engine-0")
        with exits, contextlib.closing(log):
            assert exits.look() is None
            job.kill("victim")
            end = time.monotonic() + 30
            if struck:
                assert _first_exit(job, exits, 9, end) == "engine-0"
                return
            with pytest.raises(Disturbed, match="engine-0 ended, and nobody had struck it"):
                _first_exit(job, exits, 9, end)


def test_a_disturbed_arm_is_run_once_more(tmp_path, monkeypatch, capsys):
    tries = []

    def run(arm: Arm, trace: list[TraceFault], folder: Path) -> str:
        tries.append(folder.name)
        if len(tries) % 2:
            raise Disturbed("engine-0 ended\nits story")
        return "ran"

    monkeypatch.setattr(ettr_live, "run", run)
    monkeypatch.setattr(ettr_live, "account", lambda arm, trace, ran: {"ran": ran})
    assert ettr_live.run_one(ARM, [], tmp_path)["ran"] == "ran"
    assert tries[1] == f"{tries[0]}.1" and "once more: engine-0 ended" in capsys.readouterr().out
    with pytest.raises(Disturbed):
        ettr_live.run_one(ARM, [], tries=1)


MACHINE = {"cpus": 2}


def saved(name: str, *, seed: int = 0, strict: float = 0.5, load: str = "short", **more) -> dict:
    """What `accounts.account` makes of an arm."""
    return {
        "key": f"{load}/{seed}/{name}",
        "config_hash": f"{load}{seed}{name}",
        "name": name,
        "strategy": name.split("/")[0],
        "load": load,
        "seed": seed,
        "steps": 100,
        "trace": [] if name == "no_fault" else [TraceFault(3, 0.5, "trainer-0").to_json()] * 10,
        "wall_s": 200.0,
        "step_s": 1.5,
        "ettr": {"strict": strict, "paper": strict + 0.1},
        "ettr_fault_free": {"strict": 0.7, "paper": 0.9},
        "recovery_s": {},
        "restarts_of_the_job": 0,
        "samples": {"trained": 100, "lost": 0, "too_old": 0},
        **more,
    }


def test_saved_arms_are_found_again_and_replaced_by_key(tmp_path):
    path = tmp_path / "live.json"
    results = Results(path, MACHINE, {"short": 100})
    results.put(saved("no_fault"))
    results.put(saved("no_fault", seed=1))
    results.put(saved("no_fault", config_hash="other"))
    again = Results(path, MACHINE, {"short": 100, "long": 50})
    assert [a["seed"] for a in again.arms] == [1, 0]
    assert again.find("other") is not None and again.find("short0no_fault") is None
    # Figures of another machine, or of runs of another length, belong into no table with these, and
    # are not lost.
    before = path.read_bytes()
    for machine, steps in (({"cpus": 4}, {"short": 100}), (MACHINE, {"short": 50})):
        with pytest.raises(ValueError, match=r"live\.json holds no results .*--out"):
            Results(path, machine, steps)
    assert path.read_bytes() == before


def test_an_arm_that_is_saved_is_not_run_again(tmp_path, monkeypatch, capsys):
    """Killed in the middle of the third arm, started again: it and what follows are run."""
    arms = [replace(ARM, strategy="no_fault", faults="none"), ARM, replace(ARM, standby="none")]
    ran, killed = [], [key_of(arms[2])]

    def run_one(arm: Arm, trace: list[TraceFault], keep: object) -> dict:
        ran.append(key_of(arm))
        if killed and key_of(arm) == killed[0]:
            raise KeyboardInterrupt(killed.pop())
        return saved(arm.name, config_hash=config_hash(arm, trace))

    monkeypatch.setattr(ettr_live, "run_one", run_one)
    path = tmp_path / "live.json"
    with pytest.raises(KeyboardInterrupt):
        ettr_live.measure(arms, Results(path, MACHINE, {"short": 100}))
    assert len(ran) == 3 and len(json.loads(path.read_bytes())["arms"]) == 2
    results = Results(path, MACHINE, {"short": 100})
    assert ettr_live.measure(arms, results) == []
    assert ran == [key_of(a) for a in [*arms, arms[2]]] and len(results.arms) == 3
    assert capsys.readouterr().out.count("saved by an earlier run") == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99, "arms": []}'])
def test_results_that_cannot_be_gone_on_with_are_named(tmp_path, content):
    path = tmp_path / "live.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"live\.json holds no results .*--out"):
        Results(path, MACHINE, {})


def test_rows_are_means_over_seeds_and_the_aims_compare_with_the_better_baseline(tmp_path):
    arms = [
        saved("no_fault", wall_s=160.0),
        saved(tables.OURS, strict=0.66, recovery_s={"trainer": 1.2}),
        saved(tables.OURS, seed=1, strict=0.62, recovery_s={"trainer": 1.4}),
        saved(tables.BASELINES[0], strict=0.40, recovery_s={"job": 9.0}, restarts_of_the_job=10),
        saved(tables.BASELINES[1], strict=0.45, recovery_s={"job": 8.0}),
        saved("role_isolated/all_roles/spare", samples={"trained": 96, "lost": 4, "too_old": 2}),
        saved("no_fault", load="long"),
    ]
    rows = tables.rows(arms)
    assert [(r.load, r.name) for r in rows[:2]] == [("short", "no_fault"), ("short", tables.OURS)]
    ours = rows[1]
    assert ours.seeds == [0, 1] and ours.faults == 20 and ours.to_no_fault == 1.25
    assert ours.strict == pytest.approx(0.64)
    assert (ours.strict_least, ours.strict_most) == (0.62, 0.66)
    aims = tables.aims(rows)
    points = aims["strict_points_above_full_restart"]
    assert points.value == pytest.approx(19.0) and not points.met
    assert aims["recovery_to_full_restart"].value == pytest.approx(1.3 / 8.0)
    assert aims["samples_lost"].value == 4 and not aims["samples_lost"].met
    assert rows[4].samples_too_old == 2
    assert tables.aims(rows[:2]) == {}
    assert tables.unmeasured(rows) == []
    assert tables.unmeasured(rows[:3]) == [tables.BASELINES[1]]
    never_back = tables.rows([{**a, "recovery_s": {}} for a in arms])
    assert tables.unmeasured(never_back)[0] == f"recovery of {tables.OURS}"
    assert all(len(tables.cells(row)) == len(tables.HEAD) for row in rows)
    plots.save(rows, tmp_path / "live.png")
    assert (tmp_path / "live.png").stat().st_size > 10_000
