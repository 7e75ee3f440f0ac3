"""The default task's reward, with one line in the file $COUNTED_REWARDS for each call."""

from __future__ import annotations

import os
import time

from torchtitan_rl_ft.rollout.protocols import Prompt, Response
from torchtitan_rl_ft.rollout.tasks import sorting


def reward(prompt: Prompt, response: Response) -> float:
    with open(os.environ["COUNTED_REWARDS"], "a") as f:
        f.write(f"{prompt.text} {prompt.epoch} {prompt.index} {time.monotonic()}\n")
    return sorting.reward(prompt, response)
