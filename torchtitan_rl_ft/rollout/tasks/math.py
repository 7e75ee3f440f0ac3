"""Mathematics: problems from a JSON-lines file, answers compared by math-verify.

rl.data_source = "torchtitan_rl_ft.rollout.tasks.math:MathProblems?path=math.jsonl"
rl.reward      = "torchtitan_rl_ft.rollout.tasks.math:MathReward"
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.rollout.chat import ChatTemplate
from torchtitan_rl_ft.rollout.protocols import PluginContext, Prompt, Response
from torchtitan_rl_ft.rollout.tasks.shuffled import ShuffledVisits
from torchtitan_rl_ft.rollout.worker_pool import WorkerPool, WorkerTimeout

logger = logging.getLogger(__name__)

INSTRUCTION = "Reason step by step, and put your final answer within \\boxed{}."
DEFAULT_HELD_OUT = 100
TIMEOUT_S = 15.0  # math-verify gives each parse and each comparison 5 s


class MathProblems:
    """DataSource over lines {"problem": text, "answer": text}.

    Options: `path` (required); `held_out`, how many problems are kept for evaluation (100, at
    most a tenth): those with the smallest hash, so that the choice survives appended lines better
    than one by position.
    """

    def __init__(self, context: PluginContext) -> None:
        """Raises ValueError, OSError."""
        if "path" not in context.options:
            raise ValueError('name the file of problems: "...:MathProblems?path=FILE.jsonl"')
        problems = read_problems(Path(context.options["path"]))
        count = min(int(context.options.get("held_out", DEFAULT_HELD_OUT)), len(problems) // 10)
        ranked = sorted(problems, key=lambda p: hashlib.sha256(p[0].encode()).digest())
        kept_out = set(ranked[:count])
        self._held_out = ranked[:count]
        self._train = [p for p in problems if p not in kept_out]
        self._visits = ShuffledVisits(len(self._train), context.seed)
        self._chat = ChatTemplate.of(context.model_path)

    def next(self, n: int) -> Sequence[Prompt]:
        return [self._prompt(self._train[i], epoch, i) for epoch, i in self._visits.next(n)]

    def held_out(self, n: int) -> Sequence[Prompt]:
        return [self._prompt(p, 0, i) for i, p in enumerate(self._held_out[:n])]

    def state_dict(self) -> dict[str, Any]:
        return self._visits.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._visits.load_state_dict(state)

    def _prompt(self, problem: tuple[str, str], epoch: int, index: int) -> Prompt:
        text, answer = problem
        return Prompt(self._chat.user_turn(f"{text}\n{INSTRUCTION}"), answer, epoch, index)


def read_problems(path: Path) -> list[tuple[str, str]]:
    """(problem, answer) of each line; equal problems once. Raises OSError, ValueError with file
    and line."""
    problems: dict[str, str] = {}
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                problem, answer = row["problem"], str(row["answer"])
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(
                    f'{path}:{number}: not an object with "problem" and "answer": '
                    f"{type(e).__name__}: {e}"
                ) from e
            problems.setdefault(str(problem), answer)
    if not problems:
        raise ValueError(f"{path} holds no problems")
    return list(problems.items())


class MathReward:
    """1 for an answer that math-verify finds equal, else 0; None when the file's own answer is
    not understood. Options: `workers` (processes), `timeout_s` (for one comparison; a response
    whose comparison takes longer gets 0)."""

    def __init__(self, context: PluginContext) -> None:
        workers = int(context.options.get("workers", min(8, os.cpu_count() or 1)))
        timeout_s = float(context.options.get("timeout_s", TIMEOUT_S))
        command = [sys.executable, "-m", "torchtitan_rl_ft.rollout.tasks.math_worker"]
        self._pool = WorkerPool(command, size=workers, timeout_s=timeout_s)

    async def __call__(self, prompt: Prompt, response: Response) -> float | None:
        """Raises WorkerDied, OSError: the comparison could not be made."""
        try:
            answer = await self._pool.ask({"answer": prompt.answer, "response": response.text})
        except WorkerTimeout as e:
            logger.warning("problem %d: %s to compare a response; it gets 0", prompt.index, e)
            return 0.0
        return answer["score"]

    async def close(self) -> None:
        await self._pool.close()
