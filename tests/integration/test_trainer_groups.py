"""Replica groups of the real trainer on real torchft: exactly once, equal, healed, resumed."""

import signal

import numpy as np
import pytest
from safetensors.numpy import load_file
from trainer_run import TrainerRun, assert_groups_equal, steps_of

from torchtitan_rl_ft.journal.ledger_report import LedgerReport
from torchtitan_rl_ft.trainer.train_dumps import load_train_dump

pytestmark = pytest.mark.timeout(240)


TRAINED = "trained/{rollout_id}.safetensors"


@pytest.fixture(scope="module")
def two_groups(tmp_path_factory):
    """A finished run of two groups of one rank: inspected by several tests, yardstick of others."""
    keys = {"fault_tolerance__min_replica_size": 2, "rollout__save_debug_train_data": TRAINED}
    path = tmp_path_factory.mktemp("two_groups") / "run"
    with TrainerRun(path, steps=12, groups=2, forked=True, **keys) as run:
        run.env["PROBE_GRADIENTS"] = "1"
        run.start_all()
        assert run.wait_exit("trainer-0") == [0], run.logs()
        assert run.wait_exit("trainer-1") == [0], run.logs()
        yield run


def test_two_groups_train_each_batch_once_and_stay_bitwise_equal(two_groups):
    run = two_groups
    assert steps_of(run) == list(range(1, 13))
    assert all(m["participants"] == 2 for m in run.metrics())
    assert_groups_equal(run, (0, 1), at_least=12)
    assert not run.events("refuse")
    versions = [e["version"] for e in run.events("publish")]
    assert versions == sorted(set(versions))
    accounts = LedgerReport.of(run.run.journal)
    assert accounts.audit.problems == []
    samples = sum(c.samples for c in accounts.audit.history)
    shares = accounts.shares
    assert list(shares) == ["trainer-0", "trainer-1"] and samples > 100
    assert all(steps == 12 and 0.4 * samples < n < samples for steps, n, _ in shares.values())


def grad_norms(tmp_path, steps, groups, **keys):
    keys |= {"fault_tolerance__min_replica_size": groups, "rollout__save_debug_train_data": TRAINED}
    with TrainerRun(tmp_path / "run", steps=steps, groups=groups, forked=True, **keys) as run:
        run.env["PROBE_GRADIENTS"] = "1"
        run.start_all()
        for g in range(groups):
            assert run.wait_exit(f"trainer-{g}") == [0] * run.ranks, run.logs()
        assert all(m["participants"] == groups for m in run.metrics())
        return [m["grad_norm"] for m in run.metrics()]


@pytest.mark.row("J3")
def test_what_was_trained_is_dumped_once_per_committed_step(two_groups):
    commits = {e["step"]: e["data"] for e in two_groups.events("commit")}
    for row in two_groups.metrics():
        dump = trained(two_groups.run.path, row["step"])
        assert dump.token == commits[row["step"]]["token"]
        mask = dump.arrays["loss_mask"] > 0
        assert (dump.arrays["policy_logprobs"][mask] < 0).all()
        gap = np.abs(dump.arrays["policy_logprobs"] - dump.arrays["behaviour_logprobs"])[mask]
        assert gap.mean() == pytest.approx(row["logprob_diff/mean"], rel=1e-4)
        assert dump.arrays["ratio"][mask].mean() == pytest.approx(row["ratio/mean"], rel=1e-4)


@pytest.mark.row("J3")
@pytest.mark.parametrize(
    "shape",
    [
        {"groups": 1},
        {"groups": 3},
        {"groups": 2, "ranks": 2},
        {"groups": 1, "ranks": 2, "parallelism__tensor_parallel_degree": 2},
    ],
    ids=["one-group", "three-groups", "two-groups-fsdp-2", "tensor-parallel-2"],
)
def test_one_steps_gradient_does_not_depend_on_the_layout(two_groups, tmp_path, shape):
    """From equal parameters; summation order is all that differs."""
    (norm,) = grad_norms(tmp_path, 1, **shape)
    assert norm == pytest.approx(two_groups.metrics()[0]["grad_norm"], rel=1e-5)
    mine, theirs = gradient(tmp_path / "run"), gradient(two_groups.run.path)
    gap = np.linalg.norm(mine - theirs) / np.linalg.norm(theirs)
    print(f"relative difference of the gradient: {gap:.1e}")
    assert gap < 1e-5
    here, there = trained(tmp_path / "run", 1), trained(two_groups.run.path, 1)
    assert here.arrays["index"].tolist() == there.arrays["index"].tolist()
    for name in ("policy_logprobs", "ratio"):
        np.testing.assert_allclose(here.arrays[name], there.arrays[name], atol=1e-5)


def gradient(run_folder):
    """The whole gradient of step 1, as one vector, the same in all groups and ranks."""
    found = []
    for file in sorted(run_folder.glob("gradients-*-1.safetensors")):
        tensors = load_file(file)
        found.append(np.concatenate([tensors[k].ravel() for k in sorted(tensors)]))
    assert found and all(np.array_equal(found[0], other) for other in found)
    return found[0].astype(np.float64)


def trained(run_folder, step):
    return load_train_dump(run_folder / TRAINED.format(rollout_id=step))


@pytest.mark.row("G8")
def test_stop_and_resume_goes_on_with_the_same_batches(tmp_path):
    """All trainers and the ledger's process end; the checkpoint and the journal go on."""
    keys = {"fault_tolerance__min_replica_size": 2, "checkpoint__interval": 5}
    with TrainerRun(tmp_path / "run", steps=30, groups=2, **keys) as run:
        run.start_all(host_args=("--slow-s", "0.1"))
        run.wait_for(lambda: len(run.events("checkpoint")) >= 2, "two checkpoints")
        for name in ("trainer-0", "trainer-1", "host", "lighthouse"):
            run.kill(name, signal.SIGKILL)
        sealed = {e["data"]["batch"]: e["data"]["digest"] for e in run.events("seal")}
        before = {e["step"]: e["data"]["batch"] for e in run.events("commit")}
        run.start_all()
        assert run.wait_exit("trainer-0") == [0], run.logs()
        restored = {e["step"] for e in run.events("restore")}
        assert restored and max(restored) % 5 == 0 and max(restored) >= 5
        after = {e["step"]: e["data"]["batch"] for e in run.events("commit")}
        for step, batch in before.items():
            assert after[step] == batch
        again = {e["data"]["batch"]: e["data"]["digest"] for e in run.events("seal")}
        assert all(again[b] == d for b, d in sealed.items())
        lr = run.probe(0)
        assert lr[max(restored) + 1]["scheduler"]["last_epoch"] == max(restored) + 1


@pytest.mark.row("I1")
@pytest.mark.row("I2")
@pytest.mark.scenario("N-1")
def test_a_nan_is_committed_by_nobody_and_ends_the_run_by_its_own_code(tmp_path):
    with TrainerRun(tmp_path / "run", steps=12, groups=2, forked=True) as run:
        run.start_all(host_args=("--nan-step", "6"))
        codes = run.wait_exit("trainer-0") + run.wait_exit("trainer-1")
        assert 3 in codes and 0 not in codes, run.logs()
        assert max(steps_of(run)) == 5
        assert max(e["step"] for e in run.events("publish")) == 5
        assert all("finite" in e["cause"] for e in run.events("refuse"))


@pytest.mark.row("G4")
def test_a_sum_that_fails_on_one_rank_refuses_the_step_everywhere_once(tmp_path):
    """The run ends bit by bit as one in which nothing failed."""
    keys = {
        "fault_tolerance__min_replica_size": 2,
        "fault_tolerance__process_group_timeout_ms": 3000,
    }
    ends = []
    for name, fails in (("calm", False), ("disturbed", True)):
        path = tmp_path / name
        with TrainerRun(path, steps=8, groups=2, ranks=2, forked=True, **keys) as run:
            if fails:
                run.order(1, "allreduce", act="raise", rank=1, step=5)
            run.start_all()
            for group in (0, 1):
                assert run.wait_exit(f"trainer-{group}", 120) == [0, 0], run.logs()
            assert steps_of(run) == list(range(1, 9))
            for rank in (0, 1):
                assert_groups_equal(run, (0, 1), at_least=8, rank=rank)
            ends.append([run.probe(0, rank)[8]["parameters"] for rank in (0, 1)])
            refused = run.events("refuse")
            if fails:
                assert {(e["name"], e["step"]) for e in refused} == {
                    ("trainer-0", 5),
                    ("trainer-1", 5),
                }
                ids = {e["data"]["quorum_id"]: None for e in run.events("quorum") if e["step"] == 5}
                assert list(ids) == sorted(ids) and len(ids) == 2
                assert sum(e["step"] == 5 for e in run.events("commit")) == 1
                assert not run.events("heal"), "nobody had gone ahead"
            else:
                assert not refused
    assert ends[0] == ends[1]


def test_the_kl_term_is_zero_at_the_reference_and_grows_away_from_it(tmp_path):
    keys = {"rl__kl_coef": 0.1}
    with TrainerRun(tmp_path / "run", steps=4, groups=1, forked=True, **keys) as run:
        run.start_all()
        assert run.wait_exit("trainer-0") == [0], run.logs()
        kl = [m["kl/mean"] for m in run.metrics()]
        assert kl[0] == pytest.approx(0.0, abs=1e-9)
        assert kl[-1] > 1e-5
