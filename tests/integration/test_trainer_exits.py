"""Early ends of real trainers: at a step boundary, saved whole, gone on from."""

import json
import signal

import pytest
from torch.distributed.checkpoint import FileSystemReader
from trainer_run import TrainerRun, assert_each_step_once, steps_of

from torchtitan_rl_ft.journal.checkpoints import MARKER

pytestmark = pytest.mark.timeout(300)

REQUEUE = 75


def saved(run):
    """Steps of the complete checkpoints."""
    found = (run.run.path / "checkpoint").glob(f"step-*/{MARKER}")
    return sorted(json.loads(marker.read_bytes())["step"] for marker in found)


def parts_saved(run, step):
    (path,) = (run.run.path / "checkpoint").glob(f"step-{step}-*")
    names = FileSystemReader(str(path)).read_metadata().state_dict_metadata
    return {name.split(".")[0] for name in names}


@pytest.fixture(scope="module")
def two_lives(tmp_path_factory):
    """A group of two ranks: ended by SIGTERM to its second rank, then by the time limit while the
    clocks of that rank are wrong."""
    keys = {"checkpoint__last_save_model_only": True, "rollout__journal": False}
    keys |= {"checkpoint__interval": 2, "checkpoint__async_mode": "async"}
    keys |= {"recovery__exit_signal_handler": True}
    path = tmp_path_factory.mktemp("two_lives") / "run"
    with TrainerRun(path, steps=2000, groups=1, ranks=2, **keys) as run:
        run.start_all()
        run.wait_step(5)
        for _ in range(2):
            run.processes["trainer-0"][1].send_signal(signal.SIGTERM)
        run.first_codes = run.wait_exit("trainer-0")
        run.wait_exit("host")
        run.first_steps, run.first_saved = steps_of(run), saved(run)
        run.set(recovery__exit_duration_in_mins=0.1)
        run.rank_env[1] = {"PROBE_CLOCK_SKEW_S": "7200"}
        run.start("host", "trainer-0")
        run.second_codes = run.wait_exit("trainer-0")
        run.wait_exit("host")
        yield run


@pytest.mark.row("H1")
def test_sigterm_to_one_rank_ends_all_ranks_after_the_step_and_saves_it(two_lives):
    run = two_lives
    assert run.first_codes == [REQUEUE, REQUEUE], run.logs()
    last = run.first_steps[-1]
    assert run.first_steps == list(range(1, last + 1))
    assert run.first_saved[-1] == last
    (stop, *_) = run.events("stop")
    assert stop["step"] == last and "SIGTERM to trainer-0 (rank 1)" in stop["cause"]


@pytest.mark.row("H6")
def test_the_exit_checkpoint_is_whole_and_gone_on_from(two_lives):
    run = two_lives
    last = run.first_steps[-1]
    assert parts_saved(run, last) >= {"optimizer", "lr_scheduler", "train_state"}
    assert [e["step"] for e in run.events("restore")] == [last]
    assert_each_step_once(run)
    assert run.probe(0)[last + 1]["scheduler"]["last_epoch"] == last + 1


@pytest.mark.row("H2")
def test_the_time_limit_is_by_one_clock_whatever_the_ranks_say(two_lives):
    run = two_lives
    assert run.second_codes == [REQUEUE, REQUEUE], run.logs()
    last = steps_of(run)[-1]
    assert saved(run)[-1] == last > run.first_steps[-1]
    assert max(run.probe(0, rank=0)) == max(run.probe(0, rank=1)) == last
    assert "0.1 minutes" in run.events("stop")[-1]["cause"]


@pytest.mark.row("H3")
@pytest.mark.row("H5")
def test_stops_at_every_interval_go_on_as_if_uninterrupted(tmp_path):
    """The last one saves nothing: it ends by itself, and only that is switched off."""
    keys = {"recovery__disable_last_saving": True, "checkpoint__interval": 1000}
    with TrainerRun(tmp_path / "whole", steps=14, groups=1, **keys) as whole:
        whole.start_all()
        assert whole.wait_exit("trainer-0") == [0], whole.logs()
        assert steps_of(whole) == list(range(1, 15)) and saved(whole) == []
    with TrainerRun(
        tmp_path / "parts", steps=16, groups=1, recovery__exit_interval=7, **keys
    ) as run:
        run.start("lighthouse")
        for last in (7, 14):
            run.start("host", "trainer-0")
            assert run.wait_exit("trainer-0") == [REQUEUE], run.logs()
            run.wait_exit("host")
            assert steps_of(run)[-1] == saved(run)[-1] == last
        assert steps_of(run) == list(range(1, 15))
        for ours, theirs in zip(run.metrics(), whole.metrics(), strict=True):
            for name in ("loss", "grad_norm"):
                assert ours[name] == theirs[name], f"{name} of step {ours['step']}"
        assert run.probe(0)[14]["parameters"] == whole.probe(0)[14]["parameters"]


@pytest.mark.row("H1")
@pytest.mark.row("L2")
def test_one_group_leaves_at_a_boundary_and_comes_back_while_the_other_goes_on(tmp_path):
    """What a scheduler of per-group jobs does: it ends one with SIGTERM, and starts it again for
    its exit code."""
    keys = {"recovery__exit_signal_handler": True}
    with TrainerRun(tmp_path / "run", steps=4000, groups=2, **keys) as run:
        run.start_all()
        run.wait_for(lambda: run.metrics() and run.metrics()[-1]["participants"] == 2, "both")
        survivor = run.processes["trainer-0"][0].pid
        run.processes["trainer-1"][0].send_signal(signal.SIGTERM)
        assert run.wait_exit("trainer-1") == [REQUEUE], run.logs()
        assert saved(run) == []
        at = len(run.metrics())
        run.wait_step(at + 10)
        assert run.metrics()[-1]["participants"] == 1
        assert not run.events("refuse"), "it left between two steps"
        run.start("trainer-1")
        run.wait_for(lambda: run.metrics()[-1]["participants"] == 2, "the group's return")
        assert run.processes["trainer-0"][0].pid == survivor
        assert run.processes["trainer-0"][0].poll() is None
        assert_each_step_once(run)
        (left,) = run.events("stop")
        assert left["data"]["replica_id"] == 1
