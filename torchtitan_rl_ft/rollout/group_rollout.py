"""One prompt group from prompt to rewarded samples: generate, judge, filter, with bounded
retries."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from torchtitan_rl_ft.journal.drop_kinds import FILTER, GENERATION, REWARD
from torchtitan_rl_ft.rollout.generation import (
    UNAVAILABLE_RETRY_S,
    Generated,
    GenerateRequest,
    GenerationFailed,
    Generator,
    ServingUnavailable,
    pause,
    sample_seed,
)
from torchtitan_rl_ft.rollout.judging import Judge, RewardFailed
from torchtitan_rl_ft.rollout.partials import Unfinished
from torchtitan_rl_ft.rollout.protocols import Prompt, Response
from torchtitan_rl_ft.rollout.sample_times import GroupTimes
from torchtitan_rl_ft.rollout.sealing import Sample, group_arrays


@dataclass(frozen=True)
class Sampling:
    """How answers are drawn."""

    samples: int
    params: Mapping[str, Any]  # SGLang's names
    run_seed: int
    timeout_s: float
    max_failures: int
    partial_interval_tokens: int = 0
    trace: bool = False
    """Note what each sample goes through."""

    @property
    def greedy(self) -> Sampling:
        """One answer per prompt, the likeliest token each time."""
        params = {**self.params, "temperature": 0.0, "top_p": 1.0, "top_k": 1}
        return dataclasses.replace(
            self, samples=1, params=params, partial_interval_tokens=0, trace=False
        )


@dataclass(frozen=True)
class RolledOut:
    """A group to accept."""

    arrays: dict[str, np.ndarray]  # sealing.GROUP_ARRAYS
    texts: list[str]
    rewards: list[float]
    min_version: int
    max_version: int
    failures: int = 0
    """Tries before this one."""

    trace: dict[str, Any] | None = None  # sample_times.py


@dataclass(frozen=True)
class Dropped:
    """A group that is not worth another try."""

    reason: str
    failures: int = 0


class GroupRollout:
    """Rolls out groups one at a time; safe to use from many tasks."""

    def __init__(
        self,
        generator: Generator,
        tokenizer: Tokenizer,
        judge: Judge,
        sampling: Sampling,
        *,
        on_unavailable: Callable[[str], None],
        on_available: Callable[[], None],
        on_failed: Callable[[str], None] = lambda reason: None,
        on_discarded: Callable[[str, str, int], None] = lambda name, cause, tokens: None,
        mono_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_unavailable(reason)` is told of each try that found no serving, `on_available` of
        each answer: the caller decides how long that may go on. `on_failed(reason)` is told of each
        other try that failed. `on_discarded(name, cause,
        tokens)` is told of unfinished samples that are not gone on with."""
        self._generator, self._tokenizer = generator, tokenizer
        self._judge, self._sampling = judge, sampling
        self._on_discarded, self._mono_s = on_discarded, mono_s
        self._on_unavailable, self._on_available = on_unavailable, on_available
        self._on_failed = on_failed

    @property
    def samples(self) -> int:
        """Of a group."""
        return self._sampling.samples

    def encode(self, prompt: Prompt) -> list[int]:
        return self._tokenizer.encode(prompt.text, add_special_tokens=False).ids

    async def run(
        self,
        name: str,
        prompt: Prompt,
        *,
        greedy: bool = False,
        unfinished: Unfinished | None = None,
        why_useless: Callable[[int], str | None] = lambda oldest_version: None,
    ) -> RolledOut | Dropped:
        """Generate and judge until it works or `max_failures` tries have failed.

        `name` names the group in request ids. Waits while serving is unavailable. Every try goes
        on from what is `unfinished`, unless `why_useless` of its oldest version says why not, or
        nothing came of it.
        """
        sampling = self._sampling.greedy if greedy else self._sampling
        input_ids = self.encode(prompt)
        unfinished = unfinished or Unfinished(sampling.samples)
        failures = unavailable = 0
        started_s = self._mono_s()
        while True:
            self._discard_useless(name, unfinished, why_useless)
            unfinished.grew = False
            request = self._request(f"{name}.{failures}", input_ids, prompt, sampling, unfinished)
            asked_s = self._mono_s()
            try:
                generated = await self._generator.generate(request, unfinished.take)
                self._on_available()
                generated_s = self._mono_s()
                result = await self._judged(prompt, input_ids, generated, filtered=not greedy)
                result = dataclasses.replace(result, failures=failures)
                if not sampling.trace or isinstance(result, Dropped):
                    return result
                legs = [g.legs for g in generated]
                tries = failures + unavailable
                times = GroupTimes(started_s, asked_s, generated_s, self._mono_s(), tries, legs)
                return dataclasses.replace(result, trace=times.to_json(result.rewards))
            except ServingUnavailable as e:
                self._on_unavailable(str(e))
                await pause(unavailable, longest_s=UNAVAILABLE_RETRY_S)
                unavailable += 1
            except (GenerationFailed, RewardFailed) as e:
                failures += 1
                self._on_failed(str(e))
                if not unfinished.grew:  # it may be the fault of what it was to go on from
                    unfinished.clear()
                if failures >= sampling.max_failures:
                    kind = GENERATION if isinstance(e, GenerationFailed) else REWARD
                    reason = f"{kind} failed {failures} times, the last one: {e}"
                    return Dropped(reason, failures)
                await pause(failures - 1)

    def _discard_useless(
        self, name: str, unfinished: Unfinished, why_useless: Callable[[int], str | None]
    ) -> None:
        oldest = unfinished.oldest_version
        if oldest is not None and (cause := why_useless(oldest)) is not None:
            self._on_discarded(name, cause, unfinished.clear())

    def _request(
        self,
        request_id: str,
        input_ids: Sequence[int],
        prompt: Prompt,
        sampling: Sampling,
        unfinished: Unfinished,
    ) -> GenerateRequest:
        seeds = [
            sample_seed(sampling.run_seed, prompt.epoch, prompt.index, i)
            for i in range(sampling.samples)
        ]
        return GenerateRequest(
            request_id,
            input_ids,
            sampling.samples,
            sampling.params,
            seeds,
            sampling.timeout_s,
            unfinished.held(),
            sampling.partial_interval_tokens,
            sampling.trace,
        )

    async def _judged(
        self,
        prompt: Prompt,
        input_ids: Sequence[int],
        generated: Sequence[Generated],
        *,
        filtered: bool,
    ) -> RolledOut | Dropped:
        responses = [
            Response(
                self._tokenizer.decode(list(g.output_ids), skip_special_tokens=True),
                g.output_ids,
                g.finish_reason,
            )
            for g in generated
        ]
        rewards = await self._judge.rewards(prompt, responses)
        reason = self._judge.reason_to_drop(prompt, rewards) if filtered else None
        if reason is not None:
            return Dropped(f"{FILTER}: {reason}")
        samples = [
            Sample(g.output_ids, g.logprobs, g.versions, g.finish_reason == "length", r)
            for g, r in zip(generated, rewards, strict=True)
        ]
        return RolledOut(
            group_arrays(input_ids, samples),
            [r.text for r in responses],
            rewards,
            min(g.min_version for g in generated),
            max(g.max_version for g in generated),
        )
