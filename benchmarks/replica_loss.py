"""How long training stands still when a replica group is killed, by the point of its step.

    python benchmarks/replica_loss.py [--layouts 2 3 2x2] [--repeats 2] [--verify] [--out FILE]

Real trainer groups (torchft, TorchTitan on gloo) on a real lighthouse and a real ledger, with the
limits of rl_ft_debug.toml. A group is killed with SIGKILL as it enters a phase of its step, and
started again for the next kill. Clocked from the signal until the ledger has the survivors' first
commit without it. Layouts: groups, or groups x ranks of a group (FSDP inside the group; a kill
hits one rank, in turns the first and the last, and the launcher ends the others). Aim: less than
3 s, whatever the point. The stalls come with an undisturbed step of the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from report import Aim, finish

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "integration"))
from phase_strike import POINTS, Strike, strike  # noqa: E402
from trainer_run import TOKEN, TrainerRun  # noqa: E402

from torchtitan_rl_ft.config.resolve import resolve  # noqa: E402
from torchtitan_rl_ft.host import process  # noqa: E402
from torchtitan_rl_ft.run_folder import ProcessId  # noqa: E402

LIMITS = (
    "process_group_timeout_ms",
    "heartbeat_timeout_ms",
    "join_timeout_ms",
    "quorum_timeout_s",
    "quorum_retries",
    "manager_timeout_s",
)
CALM_STEPS = 8
LIMIT_S = 120.0
VICTIM = "trainer-1"


def shipped_limits() -> dict[str, Any]:
    section = resolve(["--job.config_file", "rl_ft_debug.toml"]).sections.fault_tolerance
    return {f"fault_tolerance__{key}": getattr(section, key) for key in LIMITS}


class Kills:
    """One run whose group 1 is killed again and again."""

    def __init__(self, run: TrainerRun) -> None:
        self._run = run
        self._count = 0

    def settle(self) -> None:
        """All groups train, and have for some steps."""
        enough = len(self._run.metrics()) + CALM_STEPS

        def calm() -> bool:
            rows = self._run.metrics()
            last = rows[-CALM_STEPS:]
            full = all(r["participants"] == self._run.groups for r in last)
            return len(rows) >= enough and full

        self._run.wait_for(calm, "all groups to train", LIMIT_S)

    def kill(self, point: str) -> tuple[Strike, float]:
        """Where the group was when it was hit, and the seconds until the survivors' commit."""
        self._count += 1
        pid = self._last_rank() if self._run.ranks > 1 and self._count % 2 == 0 else None
        hit = strike(self._run.run.events, VICTIM, point, pid=pid, timeout_s=LIMIT_S)

        def first() -> list[float]:
            return [
                e["mono_s"]
                for e in self._run.events("commit")
                if e["mono_s"] > hit.mono_s and e["data"]["participants"] < self._run.groups
            ]

        self._run.wait_for(first, "a commit without the killed group", LIMIT_S)
        return hit, first()[0] - hit.mono_s

    def start_again(self) -> None:
        self._run.kill(VICTIM)
        self._run.start(VICTIM)

    def _last_rank(self) -> int:
        launcher = ProcessId.of(self._run.processes[VICTIM][0].pid)
        return max(p.pid for p in process.descendants(launcher))

    def calm_step_s(self) -> float:
        """Median time between two commits of all groups."""
        full = [
            (e["step"], e["mono_s"])
            for e in self._run.events("commit")
            if e["data"]["participants"] == self._run.groups
        ]
        pairs = zip(full, full[1:], strict=False)
        return statistics.median(b[1] - a[1] for a, b in pairs if b[0] == a[0] + 1)


def measure(
    folder: Path, groups: int, ranks: int, points: tuple[str, ...], repeats: int
) -> tuple[dict[str, list[float]], float]:
    """Stalls in seconds by the point that was hit, and an undisturbed step."""
    stalls: dict[str, list[float]] = defaultdict(list)
    keys = {**shipped_limits(), "checkpoint__interval": 5, "checkpoint__keep_latest_k": 2}
    with TrainerRun(folder, steps=100000, groups=groups, ranks=ranks, launched=True, **keys) as run:
        run.start_all()
        kills = Kills(run)
        kills.settle()
        for _ in range(repeats):
            for point in points:
                started = time.monotonic()
                hit, stall_s = kills.kill(point)
                stalls[hit.point].append(stall_s)
                print(
                    f"  aimed at {point:18} hit in {hit.point:18} stall {stall_s:6.3f} s "
                    f"({hit.mono_s - started:.1f} s to the point)",
                    flush=True,
                )
                kills.start_again()
                kills.settle()
        steps = [row["step"] for row in run.metrics()]
        if steps != list(range(1, len(steps) + 1)):
            raise SystemExit(f"the history is not 1..N once each: {steps}")
        return dict(stalls), kills.calm_step_s()


def write(path: Path, figures: dict[str, Any], aims: dict[str, Aim]) -> None:
    shown = {n: {"value": a.value, "aim": a.aim, "met": a.met} for n, a in aims.items()}
    path.write_text(json.dumps({"figures": figures, "aims": shown}, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layouts", nargs="+", default=["2", "3", "2x2"])
    parser.add_argument("--points", nargs="+", default=list(POINTS), choices=POINTS)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["TORCHTITAN_RL_FT_TOKEN"] = TOKEN
    figures: dict[str, Any] = {k.split("__")[1]: v for k, v in shipped_limits().items()}
    aims: dict[str, Aim] = {}
    with tempfile.TemporaryDirectory() as temp:
        for layout in args.layouts:
            groups, _, ranks = layout.partition("x")
            print(f"{groups} groups of {ranks or 1}")
            folder = Path(temp) / layout
            points = tuple(args.points)
            stalls, step_s = measure(folder, int(groups), int(ranks or 1), points, args.repeats)
            print(f"{'point':18} {'n':>3} {'median s':>9} {'most s':>7}")
            for point in (p for p in POINTS if p in stalls):
                values = stalls[point]
                print(
                    f"{point:18} {len(values):3} {statistics.median(values):9.3f} "
                    f"{max(values):7.3f}"
                )
                figures[f"{layout}/{point}/median_s"] = statistics.median(values)
                figures[f"{layout}/{point}/most_s"] = max(values)
            print(f"an undisturbed step takes {step_s:.3f} s", flush=True)
            figures[f"{layout}/calm_step_s"] = step_s
            aims[f"{layout}/longest_stall_s"] = Aim(max(max(v) for v in stalls.values()), 3.0)
            if args.out is not None:  # a long run: what is measured is kept
                write(args.out, figures, aims)
    return finish("replica_loss", figures, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
