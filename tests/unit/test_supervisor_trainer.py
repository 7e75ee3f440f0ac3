"""The launcher of a replica group, with small stand-in ranks."""

import asyncio
import os
import signal
import sys
import textwrap
import time
from types import SimpleNamespace

import pytest

from torchtitan_rl_ft.config.sections import Sections
from torchtitan_rl_ft.escalation import RestartLimits
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import regroup
from torchtitan_rl_ft.host.ports import free_port
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.roles import regrouping as regrouping_module
from torchtitan_rl_ft.roles import trainer
from torchtitan_rl_ft.roles.regrouping import Regrouping
from torchtitan_rl_ft.roles.trainer import (
    RankGroup,
    RoleMissing,
    group_env,
    rank_env,
    wait_for_role,
)
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, TOKEN_ENV, RunFolder


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(TOKEN_ENV, "secret")
    return RunFolder(tmp_path)


def env_of(folder, n_ranks):
    return group_env(
        {**os.environ, ATTEMPT_ENV: "3"},
        folder=folder,
        replica_id=1,
        lighthouse_url="http://127.0.0.1:29510",
        master_port=29511,
        world_size=n_ranks,
    )


def run(folder, script, n_ranks=2, **options):
    command = [sys.executable, "-I", "-c", textwrap.dedent(script)]
    return asyncio.run(
        RankGroup(folder, "trainer-1", command, env_of(folder, n_ranks), **options).run(n_ranks)
    )


def test_ranks_get_torchrun_names_and_logs_of_their_own(folder):
    names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    script = f"import os; print([os.environ[n] for n in '{names}'.split()])"
    assert run(folder, script) == 0
    for rank in ("0", "1"):
        log = folder.log_file(f"trainer-1.{rank}", 3).read_text().strip()
        assert log == str([rank, rank, "2", "2", "127.0.0.1", "29511"])


def test_group_knows_the_run(folder):
    env = rank_env(env_of(folder, 1), 0)
    assert env["TORCHTITAN_RL_FT_REPLICA_ID"] == "1"
    assert env["TORCHTITAN_RL_FT_RUN"] == str(folder.path)
    assert env["TORCHFT_LIGHTHOUSE"] == "http://127.0.0.1:29510"
    assert env[TOKEN_ENV] == "secret"


@pytest.mark.parametrize(
    ("death", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 128 + 9), ("sys.exit(3)", 3)],
)
def test_death_of_one_rank_ends_the_group_with_its_code(folder, death, code, capsys):
    script = f"""
        import os, sys, time
        if os.environ["RANK"] == "1":
            {death}
        time.sleep(600)
    """
    started_s = time.monotonic()
    assert run(folder, script, n_ranks=3) == code
    assert time.monotonic() - started_s < 8.0
    assert "trainer-1: rank 1: " in capsys.readouterr().out


def test_sigterm_to_the_launcher_ends_the_ranks(folder):
    script = """
        import os, signal, time
        if os.environ["RANK"] == "0":
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
    """
    assert run(folder, script) == 128 + signal.SIGTERM


@pytest.mark.row("H1")
def test_asked_to_leave_all_ranks_do_so_in_their_own_time(folder):
    """One is told first and ends first; the other is not ended for it."""
    script = """
        import os, signal, sys, time
        rank = int(os.environ["RANK"])
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.8 * rank), sys.exit(75)))
        time.sleep(0.5)
        if rank == 0:
            os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(600)
    """
    assert run(folder, script, graceful=True) == 75


def test_sigint_ends_a_group_that_may_be_asked_to_leave(folder):
    script = """
        import os, signal, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "0":
            time.sleep(0.3)
            os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)
    """
    assert run(folder, script, graceful=True) == 128 + signal.SIGTERM


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def sleep(self, s):
        self.now_s += s


def test_missing_role_is_named_with_the_run_folder(folder):
    clock = Clock()
    with pytest.raises(RoleMissing) as error:
        wait_for_role(folder, "lighthouse", 5.0, clock=lambda: clock.now_s, sleep=clock.sleep)
    assert str(error.value).startswith(f"role lighthouse was never up in run folder {folder.path}")
    assert clock.now_s == pytest.approx(5.0, abs=0.2)


def test_role_that_comes_up_is_found(folder):
    clock = Clock()

    def sleep(s):
        clock.sleep(s)
        if clock.now_s > 1.0:
            folder.register("lighthouse", "http://127.0.0.1:1")

    url = wait_for_role(folder, "lighthouse", 5.0, clock=lambda: clock.now_s, sleep=sleep)
    assert url == "http://127.0.0.1:1"


REGROUPING = """
    import os, pathlib, sys, time
    from torchtitan_rl_ft.host import regroup
    from torchtitan_rl_ft.trainer import watch

    run = pathlib.Path(os.environ["TORCHTITAN_RL_FT_RUN"])
    rank, generation = os.environ["RANK"], int(os.environ[regroup.GENERATION_ENV])
    file = watch.begin(run / "phases")
    def told(generation, port):
        with open(run / "told", "a") as f:
            f.write(f"{rank} {os.getpid()} {generation} {port}\\n")
    def wait_for(condition):
        end = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.01)
    def everybody(generation):
        lines = [l.split() for l in (run / "told").read_text().splitlines()]
        return {l[0] for l in lines if l[2] == str(generation)} == {"0", "1"}
    port = os.environ["MASTER_PORT"]
    while True:
        file.enter("reduce", 1)  # one that is still starting when another dies is killed
        told(generation, port)
        wait_for(lambda: everybody(generation))
        if (rank, generation) in DEATHS:
            os.kill(os.getpid(), 9)
        if generation == len(DEATHS):
            sys.exit(0)
        file.enter(regroup.RESTARTING)
        wait_for(lambda: regroup.read(run / "phases", "trainer-1").generation > generation)
        found = regroup.read(run / "phases", "trainer-1")
        generation, port = found.generation, found.master_port
        file.start_again(generation)
"""


def regroup_run(folder, max_restarts, deaths=(("1", 0),), script=REGROUPING):
    """`deaths`: rank and generation, one in each."""
    events = EventList()
    limits = RestartLimits(max_restarts=max_restarts, window_s=100.0)
    regrouping = Regrouping(folder, "trainer-1", limits, events, free_port)
    script = textwrap.dedent(script).replace("DEATHS", str(deaths))
    command = [sys.executable, "-c", script]
    group = RankGroup(folder, "trainer-1", command, env_of(folder, 2), regrouping=regrouping)
    folder.phases.mkdir()
    regroup.write(folder.phases, "trainer-1", regroup.Generation(0, 0))
    code = asyncio.run(group.run(2))
    lines = [line.split() for line in (folder.path / "told").read_text().splitlines()]
    return code, lines, events.events


def test_a_dead_rank_alone_is_started_again_and_the_others_meet_it_in_place(folder):
    code, lines, events = regroup_run(folder, max_restarts=1)
    assert code == 0
    pids = {(rank, generation): pid for rank, pid, generation, _ in lines}
    ports = {(rank, generation): port for rank, _, generation, port in lines}
    assert pids["0", "0"] == pids["0", "1"] and pids["1", "0"] != pids["1", "1"]
    assert ports["0", "1"] == ports["1", "1"] != ports["0", "0"] == ports["1", "0"]
    assert [(e["kind"], e["phase"], e["subject"]) for e in events] == [
        ("restart", "role", "trainer-1.1")
    ]


def test_the_new_process_of_a_rank_waits_for_the_next_generation_as_the_others_do(folder):
    code, lines, events = regroup_run(folder, max_restarts=2, deaths=(("1", 0), ("0", 1)))
    assert code == 0
    assert [generation for *_, generation, _ in lines] == ["0", "0", "1", "1", "2", "2"]
    pids = {(rank, generation): pid for rank, pid, generation, _ in lines}
    assert pids["1", "1"] == pids["1", "2"] and pids["0", "1"] != pids["0", "2"]
    assert [e["subject"] for e in events] == ["trainer-1.1", "trainer-1.0"]


def test_a_rank_that_is_killed_since_it_was_still_starting_is_not_counted(folder):
    starting = """
        if (rank, generation) == ("0", 0):
            told(generation, port)
            time.sleep(60)
        file.enter("reduce", 1)"""
    script = REGROUPING.replace('\n        file.enter("reduce", 1)', starting, 1)
    assert script != REGROUPING
    code, lines, events = regroup_run(folder, max_restarts=1, script=script)
    assert code == 0 and [generation for *_, generation, _ in lines] == ["0", "0", "1", "1"]
    assert len({pid for _, pid, *_ in lines}) == 4
    assert [(e["kind"], e["phase"], e["subject"]) for e in events] == [
        ("restart", "role", "trainer-1.1"),
        ("restart", "role", "trainer-1.0"),
    ]
    assert events[1]["cause"] == "did not come to generation 1: starting"


def test_ranks_that_die_too_often_end_their_group(folder):
    code, lines, events = regroup_run(folder, max_restarts=0)
    assert code == 128 + 9 and {generation for _, _, generation, _ in lines} == {"0"}
    (told,) = events
    assert (told["kind"], told["phase"]) == ("escalate", "group")
    assert "0 restarts within 100 s are used up" in told["cause"]


@pytest.mark.parametrize("code", [ExitCode.CONFIG, ExitCode.NUMERIC])
def test_a_code_that_no_restart_mends_is_not_mended_by_one_of_the_rank(folder, code):
    limits = RestartLimits(max_restarts=9, window_s=100.0)
    regrouping = Regrouping(folder, "trainer-1", limits, EventList(), free_port)
    assert not regrouping.may_restart(0, code)
    assert regrouping.may_restart(0, 1)


def test_ranks_that_finish_are_not_waited_for_at_a_rendezvous(folder, monkeypatch):
    """One rank is done long before the other: nobody is late, and no generation begins."""
    monkeypatch.setattr(regrouping_module, "JOIN_TIMEOUT_S", 0.2)
    events, limits = EventList(), RestartLimits(3, 600.0)
    regrouping = Regrouping(folder, "trainer-1", limits, events, free_port)
    script = "import os, time; time.sleep(2 * int(os.environ['RANK']))"
    assert run(folder, script, regrouping=regrouping) == 0
    assert regrouping.generation == 0
    assert not events.events


def test_a_group_that_is_started_by_hand_keeps_its_name(folder, monkeypatch):
    """Other roles are waited for under theirs."""
    monkeypatch.delenv(ATTEMPT_ENV, raising=False)
    for role in ("serving", "rollout"):
        folder.register(role, "http://127.0.0.1:1")
    named = []

    class Group:
        def __init__(self, folder, name, *args, **options):
            named.append(name)

        async def run(self, n_ranks):
            return 0

    monkeypatch.setattr(trainer, "RankGroup", Group)
    sections = Sections()
    sections.job.dump_folder = str(folder.path)
    sections.fault_tolerance.replica_id = 1
    sections.fault_tolerance.ranks_per_group = 2
    assert trainer.main(SimpleNamespace(sections=sections)) == 0
    assert named == ["trainer-1"]
