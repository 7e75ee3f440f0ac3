"""A whole job with everything that shows it switched on: each role exports, TensorBoard and W&B
are written, trainer and engine are profiled; and the same with a collector that is not there."""

from pathlib import Path

import pytest
from conftest import fake_engine_program
from fakes.otlp_receiver import OtlpReceiver
from job_run import Job
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from torchtitan_rl_ft.host.ports import free_port
from torchtitan_rl_ft.observability.events import Kind

pytestmark = pytest.mark.timeout(240)

STEPS = 4
ROLES = {"supervisor", "lighthouse", "serving", "rollout", "trainer-0"}


def run(path: Path, endpoint: str, *overrides: str) -> Job:
    job = Job(path / "run")
    job.env.pop("WANDB_MODE", None)
    with job:
        job.start(
            *("--rollout.engines", "1", "--rollout.engine_python", fake_engine_program(path)),
            *("--fault_tolerance.replica_groups", "1", "--training.steps", str(STEPS)),
            *("--otel.endpoint", endpoint, "--otel.export_interval_s", "0.5", *overrides),
        )
        assert job.end(timeout_s=180) == 0, job.err()
    return job


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    path = tmp_path_factory.mktemp("observed")
    with OtlpReceiver() as receiver:
        job = run(
            path,
            receiver.endpoint,
            *("--metrics.enable_tensorboard", "--metrics.enable_wandb"),
            *("--observability.profile_steps", "2-3", "--observability.profile_engines"),
        )
    return job, receiver


def test_each_role_exports_its_events_and_spans(observed):
    job, receiver = observed
    told = {(r.resource["rl_ft.name"], r.attributes["kind"]) for r in receiver.logs if _ours(r)}
    assert {name for name, _ in told} == ROLES
    written = {(e.name, str(e.kind)) for e in job.events() if e.name in ROLES}
    assert told == written
    spans = {(s.resource["rl_ft.name"], s.name) for s in receiver.spans}
    assert {("rollout", "step"), ("rollout", "rollout"), ("trainer-0", "train")} <= spans
    assert {("trainer-0", "publish"), ("serving", "install")} <= spans
    steps = {s.attributes["step"]: s.raw for s in receiver.spans if s.name == "step"}
    assert sorted(steps) == list(range(1, STEPS + 1))
    losses = {p.attributes["step"]: p.raw for p in receiver.points if p.name == "rl_ft_loss"}
    assert {step: p.as_double for step, p in losses.items()} == {
        line["step"]: line["loss"] for line in job.metrics()
    }


def _ours(record) -> bool:
    return record.name.startswith("rl_ft.")


def test_the_token_of_the_run_is_not_exported(observed):
    job, receiver = observed
    secrets = [p.read_bytes().strip() for p in job.state.rglob("*token*") if p.is_file()]
    assert not any(secret in body for secret in secrets for body in receiver.bodies)
    assert not any(b"Bearer" in body for body in receiver.bodies)


def test_tensorboard_and_wandb_hold_each_step_once(observed):
    job, _ = observed
    shown = EventAccumulator(str(job.folder.path / "tb"), size_guidance={"scalars": 0})
    shown.Reload()
    rewards = [(s.step, s.value) for s in shown.Scalars("reward/mean")]
    expected = [(m["step"], m["reward/mean"]) for m in job.metrics()]
    assert [s for s, _ in rewards] == [s for s, _ in expected]
    assert [v for _, v in rewards] == pytest.approx([v for _, v in expected])
    assert len(list((job.folder.path / "wandb").glob("offline-run-*/run-*.wandb"))) == 1
    assert not [e for e in job.events(Kind.WARN) if "lacks metrics" in str(e.cause)]


def test_trainer_and_engine_are_profiled_in_these_steps(observed):
    job, _ = observed
    found = [p.relative_to(job.folder.profiles) for p in job.folder.profiles.rglob("*.json.gz")]
    trainers = sorted(str(p) for p in found if p.parts[0].startswith("step_"))
    assert trainers == [f"step_{k}/trainer-0.0.json.gz" for k in (2, 3)]
    [engine] = [p for p in found if p.parts[0] == "engines_2-3"]
    assert engine.name == "engine-0-TP-0.trace.json.gz"


def test_a_collector_that_is_not_there_costs_a_warning_and_nothing_else(tmp_path):
    job = run(tmp_path, f"http://127.0.0.1:{free_port()}")
    assert len(job.metrics()) == STEPS and job.audit().ok
    warnings = [e.name for e in job.events(Kind.WARN) if "OpenTelemetry" in str(e.cause)]
    assert "supervisor" in warnings and len(warnings) == len(set(warnings))
    logs = "".join(p.read_text() for p in (job.folder.path / "logs").rglob("*.log"))
    assert "Failed to export" not in logs and "Transient error" not in logs
    finished = [e for e in job.events(Kind.EXIT) if e.data.get("subject") in ROLES]
    assert not [e for e in finished if e.phase == "fault"]
