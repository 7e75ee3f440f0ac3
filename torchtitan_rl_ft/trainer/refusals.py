"""How often a step may be refused before a group gives up."""

from __future__ import annotations

from dataclasses import dataclass


class TooManyRefusals(Exception):
    """The same members refused the same step again and again."""


@dataclass
class Refusals:
    """Counts refused commits in a row while step and members are unchanged.

    A flapping joiner changes the members each time and must not end healthy groups; torchft's
    own counter does not know them.
    """

    limit: int
    _key: tuple[int, tuple[str, ...]] = (-1, ())
    _count: int = 0

    def refused(self, step: int, members: list[str], cause: str) -> None:
        """Raises TooManyRefusals with the last cause."""
        key = (step, tuple(members))
        self._count = self._count + 1 if key == self._key else 1
        self._key = key
        if self._count > self.limit:
            raise TooManyRefusals(
                f"step {step} was refused {self._count} times by the same {len(members)} group(s); "
                f"last cause: {cause}. The limit is fault_tolerance.max_commit_retries = "
                f"{self.limit}"
            )
