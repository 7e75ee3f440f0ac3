"""A trainer rank that also writes what it holds after each commit, for tests that compare groups.

The product knows nothing of it: the probe wraps the trainer from outside and appends to
RUN/probe-<replica>.<rank>.jsonl, one line per step: step, token, digests, learning rates.
PROBE_CLOCK_SKEW_S in its environment sets the clocks of its process that much forward;
PROBE_POLICY adds the digest of the whole model.

What a test asks of this rank is in RUN/order-<replica>.<rank>, JSON: {"act": "kill" | "stop" |
"sleep" | "hold" | "fail" | "raise", "point": "reduce", "step": 0, "sleep_s": 6}: the rank does it
to itself as it enters that phase (of that step, 0: any), once; "kill" with "delay_s" a moment
later. Points beside the phases: "configure" (the quorum stands, its process group does not yet),
"transfer" (about to fetch a peer's state), "allreduce" (a sum over the groups is about to begin)
and those of step_probe.py. In semi-sync, see also window_probe.py.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

SKEW_S = float(os.environ.get("PROBE_CLOCK_SKEW_S", "0"))
if SKEW_S:
    right = {name: getattr(time, name) for name in ("time", "monotonic")}
    time.time = lambda: right["time"]() + SKEW_S
    time.monotonic = lambda: right["monotonic"]() + SKEW_S

from torchtitan_rl_ft.platform import torchtitan_cpu  # noqa: E402

torchtitan_cpu.install()

import checkpoint_probe  # noqa: E402
import life_probe  # noqa: E402
import step_probe  # noqa: E402
import torch  # noqa: E402
import trainer_fault  # noqa: E402
import window_probe  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torchft import ProcessGroupGloo  # noqa: E402

from torchtitan_rl_ft.replica.state_transport import StateTransport  # noqa: E402
from torchtitan_rl_ft.trainer import entry  # noqa: E402
from torchtitan_rl_ft.trainer.presence import PhaseClock  # noqa: E402
from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer  # noqa: E402
from torchtitan_rl_ft.trainer.stepper import HealFailed  # noqa: E402
from torchtitan_rl_ft.weights.publisher import image_of  # noqa: E402


def digest(tensors: dict[str, torch.Tensor]) -> str:
    h = hashlib.sha256()
    for name in sorted(tensors):
        h.update(name.encode() + tensors[name].detach().contiguous().cpu().numpy().tobytes())
    return h.hexdigest()[:16]


def obey_orders() -> None:
    """Look for an order at every change of phase, and at the points between."""
    name = f"order-{os.environ.get('TORCHTITAN_RL_FT_REPLICA_ID', 'standby')}.{os.environ['RANK']}"
    path = Path(os.environ["TORCHTITAN_RL_FT_RUN"]) / name

    now = {"step": 0}

    def look(point: str) -> None:
        if path.exists():
            order = json.loads(path.read_text())
            if order["point"] == point and order["step"] in (0, now["step"]):
                path.unlink()
                obey(order)

    enter = PhaseClock.enter
    configure, receive = ProcessGroupGloo.configure, StateTransport.recv_checkpoint
    allreduce = ProcessGroupGloo.allreduce

    def entered(self: PhaseClock, phase: str, step: int) -> None:
        enter(self, phase, step)
        now["step"] = step
        look(phase)

    def configured(self: ProcessGroupGloo, *args: Any, **kwargs: Any) -> None:
        look("configure")
        configure(self, *args, **kwargs)

    def received(self: StateTransport, *args: Any, **kwargs: Any) -> Any:
        look("transfer")
        return receive(self, *args, **kwargs)

    def reduced(self: ProcessGroupGloo, *args: Any, **kwargs: Any) -> Any:
        look("allreduce")
        return allreduce(self, *args, **kwargs)

    PhaseClock.enter = entered
    ProcessGroupGloo.allreduce = reduced
    ProcessGroupGloo.configure = configured
    StateTransport.recv_checkpoint = received
    step_probe.install(look)


def obey(order: dict) -> None:
    match order["act"]:
        case "kill" if order.get("delay_s"):
            threading.Timer(order["delay_s"], os.kill, (os.getpid(), signal.SIGKILL)).start()
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "sleep":
            time.sleep(order["sleep_s"])
        case "hold":  # the interpreter, in a call of C
            ctypes.PyDLL(None).sleep(600)
        case "fail":
            raise HealFailed("ordered by a test")
        case "raise":  # what the call itself would raise
            raise RuntimeError("ordered by a test")


def append(trainer: RLFaultTolerantTrainer, kind: str, line: dict) -> None:
    name = f"{kind}-{trainer.ft_manager.replica_id}.{os.environ['RANK']}.jsonl"
    with open(trainer.run_folder.path / name, "a") as f:
        f.write(json.dumps(line) + "\n")


def held(trainer: RLFaultTolerantTrainer) -> dict:
    state = trainer.state.state_dict()
    return {
        "step": trainer.lineage.step,
        "token": trainer.lineage.token,
        "parameters": digest(state["parameters"]),
        "optimizer": digest(
            {
                str(i): t
                for i, o in enumerate(state["optimizers"])
                if o  # plain SGD keeps none
                for t in [torch.cat([v.reshape(-1).float() for v in o.values()])]
            }
        ),
        "outer": digest(state["outer"]),
        "lr": [g["lr"] for groups in state["param_groups"] for g in groups],
        "scheduler": state["lr_scheduler"],
    }


def policy(trainer: RLFaultTolerantTrainer) -> str:
    """sha256 of the model as a safetensors file has it, gathered by DTensor itself."""
    state = {k: v for part in trainer.model_parts for k, v in part.state_dict().items()}
    tensors = trainer._adapter.to_hf(state)
    wholes = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    digest = hashlib.sha256(image_of(wholes, None).header)
    for name in sorted(wholes):
        digest.update(wholes[name].detach().contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()


def probe_commits() -> None:
    committed = RLFaultTolerantTrainer.committed

    def probed(self, *args, **kwargs):
        committed(self, *args, **kwargs)
        manager_step = self.ft_manager._manager.current_step()
        seen = {"manager_step": manager_step, "draws": list(checkpoint_probe.draws)}
        if "PROBE_POLICY" in os.environ:
            seen["policy"] = policy(self)
        append(self, "probe", {**held(self), **seen})

    RLFaultTolerantTrainer.committed = probed


def main() -> int:
    obey_orders()
    probe_commits()
    window_probe.install(held, append)
    trainer_fault.install()
    life_probe.install(append)
    checkpoint_probe.install()
    return entry.main()


if __name__ == "__main__":
    sys.exit(main())
