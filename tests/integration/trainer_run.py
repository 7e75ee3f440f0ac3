"""Trainer groups on a real lighthouse and a real ledger, started and ended by a test."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.roles.trainer import free_port
from torchtitan_rl_ft.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
TOKEN = "trainer-test-token"


class TrainerRun:
    """One run folder with its processes. Use as a context manager."""

    def __init__(self, path: Path, *, steps: int, groups: int, ranks: int = 1, **keys) -> None:
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
            **{k.replace("__", "."): v for k, v in keys.items()},
        }
        flags = [f"--job.dump_folder={path}", "--fault_tolerance.enable"]
        resolve([*flags, *(f"--{k}={str(v).lower()}" for k, v in values.items())]).write()
        make_tiny_model(self.run.model, 0)
        self.processes: dict[str, list[subprocess.Popen]] = {}

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
            self.wait_for(lambda: self._alive("rollout"), "the host")
        elif name == "lighthouse":
            self._spawn(name, [(["-m", "torchtitan_rl_ft", "run", "--role", "lighthouse"], {})])
            self.wait_for(lambda: self._alive("lighthouse"), "the lighthouse")
        else:
            group = name.removeprefix("trainer-")
            shared = {
                "TORCHTITAN_RL_FT_REPLICA_ID": group,
                "WORLD_SIZE": str(self.ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(free_port()),
            }
            probe = [str(ROOT / "tests/fakes/trainer_probe.py")]
            ranks = [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(self.ranks)]
            self._spawn(name, [(probe, rank) for rank in ranks])

    def _alive(self, role: str) -> bool:
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
        return _lines(self.run.metrics)

    def events(self, kind: str) -> list[dict]:
        return [e for e in _lines(self.run.events) if e["kind"] == kind]

    def probe(self, group: int, rank: int = 0) -> dict[int, dict]:
        """What the group held after each step; the last life's word counts."""
        lines = _lines(self.run.path / f"probe-{group}.{rank}.jsonl")
        return {line["step"]: line for line in lines}

    def logs(self) -> str:
        tails = []
        for log in sorted(self.run.path.glob("*.log")):
            tails.append(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]))
        return "\n".join(tails)


def _lines(path: Path) -> list[dict]:
    try:
        text = path.read_text()
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
