"""Rollout-only: without a trainer, the initial weights are announced by the rollout role."""

from __future__ import annotations

import asyncio
from pathlib import Path

from torchtitan_rl_ft.journal.records import GENESIS
from torchtitan_rl_ft.rollout.generation import (
    GenerationFailed,
    ServingClient,
    ServingUnavailable,
    pause,
)
from torchtitan_rl_ft.rollout.starvation import RolloutStalled
from torchtitan_rl_ft.weights.initial import release_directory
from torchtitan_rl_ft.weights.manifest import WeightsInvalid

PUBLISH_TIMEOUT_S = 60.0


async def announce_initial_policy(
    client: ServingClient, model_path: Path, weights: Path, limit_s: float
) -> int:
    """Publish the weights in `model_path` as step 0; the version that they got.

    Waits for serving for at most `limit_s`. Raises RolloutStalled when it does not come up or
    refuses the weights.
    """
    target = weights / f"step-0-{GENESIS[:8]}"
    try:
        digest = await asyncio.to_thread(
            release_directory, model_path, target, step=0, token=GENESIS
        )
    except WeightsInvalid as e:
        raise RolloutStalled(f"the model in {model_path} cannot be served: {e}") from e
    end = asyncio.get_running_loop().time() + limit_s
    tries = 0
    while True:
        try:
            return await client.publish(0, GENESIS, target, digest, PUBLISH_TIMEOUT_S)
        except GenerationFailed as e:
            raise RolloutStalled(f"serving refused the weights in {model_path}: {e}") from e
        except ServingUnavailable as e:
            if asyncio.get_running_loop().time() >= end:
                raise RolloutStalled(f"serving did not come up within {limit_s:g} s: {e}") from e
            await pause(tries, longest_s=2.0)
            tries += 1
