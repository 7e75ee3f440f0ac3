"""The other roles of a run for trainer tests: a real ledger with made-up batches, and a serving
that only counts versions, and reads them where sources hold them. Real SGLang and rollouts are in
the integration tests of the whole job.

    python tests/fakes/run_host.py RUN_FOLDER --steps 8 [--ahead 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import itertools
import sys
from pathlib import Path

import numpy as np
from aiohttp import web

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.host.loop_beats import beating
from torchtitan_rl_ft.journal.checkpoints import checker, finder
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.records import SealedBatch
from torchtitan_rl_ft.journal.service import routes
from torchtitan_rl_ft.journal.store import Journal, NewGroup
from torchtitan_rl_ft.observability.events import EventLog
from torchtitan_rl_ft.roles.exits import exits_of
from torchtitan_rl_ft.rpc.server import error_response, make_app, start
from torchtitan_rl_ft.run_folder import RunFolder

sys.path.insert(0, str(Path(__file__).parent))
from source_reader import SourceReader  # noqa: E402

VOCAB = 16
LAST_STEP = "last_step"
"""A file in the run folder: the run ends at the step that it names (beyond the batches sealed)."""


def made_up_batch(
    step: int, seed: int, group_ids: list[int], samples: int = 4, longest: int = 8
) -> SealedBatch:
    """`samples` answers of 1..`longest` tokens per group: a pure function of the arguments."""
    rng = np.random.default_rng([seed, step])
    groups = len(group_ids)
    n = groups * samples
    prompts, answers = rng.integers(2, 6, n), rng.integers(1, longest + 1, n)
    lengths = prompts + answers
    total = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    mask = np.zeros(total, np.uint8)
    for i in range(n):
        mask[offsets[i] + prompts[i] : offsets[i + 1]] = 1
    rewards = rng.random(n).astype(np.float32)
    advantages = rewards - rewards.reshape(groups, samples).mean(1).repeat(samples)
    logprobs = np.where(mask, -np.log(VOCAB) + rng.normal(0, 0.1, total), 0.0)
    arrays = {
        "tokens": rng.integers(3, VOCAB, total).astype(np.int32),
        "sample_offsets": offsets.astype(np.int64),
        "prompt_lens": prompts.astype(np.int32),
        "logprobs": logprobs.astype(np.float32),
        "loss_mask": mask,
        "versions": np.where(mask, step, -1).astype(np.int32),
        "weights": (mask / mask.sum()).astype(np.float32),
        "advantages": advantages.astype(np.float32),
        "rewards": rewards,
        "group_ids": np.repeat(group_ids, samples).astype(np.int64),
    }
    meta = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "policy_version": step,
        "policy_age/mean": 0.0,
    }
    return SealedBatch(0, arrays, meta)


def seal_one(journal: Journal, args: argparse.Namespace) -> None:
    step = len(journal.plan) + 1
    pending = {group.group_id for group in journal.pending()}
    ids = sorted(pending | {group.group_id for group in journal.accepted()})
    if not ids:  # else a life before this one was killed between issuing and sealing
        keys = [NewGroup({"n": i}, f"{step}:{i}") for i in range(args.groups)]
        ids = journal.issue(keys, {"step": step})
        pending = set(ids)
    for group_id in sorted(pending):
        journal.accept(group_id, {"x": np.zeros(1)})
    batch = made_up_batch(step, args.seed, ids, args.samples, args.longest)
    if step == args.nan_step:
        batch.arrays["advantages"][0] = np.nan
    journal.seal(batch, ids)


def obey_orders(run: RunFolder) -> None:
    """RUN/hold-host: hold the interpreter, and the event loop, in a call of C. While RUN/pause-host
    is there, nothing is sealed."""
    order = run.path / "hold-host"
    if order.exists():
        order.unlink()
        ctypes.PyDLL(None).sleep(600)


async def host(run: RunFolder, args: argparse.Namespace) -> None:
    steps, resolved = args.steps, Resolved.read(run.path)
    events = EventLog(run.events, run=run.path.name, role="rollout", name="rollout")
    journal = Journal.open(run.journal, events=events)
    ledger = Ledger(
        journal,
        events=events,
        metrics_path=run.metrics,
        why_incomplete=checker(run.path),
        find_checkpoints=finder(run.path / "checkpoint"),
        keep_checkpoints=int(resolved.get("checkpoint.keep_latest_k")),
        last_step=steps,
        exits=exits_of(resolved),
    )
    versions: dict[tuple[int, str], int] = {}
    counter = itertools.count(1)
    reader = SourceReader(run, resolved.sections.weights, events)

    async def publish(request: web.Request) -> web.Response:
        body = await request.json()
        if "path" in body:
            assert (Path(body["path"]) / "manifest.json").exists()
        elif await reader.fetch(body) is None:
            return error_response(503, "no source has all of it")
        version = versions.setdefault((body["step"], body["token"]), 0) or next(counter)
        versions[(body["step"], body["token"])] = version
        return web.json_response({"version": version, "installed": []})

    own = [web.post("/v1/publish", publish), *reader.routes()]
    app = make_app(run.token(), [*routes(ledger), *own])
    url, runner = await start(app)
    run.register("rollout", url)
    run.register("serving", url)
    async with beating(run.phases, "rollout"):
        while journal.tip.step < steps and ledger.outcome is None:
            obey_orders(run)
            if (run.path / LAST_STEP).exists():
                steps = min(steps, int((run.path / LAST_STEP).read_text()))
            wanted = len(journal.plan) < min(steps, journal.tip.step + args.ahead)
            if wanted and not (run.path / "pause-host").exists():
                seal_one(journal, args)
            await asyncio.sleep(args.slow_s)
    last = journal.tip
    while journal.version_of(last) is None and ledger.outcome is None:
        await asyncio.sleep(0.02)
    ledger.set_outcome("done", f"{steps} steps")  # the first outcome stays
    if ledger.outcome is not None and ledger.outcome.kind == "requeue":
        while any(m["alive"] for m in ledger.status()["members"]):
            await asyncio.sleep(0.02)
    else:
        await asyncio.sleep(5)
    await runner.cleanup()
    journal.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--ahead", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", type=int, default=4, help="prompt groups of a batch")
    parser.add_argument("--samples", type=int, default=4, help="samples of a group")
    parser.add_argument("--longest", type=int, default=8, help="tokens of the longest answer")
    parser.add_argument("--slow-s", type=float, default=0.01, help="pause between two seals")
    parser.add_argument("--nan-step", type=int, default=0, help="batch with a NaN advantage")
    args = parser.parse_args()
    asyncio.run(host(RunFolder(args.run), args))


if __name__ == "__main__":
    main()
