"""What torchft, journal and guards cost a training step, against plain TorchTitan.

    python benchmarks/train_throughput.py [--rounds 3] [--steps 12] [--verify]

One replica group of the RL trainer (real torchft, real ledger, checkpoints off) and TorchTitan's
base trainer take turns on the same model, rows and loss. Waiting for a batch and publishing a
policy belong to RL as such and are printed beside, not counted. Aim: less than 2 % at a step of
at least 1 s.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from report import Aim, finish

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "integration"))
from trainer_run import TOKEN, TrainerRun  # noqa: E402

from torchtitan_rl_ft.host.ports import free_port  # noqa: E402

NOT_COUNTED = ("time/wait_batch_s", "time/publish_s", "time/starting_s", "time/checkpoint_s")
# prompt groups, samples per group, longest answer; steps of about 0.05 s and over 1 s
SIZES = {"small": (4, 4, 8), "large": (16, 32, 120)}
WARM_UP_STEPS = 2


def keys(size: tuple[int, int, int]) -> dict[str, object]:
    groups, samples, longest = size
    return {
        "training__seq_len": longest + 8,
        "training__local_batch_size": groups * samples,
        "rollout__max_prompt_tokens": 6,
        "rollout__max_response_tokens": longest,
        "rl__groups_per_step": groups,
        "rl__samples_per_prompt": samples,
        "checkpoint__enable": "false",
        "rollout__journal": "false",  # checked only: the benchmark's own host keeps a journal
    }


def ours(folder: Path, steps: int, size: tuple[int, int, int]) -> tuple[list[float], list[float]]:
    """Counted and uncounted seconds of each step."""
    groups, samples, longest = (str(v) for v in size)
    shape = ("--groups", groups, "--samples", samples, "--longest", longest)
    with TrainerRun(folder, steps=steps, groups=1, **keys(size)) as run:
        run.start_all(host_args=shape)
        codes = run.wait_exit("trainer-0", timeout_s=300)
        if codes != [0]:
            raise SystemExit(run.logs())
        rows = run.metrics()[WARM_UP_STEPS:]
    other = [sum(r.get(k, 0.0) for k in NOT_COUNTED) for r in rows]
    return [r["time/step_s"] - o for r, o in zip(rows, other, strict=True)], other


def plain(folder: Path, steps: int, size: tuple[int, int, int]) -> list[float]:
    run = TrainerRun(folder, steps=steps, groups=1, **keys(size))
    out = folder / "seconds.json"
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    env = {**os.environ, **run.env, **rank, "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(ROOT / "benchmarks" / "plain_torchtitan.py"), str(folder)]
    command += [str(steps), str(out), *(str(v) for v in size)]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=300)
    return json.loads(out.read_text())[WARM_UP_STEPS:]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--verify", action="store_true")
    args = parser.parse_args()
    os.environ["TORCHTITAN_RL_FT_TOKEN"] = TOKEN
    figures: dict[str, float] = {}
    print(
        f"{'size':6} {'plain ms':>9} {'ours ms':>9} {'added ms':>9} {'added %':>8} "
        f"{'publish+wait ms':>16}"
    )
    with tempfile.TemporaryDirectory() as temp:
        for name, size in SIZES.items():
            base, full, rest = [], [], []
            for i in range(args.rounds):
                base += plain(Path(temp) / f"{name}-plain-{i}", args.steps, size)
                counted, other = ours(Path(temp) / f"{name}-ours-{i}", args.steps, size)
                full += counted
                rest += other
            a, b, c = (1000 * statistics.median(v) for v in (base, full, rest))
            print(f"{name:6} {a:9.1f} {b:9.1f} {b - a:9.1f} {100 * (b - a) / a:8.2f} {c:16.1f}")
            figures |= {
                f"{name}/plain_ms": a,
                f"{name}/ours_ms": b,
                f"{name}/added_ms": b - a,
                f"{name}/added_percent": 100 * (b - a) / a,
                f"{name}/publish_and_wait_ms": c,
            }
    aims = {
        "large/added_percent": Aim(figures["large/added_percent"], 2.0),
        "large/plain_ms": Aim(figures["large/plain_ms"], 1000.0, at_most=False),
    }
    return finish("train_throughput", figures, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
