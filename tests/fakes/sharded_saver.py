"""One of two ranks that save a sharded model with AdamW; tells on stdout (JSON) what it took.

python tests/fakes/sharded_saver.py FOLDER RANK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.tiny_trainer import TinyTrainer  # noqa: E402

WIDTH = 512


def gathered(counts: dict) -> int:
    """Collectives that put shards of tensors together."""
    return sum(n for op, n in counts.items() if "all_gather_into" in str(op))


def main() -> None:
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2
    )
    model = torch.nn.Linear(WIDTH, WIDTH)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    model.set_force_sum_reduction_for_comms(True)
    trainer = TinyTrainer(folder, width=WIDTH, model=model)
    trainer.train()
    path = trainer.path()
    with CommDebugMode() as saving:
        trainer.manager.save(1)
    state = trainer.optimizers.state_dict()
    moment = next(v for k, v in state.items() if k.endswith("weight.exp_avg"))
    with CommDebugMode() as control:
        moment.full_tensor()
    expected = moment.to_local().clone()
    trainer.train()
    trainer.manager.restore(path)
    found = trainer.optimizers.state_dict()
    again = next(v for k, v in found.items() if k.endswith("weight.exp_avg"))
    print(
        json.dumps(
            {
                "gathered_by_save": gathered(saving.get_comm_counts()),
                "gathered_by_full_tensor": gathered(control.get_comm_counts()),
                "told": trainer.told,
                "restored": bool(torch.equal(again.to_local(), expected)),
                "path": str(path),
            }
        )
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
