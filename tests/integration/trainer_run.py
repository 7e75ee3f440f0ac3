"""Trainer groups on a real lighthouse and a real ledger, started and ended by a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Protocol

import httpx
from forked_ranks import ForkedRank, forks

from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.host.ports import free_port
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.run_folder import RunFolder, write_atomic

ROOT = Path(__file__).parents[2]
TOKEN = "trainer-test-token"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class TrainerRun:
    """One run folder with its processes. Use as a context manager.

    `launched`: groups are started by the trainer role itself, so that the death of one rank ends
    its group; else by the test. Each rank is a probe (tests/fakes/trainer_probe.py). `forked`: they
    are up in about a second (forked_ranks.py).
    """

    def __init__(
        self,
        path: Path,
        *,
        steps: int,
        groups: int,
        ranks: int = 1,
        launched: bool = False,
        forked: bool = False,
        **keys,
    ) -> None:
        self.launched, self.forked = launched, forked
        self.lighthouse_args: list[str] = []
        self.run, self.steps, self.groups, self.ranks = RunFolder(path), steps, groups, ranks
        self.env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHTITAN_RL_FT_TOKEN": TOKEN,
            "TORCHTITAN_RL_FT_RUN": str(path),
            "TORCHTITAN_RL_FT_ATTEMPT": "1",
        }
        values = {
            "training.steps": steps,
            "training.seq_len": 64,
            "training.mixed_precision_param": "float32",
            "training.local_batch_size": 8,
            "optimizer.lr": 0.003,
            "lr_scheduler.warmup_steps": 4,
            "fault_tolerance.replica_groups": groups,
            "fault_tolerance.ranks_per_group": ranks,
            "fault_tolerance.heartbeat_timeout_ms": 1000,
            # Only checked, not used: the host makes its own batches.
            "rl.groups_per_step": 18,
            "rollout.max_prompt_tokens": 32,
            "checkpoint.interval": 1000,
        }
        self._values = values
        self.set(**keys)
        make_tiny_model(self.run.model, 0)
        self.processes: dict[str, list[subprocess.Popen | ForkedRank]] = {}
        self._read: dict[Path, tuple[int, list[dict]]] = {}
        self.rank_env: dict[int, dict[str, str]] = {}
        """Environment of one rank of every group."""

    def set(self, **keys) -> None:
        """Change the run's configuration; the next processes see it."""
        self._values |= {k.replace("__", "."): v for k, v in keys.items()}
        flags = [f"--job.dump_folder={self.run.path}", "--fault_tolerance.enable"]
        resolve([*flags, *(f"--{k}={_word(v)}" for k, v in self._values.items())]).write()

    def __enter__(self) -> TrainerRun:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.processes):
            self.kill(name)

    def start(self, *names: str, host_args: tuple[str, ...] = ()) -> None:
        for name in names:
            self._start(name, host_args)

    def _start(self, name: str, host_args: tuple[str, ...]) -> None:
        if name == "host":
            script = ROOT / "tests/fakes/run_host.py"
            command = [str(script), str(self.run.path), "--steps", str(self.steps), *host_args]
            self._spawn(name, [(command, {})])
            self.wait_for(lambda: self.ready("rollout"), "the host")
        elif name == "lighthouse":
            role = ["-m", "torchtitan_rl_ft", "run", "--role", "lighthouse"]
            self._spawn(name, [([*role, *self.lighthouse_args], {})])
            self.wait_for(lambda: self.ready("lighthouse"), "the lighthouse")
        elif self.launched:
            folder, group = str(self.run.path), name.removeprefix("trainer-")
            launcher = str(ROOT / "tests/fakes/probe_group.py")
            role = [launcher, "run", "--role", "trainer", "--run-folder", folder]
            self._spawn(name, [([*role, "--fault_tolerance.replica_id", group], {})])
        else:
            if name.startswith("standby-"):
                own = {"TORCHTITAN_RL_FT_STANDBY": f"{name}:built"}
                own["TORCHTITAN_RL_FT_STANDBY_PORT"] = str(free_port())
            else:
                own = {"TORCHTITAN_RL_FT_REPLICA_ID": name.removeprefix("trainer-")}
            shared = {
                **own,
                "WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
            }
            probe = [str(ROOT / "tests/fakes/trainer_probe.py")]
            ranks = [
                {**shared, **self.rank_env.get(r, {}), "RANK": str(r), "LOCAL_RANK": str(r)}
                for r in range(self.ranks)
            ]
            if self.forked:
                self.processes[name] = [self._fork(name, rank) for rank in ranks]
            else:
                self._spawn(name, [(probe, rank) for rank in ranks])

    def _fork(self, name: str, env: dict[str, str]) -> ForkedRank:
        log = self.run.path / f"{name}.{env['RANK']}.log"
        return forks().start({**self.env, **env}, log, self.run.path)

    def promote(self, standby: str, name: str) -> None:
        """Give a waiting standby the place of a trainer group, as the supervisor does."""
        self.wait_for(lambda: self.ready(standby), f"{standby} to be ready")
        answer = httpx.post(
            f"{self.run.role(standby).url}/v1/promote",
            json={"replica_id": int(name.removeprefix("trainer-")), "attempt": 2},
            headers={"Authorization": f"Bearer {TOKEN}"},
            trust_env=False,
        )
        answer.raise_for_status()
        self.processes[name] = self.processes.pop(standby)

    def ready(self, role: str) -> bool:
        """It has registered, and lives."""
        address = self.run.role(role)
        return address is not None and address.alive()

    def _spawn(self, name: str, commands: list[tuple[list[str], dict[str, str]]]) -> None:
        started = []
        for i, (command, env) in enumerate(commands):
            log = open(self.run.path / f"{name}.{i}.log", "ab")  # noqa: SIM115
            started.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env={**self.env, **env},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    cwd=self.run.path,
                )
            )
        self.processes[name] = started

    def start_all(self, host_args: tuple[str, ...] = ()) -> None:
        names = [f"trainer-{g}" for g in range(self.groups)]
        self.start("host", "lighthouse", *names, host_args=host_args)

    def kill(self, name: str, signum: int = signal.SIGKILL) -> None:
        for process in self.processes.pop(name):
            if process.poll() is None:
                process.send_signal(signum)
            process.wait(timeout=30)

    def order(
        self, group: int, point: str, *, act: str, rank: int = 0, step: int = 0, **more
    ) -> None:
        """Have a rank do something to itself when it enters a phase (trainer_probe.py)."""
        order = {"act": act, "point": point, "step": step, **more}
        path = self.run.path / f"order-{group}.{rank}"
        write_atomic(path, json.dumps(order).encode())

    def kill_at(self, group: int, point: str, *, rank: int = 0, step: int = 0) -> float:
        """SIGKILL of a rank as it enters a phase; its group's other ranks follow, as their
        launcher would have it. Returns when it was, on the monotonic clock."""
        phase, mono_s = self.kill_near(group, point, rank=rank, step=step)
        assert rank or phase == point
        return mono_s

    def kill_near(
        self, group: int, point: str, *, rank: int = 0, step: int = 0, delay_s: float = 0.0
    ) -> tuple[str, float]:
        """SIGKILL of a rank `delay_s` after it came to a point (trainer_probe.py). Returns the
        phase that its group was in at last, and since when."""
        name = f"trainer-{group}"
        victim = self.processes[name][rank]
        self.order(group, point, act="kill", rank=rank, step=step, delay_s=delay_s)
        self.wait_for(lambda: victim.poll() is not None, f"{name} to enter {point}")
        assert victim.returncode == -signal.SIGKILL, self.logs()
        self.kill(name)
        last = [e for e in self.events("phase") if e["name"] == name][-1]
        return last["phase"], last["mono_s"]

    def wait_exit(self, name: str, timeout_s: float = 90) -> list[int]:
        return [p.wait(timeout=timeout_s) for p in self.processes[name]]

    def wait_for(self, condition, what: str, timeout_s: float = 90) -> None:
        end = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end, f"waited {timeout_s} s for {what}\n{self.logs()}"
            time.sleep(0.05)

    def wait_step(self, step: int) -> None:
        self.wait_for(lambda: len(self.metrics()) >= step, f"step {step}")

    def metrics(self) -> list[dict]:
        self._read.pop(self.run.metrics, None)  # a ledger may write it anew
        return self._lines(self.run.metrics)

    def events(self, kind: str) -> list[dict]:
        return [e for e in self._lines(self.run.events) if e["kind"] == kind]

    def probe(self, group: int, rank: int = 0) -> dict[int, dict]:
        """What the group held after each step; the last life's word counts."""
        return {line["step"]: line for line in self.probes(group, rank)}

    def probes(self, group: int, rank: int = 0) -> list[dict]:
        """The same in the order of writing, each life's."""
        return self._lines(self.run.path / f"probe-{group}.{rank}.jsonl")

    def _lines(self, path: Path) -> list[dict]:
        """All whole lines of a file that grows; what was read before is kept."""
        offset, lines = self._read.get(path, (0, []))
        if path.exists():
            with open(path, "rb") as f:
                f.seek(offset)
                data = f.read()
            whole = data[: data.rfind(b"\n") + 1]
            lines += [json.loads(line) for line in whole.splitlines()]
            self._read[path] = (offset + len(whole), lines)
        return lines

    def lives(self, group: int, rank: int = 0) -> list[dict]:
        """Starts of training in a rank, in order (life_probe.py)."""
        return list(self._lines(self.run.path / f"life-{group}.{rank}.jsonl"))

    def window(self, group: int, rank: int = 0) -> list[dict]:
        """Inner steps, refusals and restores of a group in semi-sync, in order."""
        return list(self._lines(self.run.path / f"window-{group}.{rank}.jsonl"))

    def logs(self) -> str:
        tails = []
        for log in sorted(self.run.path.glob("*.log")):
            tails.append(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]))
        return "\n".join(tails)


class WithMetrics(Protocol):
    """A run, or a job."""

    def metrics(self) -> list[dict]: ...


def steps_of(run: WithMetrics) -> list[int]:
    return [m["step"] for m in run.metrics()]


def assert_each_step_once(run: WithMetrics) -> None:
    """In order, from the first one; read once, since a run that goes on commits meanwhile."""
    steps = steps_of(run)
    assert steps == list(range(1, len(steps) + 1))


def assert_groups_equal(
    run: TrainerRun, groups: tuple[int, ...], at_least: int, rank: int = 0
) -> None:
    """Bitwise: parameters, optimizer tensors, LR, scheduler, step counter, history, at every
    common step. Random numbers are a rank's own."""
    probes = [
        {step: {k: v for k, v in held.items() if k != "draws"} for step, held in probe.items()}
        for probe in (run.probe(g, rank) for g in groups)
    ]
    common = set.intersection(*(set(p) for p in probes))
    assert len(common) >= at_least
    for step in sorted(common):
        for other in probes[1:]:
            differ = [k for k, v in probes[0][step].items() if other[step][k] != v]
            assert not differ, f"groups differ at step {step} in {differ}"
