"""What is wrong with a configuration, for people: one line per problem, each with its place."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ConfigError(Exception):
    """The configuration cannot be used. Each problem says what, where and how to mend it."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def near_miss(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the closest known word, empty when none is close."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{found[0]}'?" if found else ""
