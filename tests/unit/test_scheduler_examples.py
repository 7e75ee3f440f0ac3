"""The schedulers' examples: they parse, and map exit codes as the product means them."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from torchtitan_rl_ft.config.checks import check
from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.exit_codes import ExitCode

EXAMPLES = Path(__file__).parents[2] / "examples"
SBATCH = EXAMPLES / "slurm" / "train.sbatch"
NOT_RESTARTED = {ExitCode.CONFIG, ExitCode.NUMERIC}


def checked(arguments):
    """The job of these arguments, which has to be one that can be stopped and go on."""
    resolved = resolve(arguments)
    assert check(resolved).problems == []
    recovery = resolved.sections.recovery
    assert recovery.exit_signal_handler and recovery.auto_continue_train
    return resolved


# Slurm ----------------------------------------------------------------------------------


@pytest.fixture
def slurm(tmp_path):
    """The script among stand-ins for `torchtitan` (its first argument is its exit code; SIGTERM
    ends it with 75) and `scontrol`."""
    stand_in = tmp_path / "torchtitan"
    stand_in.write_text(
        "#!/bin/bash\n"
        f'echo "$@" > {tmp_path}/arguments\n'
        "trap 'sleep 0.3; exit 75' TERM\n"
        f'[ "$2" = forever ] || exit "$2"\ntouch {tmp_path}/up\n'
        "while :; do sleep 0.05; done\n"
    )
    (tmp_path / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> {tmp_path}/requeued\n')
    for program in ("torchtitan", "scontrol"):
        (tmp_path / program).chmod(0o755)

    def start(*arguments):
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        return subprocess.Popen([str(SBATCH), *arguments], env=env)

    return start


@pytest.mark.row("L1")
@pytest.mark.parametrize("code", [0, 1, 2, 3, 75, 130])
def test_slurm_requeues_at_one_code_only(slurm, tmp_path, code):
    assert slurm(str(code)).wait(timeout=20) == code
    requeued = tmp_path / "requeued"
    assert requeued.exists() == (code == ExitCode.REQUEUE)
    if requeued.exists():
        assert requeued.read_text() == "requeue 7\n"


@pytest.mark.row("L1")
def test_slurm_hands_the_signal_on_and_waits_for_the_save(slurm, tmp_path):
    script = slurm("forever", "--job.dump_folder", "x")
    end = time.monotonic() + 20
    while not (tmp_path / "up").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    script.send_signal(signal.SIGTERM)
    assert script.wait(timeout=20) == ExitCode.REQUEUE
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"


def test_slurm_without_a_job_is_wrong_input(slurm):
    assert slurm().wait(timeout=20) == ExitCode.CONFIG


def test_what_slurm_starts_is_a_job(slurm, tmp_path):
    slurm("0", "--x").wait(timeout=20)
    words = (tmp_path / "arguments").read_text().split()
    assert words[:2] == ["run", "0"]
    own = words[words.index("--x") + 1 :]
    checked(["--job.config_file=rl_ft.toml", *own])
    text = SBATCH.read_text()
    assert "#SBATCH --requeue" in text and "#SBATCH --signal=B:TERM@" in text


# Kubernetes -----------------------------------------------------------------------------


def kubernetes_job(name):
    job = yaml.safe_load((EXAMPLES / "kubernetes" / name).read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    return job["spec"]


@pytest.mark.row("L1")
def test_kubernetes_starts_again_at_one_code_and_never_at_two():
    spec = kubernetes_job("job.yaml")
    actions = {
        code: rule["action"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
        for code in rule["onExitCodes"]["values"]
    }
    assert {c for c, action in actions.items() if action == "FailJob"} == NOT_RESTARTED
    assert {c for c, action in actions.items() if action == "Ignore"} == {ExitCode.REQUEUE}
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy allows no other
    (container,) = pod["containers"]
    names = {r["onExitCodes"]["containerName"] for r in spec["podFailurePolicy"]["rules"][:2]}
    assert names == {container["name"]} and container["command"] == ["torchtitan", "run"]
    job = checked(container["args"])
    budget_s = job.sections.rollout.cleanup_timeout
    assert pod["terminationGracePeriodSeconds"] > 2 * budget_s


@pytest.mark.row("L2")
def test_kubernetes_keeps_each_role_up_by_itself():
    pod = kubernetes_job("groups.yaml")["template"]["spec"]
    sidecars, roles = pod["initContainers"], pod["containers"]
    assert {c["command"][3] for c in sidecars} == {"lighthouse", "serving"}
    assert all(c["restartPolicy"] == "Always" for c in sidecars)
    assert pod["restartPolicy"] == "OnFailure" and pod["shareProcessNamespace"]
    jobs = [checked([*c["command"][4:], *c["args"]]) for c in (*sidecars, *roles)]
    trainers = [j.sections.fault_tolerance for j in jobs[3:]]
    assert [t.replica_id for t in trainers] == list(range(trainers[0].replica_groups))
