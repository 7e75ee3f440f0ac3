"""What real trainer groups show of themselves: OpenTelemetry with torchft's own streams, flight
records by quorum, profiles of steps. One run, in which a group is killed."""

import pickle

import pytest
from fakes.otlp_receiver import OtlpReceiver
from trainer_run import TOKEN, TrainerRun, steps_of

from torchtitan_rl_ft.host.ports import free_port

STEPS = 8
KILLED_AT = 4


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    """(run, receiver) after its end: trainer-1 was killed in a sum and came back."""
    path = tmp_path_factory.mktemp("observed") / "run"
    with OtlpReceiver() as receiver:
        keys = {
            "otel__endpoint": receiver.endpoint,
            "otel__export_interval_s": 0.2,
            "observability__profile_steps": "2-3",
            "comm__trace_buf_size": 200,
        }
        with TrainerRun(path, steps=STEPS, groups=2, forked=True, **keys) as run:
            pause = run.run.path / "pause-host"  # until both are there: they begin together
            pause.touch()
            run.start_all()
            names = {"trainer-0", "trainer-1"}
            run.wait_for(lambda: {e["name"] for e in waiting(run)} == names, "both groups")
            pause.unlink()
            run.kill_at(1, "reduce", step=KILLED_AT)
            run.start("trainer-1")
            assert run.wait_exit("trainer-0") == [0], run.logs()
            assert run.wait_exit("trainer-1") == [0], run.logs()
        yield run, receiver


def waiting(run):
    return [e for e in run.events("phase") if e["phase"] == "waiting_for_batch"]


@pytest.mark.row("K2")
@pytest.mark.timeout(240)
def test_each_quorum_is_a_record_with_id_step_and_members(observed):
    run, receiver = observed
    told = [e["data"] | {"step": e["step"]} for e in run.events("quorum")]
    ids = list(dict.fromkeys(q["quorum_id"] for q in told))
    assert len(ids) >= 2 and ids == sorted(ids)
    assert all(q["participants"] == len(q["members"]) for q in told)
    assert [q["members"] for q in told if q["quorum_id"] == ids[0]][0] == [
        "torchtitan_ft_00000",
        "torchtitan_ft_00001",
    ]
    assert min(q["step"] for q in told if q["quorum_id"] == ids[1]) == KILLED_AT
    exported = {r.attributes["quorum_id"] for r in receiver.logs if r.name == "rl_ft.quorum"}
    assert exported >= set(ids)


@pytest.mark.row("K2")
@pytest.mark.timeout(240)
def test_torchft_streams_reach_the_collector(observed):
    _, receiver = observed
    streams = {name: [r for r in receiver.logs if r.name == name] for name in STREAMS}
    assert all(r.attributes["quorum_id"] >= 0 for r in streams["torchft_quorums"])
    commits = [r.attributes for r in streams["torchft_commits"]]
    assert {c["step"] for c in commits if c["commit_result"]} >= set(range(1, STEPS - 1))
    assert len(streams["torchft_quorums"]) >= 3  # two groups, and the survivor's next one


STREAMS = ("torchft_quorums", "torchft_commits", "torchft_errors")


@pytest.mark.row("K2")
@pytest.mark.timeout(240)
def test_the_survivor_kept_the_flight_record_of_the_quorum_that_broke(observed):
    run, _ = observed
    folder = run.run.path / "comm_traces" / "trainer-0" / "attempt_1"
    records = {f.parent.name: pickle.loads(f.read_bytes()) for f in folder.glob("quorum_*/rank_0")}
    broken = [e["data"]["quorum_id"] for e in run.events("quorum") if e["step"] == KILLED_AT]
    assert f"quorum_{broken[0]}" in records, (list(records), run.logs())
    assert records[f"quorum_{broken[0]}"]["entries"]


@pytest.mark.timeout(240)
def test_trainers_export_spans_and_no_secret(observed):
    _, receiver = observed
    of = {s.attributes["of"] for s in receiver.spans if s.name == "train"}
    assert of == {"trainer-0", "trainer-1"}
    train = next(s for s in receiver.spans if s.name == "train" and s.attributes["step"] == 2)
    phases = {s.name for s in receiver.spans if s.raw.parent_span_id == train.raw.span_id}
    assert {"quorum", "forward_backward", "reduce", "optimizer"} <= phases
    assert not any(TOKEN.encode() in body for body in receiver.bodies)


@pytest.mark.timeout(240)
def test_profiled_steps_have_a_trace_of_each_rank(observed):
    run, _ = observed
    found = sorted(
        p.relative_to(run.run.profiles).as_posix() for p in run.run.profiles.rglob("*.gz")
    )
    ranks = [f"trainer-{g}.0.json.gz" for g in range(2)]
    assert found == [f"step_{k}/{rank}" for k in (2, 3) for rank in ranks]


@pytest.mark.timeout(240)
def test_a_collector_that_is_not_there_costs_a_trainer_one_warning(tmp_path):
    endpoint = f"http://127.0.0.1:{free_port()}"
    keys = {"otel__endpoint": endpoint, "otel__export_interval_s": 0.2}
    with TrainerRun(tmp_path / "run", steps=3, groups=1, forked=True, **keys) as run:
        pause = run.run.path / "pause-host"
        pause.touch()
        run.start_all()
        run.wait_for(lambda: warnings(run), "the warning")
        pause.unlink()
        assert run.wait_exit("trainer-0") == [0], run.logs()
        assert steps_of(run) == [1, 2, 3]
        [warning] = warnings(run)
        assert endpoint in warning["cause"] and "refused" in warning["cause"]


def warnings(run):
    told = [e for e in run.events("warn") if e["name"] == "trainer-0"]
    return [e for e in told if "OpenTelemetry" in e["cause"]]
