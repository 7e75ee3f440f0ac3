"""TensorBoard and W&B: one line a step of the living history, whatever restarts and rewinds."""

import json
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.observability.metric_sinks import Follower, MetricSinks, standing
from torchtitan_rl_ft.observability.tensorboard_sink import TensorBoardSink
from torchtitan_rl_ft.observability.wandb_sink import WandbSink


class Run:
    """A run's metrics.jsonl, and one life of the rollout role after another."""

    def __init__(self, path):
        self.path, self.metrics, self.commit = path, path / "metrics.jsonl", 0

    def commits(self, *steps, mark=0.0):
        with open(self.metrics, "a") as f:
            for step in steps:
                self.commit += 1
                line = {"step": step, "commit": self.commit, "loss": step + mark, "lr": None}
                line |= {"reward/mean": 0.5, "tokens": 100, "time/step_s": 2.0, "batch": 7}
                f.write(json.dumps(line) + "\n")

    def tensorboard(self, **more):
        folder = self.path / "tb"
        make = lambda: TensorBoardSink(folder)  # noqa: E731
        return Follower(self.metrics, folder / ".written.json", make, **more)

    def shown(self, tag="loss_metrics/global_avg_loss"):
        read = EventAccumulator(str(self.path / "tb"), size_guidance={"scalars": 0})
        read.Reload()
        return [(s.step, s.value) for s in read.Scalars(tag)]


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_tensorboard_has_each_number_under_its_usual_name(run):
    run.commits(1, 2)
    life = run.tensorboard()
    life.follow()
    life.close()
    assert run.shown() == [(1, 1.0), (2, 2.0)]
    assert run.shown("reward/mean") == [(1, 0.5), (2, 0.5)]
    assert run.shown("throughput(tps)") == [(1, 50.0), (2, 50.0)]
    assert run.shown("time_metrics/end_to_end(s)") == [(1, 2.0), (2, 2.0)]


def test_a_restart_goes_on_and_repeats_nothing(run):
    run.commits(1, 2)
    run.tensorboard().follow()  # killed: not closed
    run.commits(3)
    life = run.tensorboard()
    life.follow()
    run.commits(4)
    life.follow()
    life.follow()
    life.close()
    assert run.shown() == [(s, float(s)) for s in (1, 2, 3, 4)]


def test_a_life_that_ended_before_it_noted_how_far_it_was_is_taken_back(run):
    run.commits(1, 2)
    run.tensorboard().follow()
    noted = (run.path / "tb/.written.json").read_bytes()
    run.commits(3, 4)
    run.tensorboard().follow()
    (run.path / "tb/.written.json").write_bytes(noted)
    life = run.tensorboard()
    life.follow()
    life.close()
    assert run.shown() == [(s, float(s)) for s in (1, 2, 3, 4)]


def test_what_a_rewind_undoes_is_not_shown(run):
    run.commits(1, 2, 3)
    life = run.tensorboard()
    life.follow()
    run.commits(2, 3, 4, mark=0.5)  # while it lives
    life.follow()
    life.close()
    assert run.shown() == [(1, 1.0), (2, 2.5), (3, 3.5), (4, 4.5)]
    run.commits(3, mark=0.25)  # and while nobody does
    life = run.tensorboard()
    life.follow()
    life.close()
    assert run.shown() == [(1, 1.0), (2, 2.5), (3, 3.25)]


def test_the_files_of_another_run_in_the_folder_are_not_gone_on_from(run):
    run.commits(1, 2, 3)
    run.tensorboard().follow()
    run.metrics.unlink()
    run.commits(1, mark=0.5)
    life = run.tensorboard()
    life.follow()
    life.close()
    assert run.shown() == [(1, 1.5)]


def test_log_freq_is_titans(run):
    run.commits(1, 2, 3, 4, 5, 6)
    life = run.tensorboard(log_freq=3)
    life.follow()
    life.close()
    assert [step for step, _ in run.shown()] == [1, 3, 6]


def test_a_sink_that_fails_is_one_warning_and_catches_up(run):
    events, failures = EventList(), [OSError(28, "No space left on device")] * 2

    class Full(TensorBoardSink):
        def flush(self):
            if failures:
                raise failures.pop()
            super().flush()

    folder = run.path / "tb"
    follower = Follower(run.metrics, folder / ".written.json", lambda: Full(folder))
    sinks = MetricSinks({"TensorBoard": follower}, events)
    sinks.start()
    run.commits(1)
    end = time.monotonic() + 20
    while failures and time.monotonic() < end:
        time.sleep(0.01)
    run.commits(2)
    sinks.close()
    assert [e["kind"] for e in events.events] == [Kind.WARN]
    assert "No space left" in events.events[0]["cause"]
    assert run.shown() == [(1, 1.0), (2, 2.0)]


def test_what_stands_of_a_history(run):
    run.commits(1, 2, 3, 2, 3, 1, 2)
    assert [line["commit"] for line in standing(run.metrics, 3)] == [6, 7]


class FakeWandb:
    """What of W&B the sink uses; each run as (id, mode, [(step, loss)])."""

    def __init__(self):
        self.runs = []
        self.Settings = dict

    def init(self, **given):
        lines = []
        self.runs.append((given["id"], given["mode"], lines))
        fake = type("FakeRun", (), {})()
        fake.log = lambda values, step: lines.append((step, values["loss_metrics/global_avg_loss"]))
        fake.finish = lambda: None
        return fake


@pytest.fixture
def wandb(monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    for name in ("WANDB_MODE", "WANDB_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    return fake


def test_wandb_runs_hold_one_history_each(run, wandb, monkeypatch):
    def life():
        make = lambda: WandbSink(run.path, {})  # noqa: E731
        return Follower(run.metrics, run.path / "wandb/.written.json", make)

    first = life()
    run.commits(1, 2, 3)
    first.follow()
    run.commits(2, mark=0.5)
    first.follow()
    monkeypatch.setenv("WANDB_MODE", "online")
    run.commits(3, mark=0.5)
    life().follow()
    (one, mode, lines), (two, _, after), (again, their, more) = wandb.runs
    assert mode == "offline" and lines == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert two == f"{one}-1" and after == [(1, 1.0), (2, 2.5)]
    assert again == two and their is None and more == [(3, 3.5)]


def offline_lines(folder):
    """(run id, step, loss) of each line in W&B's own files, in the order of writing."""
    from wandb.proto import wandb_internal_pb2

    found = []
    for file in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        run_id, data, at = "", file.read_bytes(), 7
        assert len(data) < 32768  # one block of a LevelDB log, perhaps still being written
        while at + 7 <= len(data):  # checksum, length, type 1 (whole)
            length = int.from_bytes(data[at + 4 : at + 6], "little")
            if at + 7 + length > len(data):
                break
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data[at + 7 : at + 7 + length])
            at += 7 + length
            if record.WhichOneof("record_type") == "run":
                run_id = record.run.run_id
            for item in [record.history.item] if record.HasField("history") else []:
                values = {i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in item}
                found.append((run_id, values["_step"], values["loss_metrics/global_avg_loss"]))
    return found


@pytest.mark.timeout(120)
def test_wandb_writes_its_offline_file(run, monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    sink = WandbSink(run.path, {"rl": {"seed": 1}})
    follower = Follower(run.metrics, run.path / "wandb/.written.json", lambda: sink)
    run.commits(1, 2)
    follower.follow()
    run.commits(2, mark=0.5)
    follower.follow()
    follower.close()
    wanted = [("mine", 1, 1.0), ("mine", 2, 2.0), ("mine-1", 1, 1.0), ("mine-1", 2, 2.5)]
    end_s = time.monotonic() + 60.0  # W&B's own process writes, a moment after the run is finished
    while offline_lines(run.path) != wanted and time.monotonic() < end_s:
        time.sleep(0.05)
    assert offline_lines(run.path) == wanted
