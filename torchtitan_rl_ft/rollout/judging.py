"""Rewards of one prompt group: plug-ins called without blocking the event loop."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from typing import Any

from torchtitan_rl_ft.rollout.protocols import Prompt, Response, Reward


class RewardFailed(Exception):
    """The reward raised, or returned something that is no number."""


class Judge:
    """Calls a Reward, plain or async, on the responses of a group."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        called = reward if inspect.isroutine(reward) else reward.__call__
        self._is_async = inspect.iscoroutinefunction(called)

    async def rewards(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        """One finite number per response, NaN where it cannot be judged. Raises RewardFailed."""
        try:
            if self._is_async:
                values = await asyncio.gather(*(self._reward(prompt, r) for r in responses))
            else:
                values = await asyncio.to_thread(
                    lambda: [self._reward(prompt, r) for r in responses]
                )
        except Exception as e:  # user code: whatever it raises is the prompt's failure, recorded
            raise RewardFailed(f"{type(e).__name__}: {e}") from e
        return [_number(value) for value in values]

    async def close(self) -> None:
        """Release what the reward holds, when it has a `close`."""
        close = getattr(self._reward, "close", None)
        if callable(close) and inspect.isawaitable(result := close()):
            await result


def _number(value: Any) -> float:
    if value is None:
        return math.nan
    try:
        number = float(value)
    except (TypeError, ValueError) as e:
        raise RewardFailed(f"the reward {value!r} is no number") from e
    return number if math.isfinite(number) else math.nan
