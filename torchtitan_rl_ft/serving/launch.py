"""How an engine is started: command line, environment, files of its own."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchtitan_rl_ft.config.groups import takes_versions
from torchtitan_rl_ft.config.placement import engine_ranks, option
from torchtitan_rl_ft.config.sections import EngineGroup, RolloutSection
from torchtitan_rl_ft.host.ports import HOST, free_ports
from torchtitan_rl_ft.platform import sglang_cpu
from torchtitan_rl_ft.run_folder import TOKEN_ENV, RunFolder
from torchtitan_rl_ft.serving.groups import SlotPlan, slot_plans
from torchtitan_rl_ft.weights.engine_hashes import cpu_hash, gpu_hash
from torchtitan_rl_ft.weights.proof import EngineLayout

_ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")
_LONGEST_SCRATCH = 80
"""SGLang puts sockets into its TMPDIR; a socket's path has at most 107 characters."""


@dataclass(frozen=True)
class Launch:
    """One start of an engine: a command for each node, node 0 first; it answers at `url`.
    `scratch` is its TMPDIR, removed with it. `bootstrap_port` is that of a prefill engine."""

    nodes: tuple[list[str], ...]
    env: dict[str, str]
    url: str
    scratch: Path
    bootstrap_port: int | None = None


class Launcher(Protocol):
    """Says how to start the engine of a slot, anew for each start. Two starts with the same
    `fingerprint` give engines that do the same."""

    def prepare(self, slot: int) -> Launch: ...

    def fingerprint(self, slot: int) -> str: ...

    def layout(self, group: EngineGroup) -> EngineLayout: ...

    def seeded(self, group: EngineGroup) -> bool:
        """Whether engines of the group honour a seed for each sample."""
        ...

    def model_path(self, group: EngineGroup) -> Path:
        """The model that engines of the group start from."""
        ...

    def devices(self, slot: int) -> list[int]:
        """Numbers of the slot's accelerators on this node; none on a CPU."""
        ...


class SGLangLauncher:
    """SGLang servers on this node. Their own routes have no token: they listen on loopback."""

    def __init__(
        self, rollout: RolloutSection, model_path: Path, folder: RunFolder, *, on_cpu: bool
    ) -> None:
        self._rollout, self._model_path, self._folder = rollout, model_path, folder
        self._on_cpu = on_cpu
        self._plans = slot_plans(rollout)

    def layout(self, group: EngineGroup) -> EngineLayout:
        fixed = self._fixed(group)
        dtype = option(fixed, ("--dtype",)) or "auto"
        return EngineLayout(dtype, engine_ranks(fixed), cpu_hash if self._on_cpu else gpu_hash)

    def seeded(self, group: EngineGroup) -> bool:
        return "--enable-deterministic-inference" in self._fixed(group)

    def model_path(self, group: EngineGroup) -> Path:
        return Path(group.model) if group.model else self._model_path

    def devices(self, slot: int) -> list[int]:
        plan = self._plans[slot]
        if self._on_cpu:
            return []
        first = option(self._fixed(plan.group), ("--base-gpu-id",)) or plan.first_device
        return [int(first) + i for i in range(plan.ranks)]

    def prepare(self, slot: int) -> Launch:
        plan = self._plans[slot]
        n_nodes = plan.group.nodes_per_engine
        torch_port, nodes_port, bootstrap, *ports = free_ports(3 + n_nodes)
        shared = [f"--nccl-port={torch_port}"]
        if n_nodes > 1:
            shared.append(f"--dist-init-addr={HOST}:{nodes_port}")
        bootstrap_port = bootstrap if plan.group.role == "prefill" else None
        if bootstrap_port is not None:
            shared.append(f"--disaggregation-bootstrap-port={bootstrap_port}")
        nodes = tuple(
            [*self._command(plan, node), *shared, f"--port={port}"]
            for node, port in enumerate(ports)
        )
        scratch = make_scratch(self._folder, slot)
        url = f"http://{HOST}:{ports[0]}"
        return Launch(nodes, self._env(scratch), url, scratch, bootstrap_port)

    def fingerprint(self, slot: int) -> str:
        return fingerprint(self._command(self._plans[slot], 0))

    def _command(self, plan: SlotPlan, node: int) -> list[str]:
        """All but what is another one at each start."""
        group, fixed = plan.group, self._fixed(plan.group)
        argv = [
            *self._program(),
            f"--model-path={self.model_path(group)}",
            f"--host={HOST}",
        ]
        if not self._on_cpu and option(fixed, ("--base-gpu-id",)) is None:
            share = node * (plan.ranks // group.nodes_per_engine)
            argv.append(f"--base-gpu-id={plan.first_device + share}")
        if group.nodes_per_engine > 1:
            argv += [f"--nnodes={group.nodes_per_engine}", f"--node-rank={node}"]
        if group.role in ("prefill", "decode"):
            argv.append(f"--disaggregation-mode={group.role}")
        return [*argv, *fixed]

    def _program(self) -> list[str]:
        python = self._rollout.engine_python
        if not self._on_cpu:
            return [python or sys.executable, "-m", "sglang.launch_server"]
        if not python:
            return [sys.executable, "-m", "torchtitan_rl_ft.platform.sglang_cpu"]
        return [python, sglang_cpu.__file__]  # this package need not be installed there

    def _fixed(self, group: EngineGroup) -> list[str]:
        """The user's come last, so that they win."""
        rollout = self._rollout
        fixed = ["--log-level-http=warning"]
        fixed += sglang_cpu.ARGUMENTS if self._on_cpu else ["--dtype=bfloat16"]
        fixed += stream_arguments(rollout)
        if rollout.pause_mode == "in_place" and takes_versions(group):
            # Requests that run on keep their cache, so it cannot be flushed at an update, and
            # new requests would reuse what old weights computed.
            fixed.append("--disable-radix-cache")
        if rollout.placement == "colocated":
            fixed.append("--enable-memory-saver")
            if not takes_versions(group):
                # Nobody gives it its weights again, so SGLang keeps a copy in main memory.
                fixed.append("--enable-weights-cpu-backup")
        return [*fixed, *rollout.engine_args, *group.engine_args]

    def _env(self, scratch: Path) -> dict[str, str]:
        env = {k: v for k, v in os.environ.items() if k != TOKEN_ENV}
        if self._on_cpu:
            env |= sglang_cpu.ENVIRONMENT
        env["TMPDIR"] = str(scratch)
        # How soon SGLang sees that the caller of a running request has gone (4 s by default).
        env.setdefault("SGLANG_REQUEST_STATE_WAIT_TIMEOUT", "1")
        env.setdefault("HF_HUB_OFFLINE", "1")  # everything that it loads is a folder here
        return env


def fingerprint(command: Sequence[str]) -> str:
    """Of a command line, without ports and paths of its own."""
    return hashlib.sha256("\0".join(command).encode()).hexdigest()[:16]


def stream_arguments(rollout: RolloutSection) -> list[str]:
    """A message of a running request holds what is new, not all tokens from the first one."""
    interval = rollout.stream_interval_tokens
    return ["--incremental-streaming-output", f"--stream-interval={interval}"]


def has_accelerator() -> bool:
    """Whether this node has a GPU, told without a GPU library."""
    return any(Path(p).exists() for p in _ACCELERATORS)


def make_scratch(folder: RunFolder, slot: int) -> Path:
    """An empty folder for an engine's sockets: in the run folder, or where the path is short."""
    path = folder.path / "serving" / f"engine-{slot}"
    if len(str(path)) > _LONGEST_SCRATCH:
        return Path(tempfile.mkdtemp(prefix="rl_ft-"))
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True)
    return path


def check_model_folder(path: Path) -> str | None:
    """Why no engine can start from `path`, or None."""
    if not (path / "config.json").is_file():
        return f"{path} holds no model: config.json is missing"
    if not any((path / f).is_file() for f in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return f"{path} holds no tokenizer (tokenizer.json): SGLang cannot start from it"
    if not any(path.glob("*.safetensors")):
        return f"{path} holds no weights (*.safetensors)"
    return None


def interpreter_problem(rollout: RolloutSection, environ: Mapping[str, str]) -> str | None:
    """Why `rollout.engine_python` cannot run, or None."""
    python = rollout.engine_python
    if python and shutil.which(python, path=environ.get("PATH")) is None:
        return f"rollout.engine_python = {python!r} is not a program"
    return None
