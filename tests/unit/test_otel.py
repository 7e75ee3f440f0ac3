"""What a process exports by OTLP, and that a receiver which fails costs one warning."""

import json
import logging
import socket
import threading
import time
from types import SimpleNamespace

import pytest
from fakes.otlp_receiver import OtlpReceiver

from torchtitan_rl_ft.observability import exporter as exporter_module
from torchtitan_rl_ft.observability import otel
from torchtitan_rl_ft.observability.events import EventList, EventLog, Kind, read_events
from torchtitan_rl_ft.observability.exporter import Exporter, NotTaken

TOKEN = "the-secret-of-the-run"


def settings(endpoint, interval_s=0.02):
    return SimpleNamespace(endpoint=endpoint, export_interval_s=interval_s, service_name="job")


def wait_for(condition, what):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


AT_THE_END_S = exporter_module.CLOSE_TIMEOUT_S


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """The side thread imports OpenTelemetry first, which takes a busy machine its time."""
    monkeypatch.setattr(exporter_module, "CLOSE_TIMEOUT_S", 40.0)


@pytest.fixture
def receiver():
    with OtlpReceiver() as it:
        yield it


@pytest.fixture
def start(tmp_path):
    logs = []

    def begin(endpoint, role="rollout", name="rollout", **more):
        log = EventLog(tmp_path / "events.jsonl", run="run-1", role=role, name=name)
        logs.append((log, otel.export_events(log, settings(endpoint, **more), TOKEN)))
        return logs[-1]

    yield begin
    for _, exporter in logs:
        if exporter is not None:
            exporter.close()


def test_nothing_is_exported_without_an_endpoint(start):
    assert start("")[1] is None


def test_each_event_is_a_log_record(start, receiver):
    log, _ = start(receiver.endpoint)
    log.emit(Kind.SEAL, step=3, batch=7, digest="ab", groups=[1, 2])
    log.emit(Kind.FAULT, cause="a disk is full", subject="rollout")
    log.close()
    seal, fault = receiver.logs
    assert seal.name == "rl_ft.seal"
    assert seal.attributes == {
        "kind": "seal", "step": 3, "batch": 7, "digest": "ab", "groups": "[1, 2]"
    }  # fmt: skip
    assert seal.resource["service.name"] == "job"
    assert seal.resource["rl_ft.run"] == "run-1" and seal.resource["rl_ft.role"] == "rollout"
    assert fault.raw.severity_text == "ERROR"
    assert fault.raw.body.string_value == "fault a disk is full"
    assert seal.raw.trace_id and not fault.raw.trace_id


def test_spans_of_all_roles_for_a_step_meet_in_its_trace(start, receiver):
    rollout, _ = start(receiver.endpoint)
    trainer, _ = start(receiver.endpoint, role="trainer", name="trainer-1")
    serving, _ = start(receiver.endpoint, role="serving", name="serving")
    rollout.emit(Kind.ISSUE, groups=2, first=1, last=2)
    for phase in ("quorum", "forward_backward", "optimizer"):
        trainer.emit(Kind.PHASE, phase=phase, step=1)
    rollout.emit(Kind.ACCEPT, group=1, version=1)
    rollout.emit(Kind.DROP, group=2, cause="equal rewards")
    rollout.emit(Kind.COMMIT, step=1, batch=1, participants=2)
    trainer.emit(Kind.PHASE, phase="report", step=2)
    trainer.emit(Kind.PHASE, phase="publish", step=2)
    serving.emit(Kind.PUBLISH, step=1, version=2)
    serving.emit(Kind.INSTALL, step=1, version=2, subject="engine-0", slot=0)
    for log in (rollout, trainer, serving):
        log.close()
    spans = {s.name: s for s in receiver.spans}
    step, train, install = spans["step"], spans["train"], spans["install"]
    assert {s.raw.trace_id for s in (step, train, install)} == {step.raw.trace_id}
    assert train.raw.parent_span_id == install.raw.parent_span_id == step.raw.span_id
    assert spans["forward_backward"].raw.parent_span_id == train.raw.span_id
    assert train.attributes["of"] == "trainer-1" and "publish" in spans
    groups = {s.attributes["group"]: s.raw for s in receiver.spans if s.name == "rollout"}
    assert groups[1].trace_id != groups[2].trace_id
    assert groups[2].status.message == "equal rewards"
    assert all(s.raw.end_time_unix_nano >= s.raw.start_time_unix_nano for s in receiver.spans)


def test_metrics_are_gauges_at_the_time_of_their_commit(tmp_path, receiver):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "loss": 9.0}) + "\n")  # of an earlier life
    log = EventLog(tmp_path / "events.jsonl", run="run-1", role="rollout", name="rollout")
    otel.export_events(log, settings(receiver.endpoint), TOKEN, metrics=path)
    log.emit(Kind.COMMIT, step=2)
    with open(path, "a") as f:
        f.write(json.dumps({"step": 2, "loss": 0.5, "time/step_s": 1.25, "lr": None}) + "\n")
    log.close()
    points = {p.name: p for p in receiver.points}
    assert points["rl_ft_loss"].raw.as_double == 0.5
    assert points["rl_ft_time_step_seconds"].raw.as_double == 1.25
    assert points["rl_ft_loss"].attributes == {"step": 2} and len(receiver.points) == 3
    [commit] = [e for e in read_events(tmp_path / "events.jsonl") if e.kind is Kind.COMMIT]
    assert points["rl_ft_loss"].raw.time_unix_nano == int(commit.wall_s * 1e9)


def test_secrets_are_never_exported(start, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20abcdef")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    log, _ = start(receiver.endpoint)
    log.emit(Kind.WARN, cause=f"refused: {TOKEN}", env={"HF_TOKEN": "hf_0123456789"})
    log.emit(Kind.DROP, group=1, cause=f"hf_0123456789 and {TOKEN}")
    log.close()
    sent = b"".join(receiver.bodies)
    assert b"(hidden)" in sent
    assert TOKEN.encode() not in sent and b"hf_0123456789" not in sent


@pytest.mark.row("K2")
def test_torchft_streams_reach_the_same_endpoint(start, receiver):
    log, exporter = start(receiver.endpoint, role="trainer", name="trainer-0")
    otel.forward_torchft(exporter)
    extra = {"replica_id": "torchtitan_ft_00000:x", "rank": 0, "quorum_id": 4, "step": 7}
    try:
        logging.getLogger("torchft_quorums").info("", extra=extra)
        logging.getLogger("torchft_errors").info("", extra={**extra, "error": "abort"})
    finally:
        for name in otel.TORCHFT_STREAMS:
            stream = logging.getLogger(name)
            for handler in [h for h in stream.handlers if isinstance(h, otel._Forward)]:
                stream.removeHandler(handler)
            stream.propagate = True
            stream.setLevel(logging.NOTSET)
    log.close()
    quorum, error = receiver.logs
    assert quorum.name == "torchft_quorums" and error.name == "torchft_errors"
    assert quorum.attributes == extra and error.attributes["error"] == "abort"


def test_a_fault_is_a_span_with_its_phases_when_it_is_over(tmp_path, receiver):
    path = tmp_path / "events.jsonl"
    supervisor = EventLog(path, run="run-1", role="supervisor", name="supervisor")
    otel.export_events(supervisor, settings(receiver.endpoint), TOKEN, all_events=path)
    serving = EventLog(path, run="run-1", role="serving", name="serving")
    supervisor.emit(Kind.RUN, phase="start")
    serving.emit(Kind.FAULT, cause="no answer in 3 s", subject="engine-1")
    time.sleep(0.02)
    serving.emit(Kind.EXIT, phase="fault", cause="killed by SIGKILL", subject="engine-1")
    wait_for(lambda: len(receiver.logs) >= 1, "the start")
    assert not receiver.spans
    serving.emit(Kind.SPAWN, subject="engine-1", pid=1)
    serving.emit(Kind.READY, subject="engine-1")
    for old, new in (("starting", "stale"), ("stale", "installing"), ("installing", "serving")):
        serving.emit(Kind.TRANSITION, subject="engine-1", old=old, new=new)
    wait_for(lambda: receiver.spans, "the recovery")
    supervisor.close()
    recovery, *phases = receiver.spans
    assert recovery.name == "recovery" and recovery.attributes["of"] == "engine-1"
    assert "no answer" in recovery.raw.status.message
    assert phases and {p.raw.parent_span_id for p in phases} == {recovery.raw.span_id}
    took = [s.raw.end_time_unix_nano - s.raw.start_time_unix_nano for s in phases]
    whole = recovery.raw.end_time_unix_nano - recovery.raw.start_time_unix_nano
    assert abs(sum(took) - whole) < 1e6


# Receivers that fail ------------------------------------------------------------------------


@pytest.fixture
def silent():
    """Takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"http://127.0.0.1:{port}"


@pytest.fixture
def garbage():
    """Speaks no TLS where TLS is spoken."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"\x00garbage" * 100)

        threading.Thread(target=answer, daemon=True).start()
        yield f"https://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def failing(receiver):
    receiver.status = 500
    return receiver.endpoint


@pytest.mark.parametrize("kind", ["silent", "refused", "garbage", "failing"])
def test_a_receiver_that_fails_costs_one_warning(
    kind, start, request, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(otel, "REQUEST_TIMEOUT_S", 0.3)
    monkeypatch.setattr(exporter_module, "QUEUE_LIMIT", 50)
    endpoint = request.getfixturevalue(kind)
    log, exporter = start(endpoint)
    log.emit(Kind.READY, url="http://127.0.0.1:1")
    wait_for(lambda: exporter._failures, "a failure")
    began_s = time.monotonic()
    for group in range(1000):
        log.emit(Kind.ACCEPT, group=group)
    told_s = time.monotonic() - began_s
    wait_for(lambda: exporter._failures > 1, "another failure")
    began_s = time.monotonic()
    log.close()
    assert time.monotonic() - began_s < 10  # no retries at the end of a role
    warnings = [e for e in read_events(tmp_path / "events.jsonl") if e.kind is Kind.WARN]
    assert len(warnings) == 1 and endpoint in warnings[0].cause, warnings
    assert len(warnings[0].cause) < 250 and "object at" not in warnings[0].cause, warnings
    assert told_s < 5 and exporter.dropped > 800
    assert capfd.readouterr() == ("", ""), "lines of the exporter itself"


def test_the_end_of_a_role_waits_for_a_slow_receiver_a_moment(start, receiver, monkeypatch):
    monkeypatch.setattr(exporter_module, "CLOSE_TIMEOUT_S", AT_THE_END_S)
    receiver.delay_s = 30
    log, _ = start(receiver.endpoint)
    log.emit(Kind.READY)
    began_s = time.monotonic()
    log.close()
    assert 0.5 < time.monotonic() - began_s < 15  # the receiver takes 30


def test_what_waited_for_a_receiver_reaches_it_once(start, receiver):
    receiver.status = 503
    log, exporter = start(receiver.endpoint)
    for group in range(3):
        log.emit(Kind.ACCEPT, group=group)
    wait_for(lambda: exporter._failures, "a failure")
    receiver.status = 200
    wait_for(lambda: len(receiver.logs) >= 3, "the records")
    log.close()
    assert [r.attributes["group"] for r in receiver.logs if "group" in r.attributes] == [0, 1, 2]
    assert sum(r.name == "rl_ft.warn" for r in receiver.logs) == 1


def test_what_the_receiver_will_never_take_is_dropped(tmp_path):
    sent, events = [], EventList()

    class Picky:
        def send(self, sort, items):
            sent.append(items)
            return NotTaken("400", final=True) if len(sent) == 1 else None

    exporter = Exporter(events, Picky, receiver="it", interval_s=0.01)
    exporter.start()
    log = EventLog(tmp_path / "events.jsonl", run="r", role="serving", name="serving")
    log.listen(exporter)
    log.emit(Kind.READY)
    wait_for(lambda: exporter.dropped == 1, "the drop")
    log.emit(Kind.STOP)
    wait_for(lambda: len(sent) == 2, "the next one")
    log.close()
    assert [item.kind for item in sent[1]] == [Kind.STOP]
    assert len(events.events) == 1


def test_a_receiver_of_traces_alone_gets_them(start, receiver):
    """It knows no other route: Jaeger is one."""
    receiver.routes = ("/v1/traces",)
    log, exporter = start(receiver.endpoint)
    log.emit(Kind.COMMIT, step=1)
    wait_for(lambda: exporter.dropped, "a refusal")
    log.emit(Kind.COMMIT, step=2)
    log.close()
    assert [s.attributes["step"] for s in receiver.spans] == [1, 2]
    assert receiver.logs == [] and not exporter._failures


def test_what_cannot_be_exported_is_dropped_and_holds_up_nothing(tmp_path):
    """Whatever a library raises, what comes later is sent."""
    sent, events = [], EventList()

    class Broken:
        def send(self, sort, items):
            sent.append((sort, items))
            if len(sent) == 1:
                raise KeyError("of a library")

    exporter = Exporter(events, Broken, receiver="it", interval_s=0.01)
    exporter.start()
    log = EventLog(tmp_path / "events.jsonl", run="r", role="rollout", name="rollout")
    log.listen(exporter)
    log.emit(Kind.COMMIT, step=1)
    wait_for(lambda: exporter.dropped == 1, "the drop")
    log.emit(Kind.STOP)
    log.close()
    assert [sort for sort, _ in sent].count("traces") == 1
    assert [i.kind for sort, items in sent[1:] if sort == "logs" for i in items] == [Kind.STOP]
    assert len(events.events) == 1 and "KeyError" in events.events[0]["cause"]


def test_values_that_opentelemetry_does_not_know_are_told_as_text(start, receiver):
    log, exporter = start(receiver.endpoint)
    log.emit(Kind.WARN, cause="no file \udcff.py", seed=2**70, small=-(2**63), ok=True)
    log.close()
    [warn] = receiver.logs
    assert warn.attributes["seed"] == str(2**70) and warn.attributes["small"] == -(2**63)
    assert warn.attributes["cause"] == "no file ?.py" and exporter.dropped == 0


def test_records_for_which_no_request_was_made_are_not_tried_again():
    told = otel._Complaints()
    told.handle(logging.makeLogRecord({"msg": "Dropping log batch: %d bytes", "args": (7,)}))
    assert told.not_taken().final
    told.handle(logging.makeLogRecord({"msg": "Transient error %s encountered", "args": ("x",)}))
    assert not told.not_taken().final


def test_whatever_breaks_the_export_is_one_warning(tmp_path):
    log = EventLog(tmp_path / "events.jsonl", run="r", role="rollout", name="rollout")
    exporter = Exporter(log, lambda: 1 / 0, receiver="it", interval_s=0.01)
    log.listen(exporter)
    exporter.start()
    wait_for(lambda: list(read_events(tmp_path / "events.jsonl")), "no warning")
    log.emit(Kind.STOP)
    log.close()
    warning, _ = read_events(tmp_path / "events.jsonl")
    assert "ZeroDivisionError" in warning.cause and "The run goes on; nothing more" in warning.cause
