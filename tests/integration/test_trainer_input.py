"""Wrong input that only started trainers can find out: one error each, no training."""

import json
import shutil

import pytest
from trainer_run import TrainerRun

from torchtitan_rl_ft.exit_codes import ExitCode

pytestmark = pytest.mark.timeout(240)


def errors(run, log):
    lines = (run.run.path / log).read_text().splitlines()
    return [line for line in lines if line.startswith("torchtitan: error: ")]


def test_a_quorum_that_never_forms_ends_the_trainer_with_what_is_missing(tmp_path):
    keys = {
        "fault_tolerance__min_replica_size": 2,
        "fault_tolerance__quorum_timeout_s": 4,
        "fault_tolerance__quorum_retries": 1,
    }
    with TrainerRun(tmp_path / "run", steps=4, groups=2, **keys) as run:
        run.start("host", "lighthouse", "trainer-0")
        assert run.wait_exit("trainer-0", 120) == [ExitCode.FAILED], run.logs()
        (error,) = errors(run, "trainer-0.0.log")
        assert "no quorum within fault_tolerance.quorum_timeout_s = 4" in error
        assert "min_replica_size = 2" in error
        assert not run.metrics()


@pytest.mark.row("H4")
def test_ranks_that_see_different_checkpoint_folders_are_refused_with_both_paths(tmp_path):
    """Rank 1 is where the run folder is a copy, as on a host that does not mount it."""
    with TrainerRun(tmp_path / "run", steps=4, groups=1, ranks=2) as run:
        run.start("host", "lighthouse")
        copy = tmp_path / "copy"
        shutil.copytree(run.run.path, copy)
        config = copy / "config.resolved.json"
        resolved = json.loads(config.read_text())
        resolved["values"]["job"]["dump_folder"] = str(copy)
        config.write_text(json.dumps(resolved))
        run.rank_env[1] = {"TORCHTITAN_RL_FT_RUN": str(copy)}
        run.start("trainer-0")
        assert run.wait_exit("trainer-0", 120) == [ExitCode.CONFIG] * 2, run.logs()
        (error,) = errors(run, "trainer-0.0.log")
        assert "rank 0 and rank 1" in error
        assert f"{run.run.path}/checkpoint" in error and f"{copy}/checkpoint" in error
        assert not run.metrics()
