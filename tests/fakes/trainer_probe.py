"""A trainer rank that also writes what it holds after each commit, for tests that compare groups.

The product knows nothing of it: the probe wraps the trainer from outside and appends to
RUN/probe-<replica>.<rank>.jsonl, one line per step: step, token, digests, learning rates.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys

from torchtitan_rl_ft.platform import torchtitan_cpu

torchtitan_cpu.install()

import torch  # noqa: E402

from torchtitan_rl_ft.trainer import entry  # noqa: E402
from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer  # noqa: E402


def digest(tensors: dict[str, torch.Tensor]) -> str:
    h = hashlib.sha256()
    for name in sorted(tensors):
        h.update(name.encode() + tensors[name].detach().contiguous().cpu().numpy().tobytes())
    return h.hexdigest()[:16]


def main() -> int:
    committed = RLFaultTolerantTrainer.committed

    def probed(self, *args, **kwargs):
        committed(self, *args, **kwargs)
        state = self.state.state_dict()
        line = {
            "step": self.lineage.step,
            "token": self.lineage.token,
            "parameters": digest(state["parameters"]),
            "optimizer": digest(
                {
                    str(i): t
                    for i, o in enumerate(state["optimizers"])
                    for t in [torch.cat([v.reshape(-1).float() for v in o.values()])]
                }
            ),
            "lr": [g["lr"] for groups in state["param_groups"] for g in groups],
            "scheduler": state["lr_scheduler"],
        }
        name = f"probe-{self.ft_manager.replica_id}.{os.environ['RANK']}.jsonl"
        with open(self.run_folder.path / name, "a") as f:
            f.write(json.dumps(line) + "\n")

    RLFaultTolerantTrainer.committed = probed
    return entry.main()


if __name__ == "__main__":
    sys.exit(main())
