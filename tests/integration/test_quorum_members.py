"""Who is in a quorum: real lighthouse, real manager servers, groups that are silent or cut off."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_rl_ft.chaos.proxy import ProxyThread
from torchtitan_rl_ft.config.sections import FaultToleranceSection
from torchtitan_rl_ft.roles.lighthouse import start_server

pytestmark = [pytest.mark.row("G6"), pytest.mark.timeout(120)]

SCRIPT = Path(__file__).parents[1] / "fakes" / "quorum_member.py"
LIMIT_S = 25.0


class Members:
    """Groups that a test starts, and their quorums."""

    def __init__(self) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, *names: str, lighthouse: str) -> None:
        for name in names:
            self.processes[name] = subprocess.Popen(
                [sys.executable, str(SCRIPT), name, lighthouse],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        for name in names:
            assert self.answer(name) == {"up": name}

    def ask(self, *names: str, step: int = 1) -> None:
        for name in names:
            stdin = self.processes[name].stdin
            assert stdin is not None
            stdin.write(f"{step}\n")
            stdin.flush()

    def answer(self, name: str, limit_s: float = LIMIT_S) -> dict | None:
        """None when there is none in time."""
        stdout = self.processes[name].stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], limit_s)
        return json.loads(stdout.readline()) if ready else None

    def gather(self, steps: dict[str, int], asking: tuple[str, ...] = ()) -> dict[str, dict]:
        """The answers, once all of `steps` are in one quorum; `asking` have asked before. Who is
        quick finds a smaller one first."""
        self.ask_each({n: s for n, s in steps.items() if n not in asking})
        found: dict[str, dict] = {}
        end_s = time.monotonic() + LIMIT_S
        while len(found) < len(steps):
            assert time.monotonic() < end_s, found
            for name in [n for n in steps if n not in found]:
                answer = self.answer(name, 0.1)
                if answer is not None and answer.get("members") == sorted(steps):
                    found[name] = answer
                elif answer is not None:
                    self.ask_each({name: steps[name]})
        assert len({a["quorum_id"] for a in found.values()}) == 1
        return found

    def ask_each(self, steps: dict[str, int]) -> None:
        for name, step in steps.items():
            self.ask(name, step=step)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.communicate()


@pytest.fixture
def members() -> Iterator[Members]:
    made = Members()
    yield made
    for name in list(made.processes):
        made.kill(name)


def lighthouse(**keys: int) -> tuple[object, str]:
    return start_server(FaultToleranceSection(enable=True, **keys), 0)


def test_a_silent_group_is_dropped_after_the_heartbeat_timeout(members):
    """With the default limits: 5 s."""
    server, url = lighthouse()
    members.start("a:1", "b:1", lighthouse=url)
    members.gather({"a:1": 1, "b:1": 1})
    os.kill(members.processes["b:1"].pid, signal.SIGSTOP)
    stopped_s = time.monotonic()
    members.gather({"a:1": 2})
    assert 4.8 < time.monotonic() - stopped_s < 9.0  # 7 s, and a loaded machine
    # It wakes: it is let in again, behind, and has to heal.
    os.kill(members.processes["b:1"].pid, signal.SIGCONT)
    found = members.gather({"a:1": 3, "b:1": 1})
    assert (found["a:1"]["heal"], found["b:1"]["heal"]) == (False, True)
    server.shutdown()


def test_of_two_halves_at_most_one_forms_a_quorum(members):
    server, url = lighthouse(heartbeat_timeout_ms=2000, join_timeout_ms=200)
    with ProxyThread(url) as link:
        members.start("a:1", "b:1", lighthouse=url)
        members.start("c:1", "d:1", lighthouse=link.url)
        members.gather(dict.fromkeys(("a:1", "b:1", "c:1", "d:1"), 1))
        link.blackhole()
        cut_s = time.monotonic()
        members.ask("c:1", "d:1", step=1)
        # Two of four are no majority, until the silence of the others is a death.
        members.gather({"a:1": 2, "b:1": 2})
        assert time.monotonic() - cut_s > 1.5
        assert members.answer("c:1", 1.0) is None and members.answer("d:1", 0.1) is None
        link.lift()
        steps = {"a:1": 3, "b:1": 3, "c:1": 1, "d:1": 1}
        found = members.gather(steps, asking=("c:1", "d:1"))
        assert [found[name]["heal"] for name in steps] == [False, False, True, True]
    server.shutdown()


def test_a_group_that_is_back_at_once_is_another_member(members):
    """Its former life still counts as beating, and is not in the quorum."""
    server, url = lighthouse(join_timeout_ms=300)
    members.start("a:1", "b:1", lighthouse=url)
    first = members.gather({"a:1": 1, "b:1": 1})
    members.kill("b:1")
    members.start("b:2", lighthouse=url)
    found = members.gather({"a:1": 2, "b:2": 0})
    assert found["a:1"]["quorum_id"] != first["a:1"]["quorum_id"]
    assert (found["a:1"]["heal"], found["b:2"]["heal"]) == (False, True)
    server.shutdown()
