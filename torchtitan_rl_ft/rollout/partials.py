"""Unfinished samples: what has come of a group is kept, and generation goes on from there.

Pieces are journaled beside the loop, those that came meanwhile in one transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torchtitan_rl_ft.journal.partials import Piece
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.rollout.generation import HeldSample


@dataclass
class Draft:
    """A sample so far. The lists have one length."""

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def take(self, piece: Piece) -> bool:
        """False when there is a gap before the piece: nothing is taken."""
        if not 0 <= piece.start <= len(self.output_ids):
            return False
        del self.output_ids[piece.start :], self.logprobs[piece.start :]
        del self.versions[piece.start :]
        self.output_ids += piece.output_ids
        self.logprobs += piece.logprobs
        self.versions += piece.versions
        self.finish_reason = piece.finish_reason
        return True

    def held(self) -> HeldSample:
        return HeldSample(
            list(self.output_ids), list(self.logprobs), list(self.versions), self.finish_reason
        )


class Unfinished:
    """What there is of one group's samples. `keep` is given every piece that is taken."""

    def __init__(
        self, samples: int, keep: Callable[[Sequence[Piece]], None] = lambda pieces: None
    ) -> None:
        self._drafts = [Draft() for _ in range(samples)]
        self._keep = keep
        self.grew = False
        """Something has come since this was last set to False."""

    @property
    def tokens(self) -> int:
        return sum(len(draft.output_ids) for draft in self._drafts)

    @property
    def oldest_version(self) -> int | None:
        """Of all tokens; None when there are none."""
        return min((v for draft in self._drafts for v in draft.versions), default=None)

    def load(self, pieces: Sequence[Piece]) -> None:
        """What the journal has. Pieces of samples that are not asked for any more are left, and
        those after a gap."""
        whole = set(range(len(self._drafts)))
        for piece in pieces:
            if piece.sample in whole and not self._drafts[piece.sample].take(piece):
                whole.remove(piece.sample)

    def take(self, pieces: Sequence[Piece]) -> None:
        """What has come. Raises ValueError when it does not follow what was there."""
        for piece in pieces:
            if not (
                0 <= piece.sample < len(self._drafts) and self._drafts[piece.sample].take(piece)
            ):
                raise ValueError(f"sample {piece.sample} does not go on at token {piece.start}")
            self.grew = True
        self._keep(pieces)

    def held(self) -> list[HeldSample]:
        """For the next request; nothing when there is nothing."""
        return [draft.held() for draft in self._drafts] if self.tokens else []

    def clear(self) -> int:
        """Start anew; returns the number of tokens forgotten."""
        forgotten = self.tokens
        if forgotten:
            self.take([Piece(i, 0, [], [], []) for i in range(len(self._drafts))])
        return forgotten


class PartialKeeper:
    """Journals pieces of all groups. `interval_tokens` is `recovery.partial_interval_tokens`."""

    def __init__(self, journal: Journal, events: EventSink, interval_tokens: int) -> None:
        self._journal, self._events = journal, events
        self.interval_tokens = interval_tokens
        self._waiting: dict[int, list[Piece]] = {}
        self._came = asyncio.Event()

    def of(self, group_id: int, samples: int) -> Unfinished:
        """What an earlier life has left of a group, to be gone on with."""

        def keep(pieces: Sequence[Piece]) -> None:
            self._waiting.setdefault(group_id, []).extend(pieces)
            self._came.set()

        unfinished = Unfinished(samples, keep)
        if self.interval_tokens:
            unfinished.load(self._journal.partial(group_id))
        if unfinished.tokens:
            self._events.emit(
                Kind.PARTIAL, phase="resume", group=group_id, tokens=unfinished.tokens
            )
        return unfinished

    async def run(self) -> None:
        """Never ends by itself. Raises JournalError."""
        while True:
            await self._came.wait()
            self._came.clear()
            pieces, self._waiting = self._waiting, {}
            await asyncio.to_thread(self._journal.keep_partials, pieces)
