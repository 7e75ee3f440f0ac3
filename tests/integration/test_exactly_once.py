"""Exactly once, on real trainers: groups are killed three times and more in each delicate phase,
and what comes out is what an undisturbed run makes of the same batches."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from forked_ranks import forks
from safetensors.numpy import load_file
from trainer_run import TrainerRun

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.journal.checkpoints import MARKER, read_marker
from torchtitan_rl_ft.journal.ledger_report import LedgerReport
from torchtitan_rl_ft.observability.events import Kind, read_events
from torchtitan_rl_ft.observability.notices import Notices

pytestmark = pytest.mark.timeout(400)

POINTS = {  # phase in which the victim is to die: (point that it comes to, up to how long after)
    "quorum": [("quorum", 0.03), ("quorum", 0.0)],
    "reduce": [("reduce", 0.0), ("reducing", 0.0)],
    "optimizer": [("optimizer", 0.0)],  # between the commit vote and the optimizer step
    "report": [("report", 0.0)],  # between the optimizer step and its report
    "publish": [("publish", 0.01), ("announced", 0.0)],
    "checkpoint": [("written", 0.0), ("marked", 0.0), ("checkpoint", 0.02)],
}
KILLS = 3
MAX_STRIKES = 40
LAST_STEP = "last_step"  # tests/fakes/run_host.py
SLOWLY = ("--slow-s", "0.05")
KEYS = {
    "optimizer__name": "SGD",
    "optimizer__lr": 0.05,
    "fault_tolerance__process_group_timeout_ms": 5000,
    "fault_tolerance__join_timeout_ms": 200,
    "checkpoint__interval": 5,
}


class Supervised:
    """Waits until all groups train. One that ended by itself meanwhile (another process took its
    port, say) is started again, as the supervisor would, some times."""

    def __init__(self, run: TrainerRun, max_restarts: int = 3) -> None:
        self._run, self._left = run, max_restarts

    def wait_all_in(self, step: int = 0) -> None:
        """Also until `step` is committed."""
        self._run.wait_for(
            lambda: self._all_in() and len(self._run.metrics()) >= step, "all groups to train"
        )

    def _all_in(self) -> bool:
        for group in range(self._run.groups):
            name = f"trainer-{group}"
            if self._run.processes[name][0].poll() is not None:
                assert self._left > 0, self._run.logs()
                self._left -= 1
                self._run.kill(name)
                self._run.start(name)
        rows = self._run.metrics()[-2:]
        return len(rows) == 2 and all(r["participants"] == self._run.groups for r in rows)


def on_duty(run: TrainerRun, phase: str) -> int:
    """The group that published or saved last: it tends to do it again."""
    if phase == "checkpoint":
        found = [e["data"]["saved_by"] for e in run.events("checkpoint")]
    else:
        names = [e["name"] for e in run.events("phase") if e["phase"] == phase]
        found = [int(name.removeprefix("trainer-")) for name in names]
    return found[-1] if found else 0


def strike(run: TrainerRun, phase: str, turn: int, rng: random.Random) -> str:
    """Kill a group on its way through `phase` and start it again; the phase in which it died."""
    point, late_s = POINTS[phase][turn % len(POINTS[phase])]
    duty = phase in ("publish", "checkpoint")
    victim = on_duty(run, phase) if duty else rng.randrange(run.groups)
    died_in, _ = run.kill_near(victim, point, delay_s=rng.uniform(0, late_s) if late_s else 0.0)
    run.start(f"trainer-{victim}")
    return died_in


def end_after(run: TrainerRun, more: int) -> None:
    """Let the run end some steps from now, and its processes with it."""
    wanted = len({c["step"] for c in run.metrics()}) + more
    (run.run.path / LAST_STEP).write_text(str(wanted))
    for group in range(run.groups):
        assert run.wait_exit(f"trainer-{group}") == [0], run.logs()
    assert run.wait_exit("host") == [0], run.logs()
    run.kill("lighthouse")


def undisturbed(path: Path, of: LedgerReport, groups: int, **keys: object) -> TrainerRun:
    """As many steps without a fault; its batches are those of the other run, digest by digest."""
    steps = len(of.audit.history)
    with TrainerRun(path, steps=100_000, groups=groups, forked=True, **KEYS, **keys) as run:
        (path / LAST_STEP).write_text(str(steps))
        run.start_all()
        for group in range(groups):
            assert run.wait_exit(f"trainer-{group}") == [0], run.logs()
    calm = LedgerReport.of(run.run.journal)
    assert [c.digest for c in calm.audit.history] == [c.digest for c in of.audit.history]
    assert calm.audit.superseded == 0 and calm.audit.ok
    return run


def parameters(run: TrainerRun) -> np.ndarray:
    """The published weights of the last step, as one vector."""
    (event,) = [e for e in run.events("publish") if e["step"] == run.metrics()[-1]["step"]][-1:]
    (path,) = run.run.weights.glob(f"step-{event['step']}-{event['data']['token'][:8]}")
    manifest = json.loads((path / "manifest.json").read_text())
    last = LedgerReport.of(run.run.journal).audit.history[-1]
    assert (manifest["step"], manifest["token"]) == (last.step, last.token)
    tensors = load_file(path / "model.safetensors")
    return np.concatenate([tensors[k].astype(np.float64).ravel() for k in sorted(tensors)])


def left_over(run: TrainerRun) -> list[int]:
    """Living processes that were started for this run folder, and forked ranks of any."""
    return forks().living() + [
        p.pid
        for p in psutil.process_iter(["environ"])
        if (p.info["environ"] or {}).get("TORCHTITAN_RL_FT_RUN") == str(run.run.path)
        and p.status() != psutil.STATUS_ZOMBIE
    ]


@pytest.fixture(scope="module")
def struck(tmp_path_factory) -> Iterator[tuple[TrainerRun, Counter[str]]]:
    """A finished run of three groups, and in which phases how many of them were killed."""
    rng, hits, turns = random.Random(4), Counter(), Counter()
    path = tmp_path_factory.mktemp("struck") / "run"
    with TrainerRun(path, steps=100_000, groups=3, forked=True, **KEYS) as run:
        run.start_all(host_args=SLOWLY)
        supervised = Supervised(run)
        supervised.wait_all_in()
        while lacking := [phase for phase in POINTS if hits[phase] < KILLS]:
            assert turns.total() < MAX_STRIKES, hits
            phase = min(lacking, key=lambda p: hits[p])
            died_in = strike(run, phase, turns[phase], rng)
            turns[phase] += 1
            hits[died_in] += 1
            supervised.wait_all_in()  # perhaps of steps before the kill: the next one may overlap
        supervised.wait_all_in(len(run.metrics()) + 2)
        end_after(run, 10)
        yield run, hits
    assert left_over(run) == []
    print(f"kills by phase: {dict(hits)}")


@pytest.mark.row("G11")
@pytest.mark.row("G3")
def test_history_is_each_sample_once_through_kills_in_every_phase(struck, capsys):
    run, hits = struck
    assert all(hits[phase] >= KILLS for phase in POINTS), hits
    assert cli.main(["report", "--ledger", str(run.run.path)]) == 0
    told = capsys.readouterr().out
    print(f"kills by phase: {dict(hits)}\n{told}")
    assert "accounts   hold" in told
    report = LedgerReport.of(run.run.journal)
    trained = [c.batch_id for c in report.audit.history]
    assert trained == list(range(1, len(trained) + 1))
    assert set(report.shares) == {"trainer-0", "trainer-1", "trainer-2"}
    counts = report.audit.counts
    assert counts["trained"] == sum(counts.values())  # none is pending, none was dropped


@pytest.mark.scenario("O-2")
def test_each_refused_step_is_told_with_the_group_that_failed(struck):
    run, _ = struck
    events = list(read_events(run.run.events))
    refused = [e for e in events if e.kind is Kind.REFUSE]
    assert refused and all(e.cause for e in refused)
    told, steps = Notices(), {e.step for e in refused}
    groups = {"trainer-0", "trainer-1", "trainer-2"}
    nameless = set()
    for step in steps:
        # The ledger may not know yet that a process is dead; the next quorum does.
        of_step = [e.data for e in events if e.step == step]
        named = [n for data in of_step for n in (*data.get("failing", ()), *data.get("left", ()))]
        if not set(named) & groups:
            nameless.add(step)
    # Only of a quorum with a dead process whose successor is up by the time the others give up.
    reached = {e.step for e in refused if "timed out" in e.cause and "to connect" in e.cause}
    assert nameless <= reached and nameless < steps
    lines = Counter(
        e.step
        for e in events
        for text in told.of(json.loads(e.to_line()))
        if text.startswith(f"step {e.step} refused")
    )
    assert lines and max(lines.values()) == 1


@pytest.mark.row("G3")
def test_all_lives_of_all_groups_held_the_same(struck):
    """Of the steps that still count, all that any life of any group held."""
    run, _ = struck
    history = LedgerReport.of(run.run.journal).audit.history
    lives = {c.token: [] for c in history}
    for group in range(3):
        for line in run.probes(group):
            lives.get(line["token"], []).append({**line, "draws": None})
    assert all(len(lives[c.token]) >= c.participants - 1 for c in history)  # a victim tells nothing
    assert all(line == lines[0] for lines in lives.values() for line in lines)
    assert any(len(lives[c.token]) == 3 for c in history[-10:])


@pytest.mark.row("G11")
def test_parameters_are_those_of_an_undisturbed_run_on_the_same_batches(struck, tmp_path):
    run, _ = struck
    calm = undisturbed(tmp_path / "calm", LedgerReport.of(run.run.journal), groups=3)
    here, there = parameters(run), parameters(calm)
    start = load_file(run.run.model / "model.safetensors")
    first = np.concatenate([start[k].astype(np.float64).ravel() for k in sorted(start)])
    gap = np.linalg.norm(here - there) / np.linalg.norm(there)
    moved = np.linalg.norm(here - there) / np.linalg.norm(there - first)
    print(f"relative difference {gap:.2e}, of the way that training went {moved:.2e}")
    assert np.linalg.norm(there - first) / np.linalg.norm(first) > 1e-3  # it did learn
    assert gap < 1e-5


@pytest.mark.row("G2")
@pytest.mark.row("G11")
def test_bitwise_where_the_number_of_groups_never_changed(tmp_path):
    """Below `min_replica_size` nobody trains, so every step has two groups."""
    both = {"fault_tolerance__min_replica_size": 2}
    rng, died = random.Random(5), []
    with TrainerRun(tmp_path / "run", steps=100_000, groups=2, forked=True, **KEYS, **both) as run:
        run.start_all(host_args=SLOWLY)
        supervised = Supervised(run)
        supervised.wait_all_in()
        for phase in POINTS:
            at = len(run.metrics())
            died.append(strike(run, phase, 0, rng))
            supervised.wait_all_in(at + 3)
        end_after(run, 5)
    report = LedgerReport.of(run.run.journal)
    assert report.audit.problems == [] and len(died) == len(POINTS)
    assert {c.participants for c in report.audit.history} == {2}
    calm = undisturbed(tmp_path / "calm", report, groups=2, **both)
    assert np.array_equal(parameters(run), parameters(calm))


def held(run: TrainerRun, group: int) -> dict[int, dict]:
    """What a group held after each step, apart from the names that a history gives and what
    generators draw between steps."""
    return {
        step: {k: v for k, v in line.items() if k not in ("token", "manager_step", "draws")}
        for step, line in run.probe(group).items()
    }


def die_after(run: TrainerRun, step: int) -> None:
    """Start everything; both groups are killed once they have trained `step`, then the rest."""
    run.start("host", "lighthouse", host_args=SLOWLY)
    for group in (0, 1):
        run.order(group, "quorum", act="kill", step=step + 1)
    run.start("trainer-0", "trainer-1")
    for group in (0, 1):
        first = run.processes[f"trainer-{group}"][0]
        run.wait_for(lambda r=first: r.poll() is not None, f"the kill of group {group}")
        assert first.returncode == -signal.SIGKILL, run.logs()
    for name in list(run.processes):  # other ranks too, as their launcher would have it
        run.kill(name)


@pytest.mark.row("E6")
@pytest.mark.parametrize("trained", [0, 3])
def test_without_a_checkpoint_the_journal_is_replayed_from_the_initial_weights(tmp_path, trained):
    keys = {"fault_tolerance__min_replica_size": 2, "checkpoint__interval": 5}
    with TrainerRun(tmp_path / "run", steps=12, groups=2, forked=True, **keys) as run:
        die_after(run, trained)
        before, held_before = LedgerReport.of(run.run.journal), held(run, 1)
        sealed = {e["data"]["batch"]: e["data"]["digest"] for e in run.events("seal")}
        assert len(before.audit.history) == trained < len(sealed)
        run.start_all()
        for group in (0, 1):
            assert run.wait_exit(f"trainer-{group}") == [0], run.logs()
    after = LedgerReport.of(run.run.journal)
    assert after.audit.ok and len(after.audit.history) == 12
    again = range(1, trained + 1)
    assert [(s.step, s.to_step) for s in after.superseded] == [(step, 0) for step in again]
    digests = [c.digest for c in after.audit.history]
    assert digests[: len(sealed)] == list(sealed.values())
    assert all(held(run, 0)[step] == held_before[step] for step in again)
    assert not run.events("restore")


@pytest.mark.row("E6")
@pytest.mark.row("E9")
@pytest.mark.row("F10")
@pytest.mark.scenario("C-1")
def test_everything_resumes_from_one_step_whatever_else_is_there(tmp_path):
    """The journal is written every step, checkpoints every five. All die after step 8. Newer
    folders that nobody committed, and keys that name another checkpoint, change nothing."""
    keys = {"fault_tolerance__min_replica_size": 2, "checkpoint__interval": 5}
    keys |= {"checkpoint__keep_latest_k": 2}
    with TrainerRun(tmp_path / "run", steps=30, groups=2, forked=True, **keys) as run:
        die_after(run, 8)
        before = LedgerReport.of(run.run.journal)
        assert [c.step for c in before.audit.history] == list(range(1, 9))
        held_before = held(run, 0)

        (saved,) = (run.run.path / "checkpoint").glob("step-5-*")
        committed, fifth = read_marker(saved), before.audit.history[4]
        assert (committed.step, committed.token) == (5, fifth.token)
        assert committed.batch == {"id": fifth.batch_id, "digest": fifth.digest}
        published = {e["version"]: e["step"] for e in run.events("publish")}
        assert published[committed.policy_version] in (4, 5)  # as the save began
        for name, marked in (("step-9-00000000", True), ("step-8-11111111", False)):
            shutil.copytree(saved, saved.with_name(name))
            marker = saved.with_name(name) / MARKER
            told = json.loads(marker.read_text()) | {"step": 9, "token": "0" * 32}
            marker.write_text(json.dumps(told)) if marked else marker.unlink()
        run.set(
            checkpoint__load_step=9,
            checkpoint__initial_load_path=str(saved.with_name("step-9-00000000")),
        )
        run.start_all()
        for group in (0, 1):
            assert run.wait_exit(f"trainer-{group}") == [0], run.logs()

    assert {e["step"] for e in run.events("restore")} == {5}
    after = LedgerReport.of(run.run.journal)
    assert after.audit.ok and len(after.audit.history) == 30
    assert [(s.step, s.to_step) for s in after.superseded] == [(6, 5), (7, 5), (8, 5)]
    digests = [c.digest for c in after.audit.history]
    assert digests[:8] == [c.digest for c in before.audit.history]
    for step in (6, 7, 8):  # parameters, optimizer, LR and scheduler: bit by bit
        assert held(run, 0)[step] == held_before[step] == held(run, 1)[step]
    complete = [m.parent.name for m in (run.run.path / "checkpoint").glob(f"step-*/{MARKER}")]
    ours = [name for name in complete if name != "step-9-00000000"]
    assert len(ours) <= 2 and any(name.startswith("step-30-") for name in ours)


@pytest.mark.scenario("C-3")
@pytest.mark.row("E6")
def test_two_groups_of_two_ranks_go_on_as_three_of_one(tmp_path):
    """The cursor is the journal's, of no group or rank: each sample once, whoever is there."""
    keys = {"fault_tolerance__min_replica_size": 2, "checkpoint__interval": 5}
    with TrainerRun(tmp_path / "run", steps=12, groups=2, ranks=2, forked=True, **keys) as run:
        die_after(run, 8)
        before = LedgerReport.of(run.run.journal)
        run.set(
            fault_tolerance__replica_groups=3,
            fault_tolerance__ranks_per_group=1,
            fault_tolerance__min_replica_size=3,
        )
        run.groups, run.ranks = 3, 1
        run.start_all()
        for group in range(3):
            assert run.wait_exit(f"trainer-{group}") == [0], run.logs()
    after = LedgerReport.of(run.run.journal)
    assert after.audit.ok and after.audit.counts["trained"] == sum(after.audit.counts.values())
    assert [c.batch_id for c in after.audit.history] == list(range(1, 13))
    assert [c.participants for c in after.audit.history] == [2] * 5 + [3] * 7
    digests = [c.digest for c in after.audit.history]
    assert digests[:8] == [c.digest for c in before.audit.history]
    assert {e["step"] for e in run.events("restore")} == {5}
    assert set(after.shares) == {"trainer-0", "trainer-1", "trainer-2"}
