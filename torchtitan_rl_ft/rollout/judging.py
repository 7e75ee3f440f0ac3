"""Rewards and filter of one prompt group: plug-ins called without blocking the event loop."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Sequence
from typing import Any

from torchtitan_rl_ft.rollout.protocols import GroupFilter, Prompt, Response, Reward


class RewardFailed(Exception):
    """The reward or the filter raised, was late, or returned something it must not."""


class Judge:
    """Calls a Reward, plain or async, on the responses of a group, and a GroupFilter."""

    def __init__(
        self, reward: Reward, group_filter: GroupFilter | None = None, *, timeout_s: float
    ) -> None:
        """`timeout_s`: limit for the rewards of one group."""
        self._reward, self._filter, self._timeout_s = reward, group_filter, timeout_s
        called = reward if inspect.isroutine(reward) else reward.__call__
        self._is_async = inspect.iscoroutinefunction(called)

    async def rewards(self, prompt: Prompt, responses: Sequence[Response]) -> list[float]:
        """One finite number per response, NaN where it cannot be judged. Raises RewardFailed."""
        try:
            async with asyncio.timeout(self._timeout_s):
                values = await self._called(prompt, responses)
        except TimeoutError as e:
            raise RewardFailed(f"no reward within {self._timeout_s:g} s") from e
        except Exception as e:  # user code: whatever it raises is the prompt's failure, recorded
            raise RewardFailed(f"{type(e).__name__}: {e}") from e
        return [_number(value) for value in values]

    async def _called(self, prompt: Prompt, responses: Sequence[Response]) -> list[Any]:
        if self._is_async:
            return list(await asyncio.gather(*(self._reward(prompt, r) for r in responses)))
        return await asyncio.to_thread(lambda: [self._reward(prompt, r) for r in responses])

    def reason_to_drop(self, prompt: Prompt, rewards: Sequence[float]) -> str | None:
        """What the filter says; None without one. Raises RewardFailed."""
        if self._filter is None:
            return None
        try:
            return self._filter(prompt, rewards)
        except Exception as e:  # as above
            raise RewardFailed(f"filter: {type(e).__name__}: {e}") from e

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
