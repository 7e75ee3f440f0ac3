"""The default task: write two digits in ascending order.

    prompt "73>"    answer "37"

Prompts are made by rule and answers judged by rule. A fifth of them is held out, spread so that
every digit is seen in every place during training.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchtitan_rl_ft.rollout.protocols import PluginContext, Prompt, Response
from torchtitan_rl_ft.rollout.tasks.shuffled import ShuffledVisits

END_OF_PROMPT = ">"
DIGITS = 2


def answer_of(digits: str) -> str:
    return "".join(sorted(digits))


def is_held_out(first: int, second: int) -> bool:
    """Every digit is held out in two of its ten pairs, in either place; of a pair and its
    mirror image, if they differ, hardly ever both."""
    return (first + 3 * second) % 5 == 0


class SortDigits:
    """DataSource of the task."""

    def __init__(self, context: PluginContext) -> None:
        pairs = [(a, b) for a in range(10) for b in range(10)]
        self._train = [f"{a}{b}" for a, b in pairs if not is_held_out(a, b)]
        self._held_out = [f"{a}{b}" for a, b in pairs if is_held_out(a, b)]
        self._visits = ShuffledVisits(len(self._train), context.seed)

    def next(self, n: int) -> Sequence[Prompt]:
        return [_prompt(self._train[i], epoch, i) for epoch, i in self._visits.next(n)]

    def held_out(self, n: int) -> Sequence[Prompt]:
        return [_prompt(digits, 0, i) for i, digits in enumerate(self._held_out[:n])]

    def state_dict(self) -> dict[str, Any]:
        return self._visits.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._visits.load_state_dict(state)


def _prompt(digits: str, epoch: int, index: int) -> Prompt:
    return Prompt(digits + END_OF_PROMPT, answer_of(digits), epoch, index)


def reward(prompt: Prompt, response: Response) -> float:
    """Share of right places, in [0, 1]; an answer that is too long is judged over its own
    length, so that writing more never pays. Every token but the final end token counts, also
    those that leave no text: only an answer that ends itself gets 1."""
    answer, given = prompt.answer, response.text
    right = sum(a == b for a, b in zip(answer, given, strict=False))
    length = len(response.token_ids) - (response.finish_reason == "stop")
    return right / max(len(answer), length)
