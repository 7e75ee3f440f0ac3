"""A serving that answers at once, and what else tests of the rollout loop are made of."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

from journal_cases import split

from torchtitan_rl_ft.journal.exits import ExitNote
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.protocol import State
from torchtitan_rl_ft.journal.records import CommitRecord, Member, SealedBatch, next_token
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.models.tiny import EOS, tiny_tokenizer
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.rollout.dump_writer import DumpSettings, DumpWriter
from torchtitan_rl_ft.rollout.engine_check import EngineCheck
from torchtitan_rl_ft.rollout.generation import (
    Generated,
    GenerateRequest,
    Keep,
    ServedPolicy,
    ServingUnavailable,
)
from torchtitan_rl_ft.rollout.group_rollout import GroupRollout, Sampling
from torchtitan_rl_ft.rollout.judging import Judge
from torchtitan_rl_ft.rollout.loop import LoopSettings, RolloutLoop
from torchtitan_rl_ft.rollout.partials import PartialKeeper
from torchtitan_rl_ft.rollout.policy_watch import PolicyWatch
from torchtitan_rl_ft.rollout.protocols import PluginContext
from torchtitan_rl_ft.rollout.schedule import Rules
from torchtitan_rl_ft.rollout.starvation import Starvation
from torchtitan_rl_ft.rollout.tasks.sorting import SortDigits, reward

TOKENIZER = tiny_tokenizer()
MEMBER = Member(0, "uuid-0", 1, 0.0, "elsewhere")


def context(seed: int = 0) -> PluginContext:
    return PluginContext(seed, TOKENIZER, Path("nowhere"))


class ScriptedServing:
    """Generator: sample i of a prompt "ab>" is right where seed + i is even, else "00"."""

    def __init__(self) -> None:
        self.served: ServedPolicy | None = None
        self.requests: list[GenerateRequest] = []
        self.fail: Callable[[GenerateRequest], Exception | None] = lambda request: None
        self.held: asyncio.Event | None = None  # when set, answers wait for it
        self.version_of: Callable[[GenerateRequest], int] | None = None
        self.checks: list[float] = []  # limits
        self.check_held: asyncio.Event | None = None
        self.check_fails: Exception | None = None
        self._changed = asyncio.Event()

    def serve(self, version: int, state: State) -> None:
        self.served = ServedPolicy(version, state.step, state.token)
        self._changed.set()

    async def policy(self, after: int, timeout_s: float) -> ServedPolicy | None:
        while self.served is None or self.served.version <= after:
            self._changed.clear()
            await self._changed.wait()
        return self.served

    async def check(self, timeout_s: float) -> list[int]:
        self.checks.append(timeout_s)
        if self.check_held is not None:
            await self.check_held.wait()
        if self.check_fails is not None:
            raise self.check_fails
        return []

    async def generate(
        self, request: GenerateRequest, keep: Keep = lambda pieces: None
    ) -> list[Generated]:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.served is None:
            raise ServingUnavailable("no engine")
        version = self.version_of(request) if self.version_of else self.served.version
        if self.held is not None:
            await self.held.wait()
        if (error := self.fail(request)) is not None:
            raise error
        digits = TOKENIZER.decode(list(request.input_ids), skip_special_tokens=True)[:2]
        samples = []
        for i in range(request.n):
            text = "".join(sorted(digits)) if i % 2 == 0 else "00"
            ids = [*TOKENIZER.encode(text).ids, TOKENIZER.token_to_id(EOS)]
            samples.append(Generated(ids, [-0.5] * 3, [version] * 3, "stop", version, version))
        return samples


class Host:
    """A rollout loop over a real journal and ledger."""

    def __init__(
        self,
        folder: Path,
        serving: ScriptedServing,
        *,
        mode: str = "sync",
        max_policy_age: int = 0,
        groups: int = 3,
        samples: int = 4,
        steps: int = 3,
        start_fraction: float = 0.5,
        reward=reward,
        group_filter=None,
        source=None,
        max_prompt_tokens: int = 16,
        max_failures: int = 3,
        eval_prompts: int = 0,
        unavailable_limit_s: float = 30.0,
        trainers: bool = True,
        dumps: DumpSettings | None = None,
        health_check_timeout_s: float = 2.0,
        durable: bool = True,
        partial_interval_tokens: int = 0,
        attempt: str = "job",
        trace: bool = False,
        limits: Mapping[str, float] | None = None,
    ) -> None:
        self.serving = serving
        self.events = EventList()
        self.journal = Journal.open(folder / "journal", events=self.events, durable=durable)
        self.ledger = Ledger(
            self.journal,
            events=self.events,
            metrics_path=folder / "metrics.jsonl",
            why_incomplete=lambda checkpoint: None,
        )
        starvation = Starvation(
            self.events,
            unavailable_limit_s=unavailable_limit_s,
            groups_per_step=groups,
            mono_s=lambda: asyncio.get_running_loop().time(),
            **(limits or {}),  # type: ignore[arg-type]
        )
        self.rollout = GroupRollout(
            serving,
            TOKENIZER,
            Judge(reward, group_filter, timeout_s=10.0),
            Sampling(
                samples,
                {"temperature": 1.0},
                0,
                10.0,
                max_failures,
                partial_interval_tokens,
                trace,
            ),
            on_unavailable=starvation.unavailable,
            on_available=starvation.available,
            on_failed=starvation.failed,
            on_discarded=lambda name, cause, tokens: self.events.emit(
                Kind.PARTIAL, phase="discard", cause=cause, subject=name, tokens=tokens
            ),
        )
        watch = PolicyWatch(serving, on_change=lambda: self.loop.wake())
        self.eval_path = folder / "eval.json"
        writer = None
        if dumps is not None:
            writer = DumpWriter(
                self.journal, TOKENIZER, dumps, self.events, on_written=lambda: self.loop.wake()
            )
        self.loop = RolloutLoop(
            self.ledger,
            source or SortDigits(context()),
            self.rollout,
            watch,
            starvation,
            LoopSettings(
                rules=Rules(mode, start_fraction, max_policy_age, groups, steps),
                advantage_norm="std",
                loss_norm="token",
                newest_version_only=False,
                max_group_crashes=3,
                max_concurrent_groups=64,
                max_prompt_tokens=max_prompt_tokens,
                eval_prompts=eval_prompts,
                eval_path=self.eval_path,
                drain_timeout_s=2.0,
                final_policy_timeout_s=5.0,
                trainers=trainers,
            ),
            self.events,
            dumps=writer,
            drain_note=ExitNote(folder / "drain.json", attempt),
            partials=PartialKeeper(self.journal, self.events, partial_interval_tokens),
            engine_check=EngineCheck(
                serving, self.events, health_check_timeout_s, on_done=lambda: self.loop.wake()
            ),
        )

    def publish(self) -> None:
        """Serve the policy of the tip as the next version."""
        served = self.serving.served
        self.serving.serve(1 if served is None else served.version + 1, self.journal.tip)

    async def batch(self, timeout_s: float = 5.0) -> SealedBatch:
        """The batch to train next, once it is sealed."""
        async with asyncio.timeout(timeout_s):
            while self.journal.head() is None:
                await asyncio.sleep(0.005)
        return self.journal.batch(self.journal.head().batch_id)

    async def train(self, *, publish: bool = True) -> SealedBatch:
        """Commit the next step as a trainer would, and publish."""
        batch = await self.batch()
        tip, head = self.journal.tip, self.journal.head()
        record = CommitRecord(
            tip.step + 1,
            head.batch_id,
            head.digest,
            tip.token,
            next_token(tip.token, head.digest, 7),
            1,
            1,
            split(batch, 1),
        )
        self.ledger.committed(MEMBER, record, {})
        if publish:
            self.publish()
        return batch

    def kinds(self, kind: str) -> list[dict]:
        return [e for e in self.events.events if e["kind"] == kind]

    def close(self) -> None:
        self.journal.close()


class Running:
    """`async with Running(host)`: the loop runs; its end is `await running.ended`."""

    def __init__(self, host: Host) -> None:
        self.host = host

    async def __aenter__(self) -> asyncio.Task:
        self.task = asyncio.create_task(self.host.loop.run())
        return self.task

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        self.host.close()
