"""Greedy evaluation on held-out prompts."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.rollout.generation import ServedPolicy
from torchtitan_rl_ft.rollout.group_rollout import Dropped, GroupRollout
from torchtitan_rl_ft.rollout.protocols import Prompt


@dataclass(frozen=True)
class Evaluation:
    """What `eval.json` holds."""

    reward: float | None  # mean over judged prompts; None: none could be judged
    prompts: int
    failed: int
    version: int
    step: int
    answers: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        return {
            "reward/mean": self.reward,
            "prompts": self.prompts,
            "failed": self.failed,
            "policy_version": self.version,
            "step": self.step,
            "answers": self.answers,
        }


async def evaluate(
    rollout: GroupRollout, prompts: Sequence[Prompt], policy: ServedPolicy, concurrency: int
) -> Evaluation:
    """One greedy answer per prompt. A prompt whose generation or reward failed for good is
    counted and left out of the mean."""
    slots = asyncio.Semaphore(concurrency)

    async def answer(i: int, prompt: Prompt) -> dict[str, Any]:
        async with slots:
            result = await rollout.run(f"eval-{policy.version}-{i}", prompt, greedy=True)
        line: dict[str, Any] = {"prompt": prompt.text, "answer": prompt.answer}
        if isinstance(result, Dropped):
            return {**line, "failed": result.reason}
        reward = result.rewards[0]
        return {
            **line,
            "response": result.texts[0],
            "reward": reward if math.isfinite(reward) else None,
            "version": result.min_version,
        }

    answers = await asyncio.gather(*(answer(i, p) for i, p in enumerate(prompts)))
    rewards = [a["reward"] for a in answers if a.get("reward") is not None]
    return Evaluation(
        reward=sum(rewards) / len(rewards) if rewards else None,
        prompts=len(prompts),
        failed=sum("failed" in a for a in answers),
        version=policy.version,
        step=policy.step,
        answers=list(answers),
    )
