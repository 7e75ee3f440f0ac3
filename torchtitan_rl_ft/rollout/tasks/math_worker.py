"""A process that compares answers by math-verify: `python -m ...math_worker`, JSON lines.

    {"answer": "1/2", "response": "... \\\\boxed{0.5}"}  ->  {"score": 1.0}

math-verify interrupts itself by SIGALRM, which works in a main thread only; hence a process.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from math_verify import parse, verify


def score(answer: str, response: str) -> float | None:
    """1 when the response's final answer equals `answer`, else 0; None when `answer` itself is
    not understood."""
    gold: list[Any] = parse(f"\\boxed{{{answer}}}")
    if not gold:
        return None
    return 1.0 if verify(gold, parse(response)) else 0.0


def main() -> None:
    # What libraries print must not mix with the answers.
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps({"ready": True}), file=out)
    for line in sys.stdin:
        question = json.loads(line)
        print(json.dumps({"score": score(question["answer"], question["response"])}), file=out)


if __name__ == "__main__":
    main()
