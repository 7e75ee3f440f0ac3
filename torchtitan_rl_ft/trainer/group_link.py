"""One voice per replica group: rank 0 talks to the other roles, all ranks get its answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")


class PeerRankFailed(Exception):
    """Rank 0 of this group could not get an answer; its error is the message."""


class GroupLink:
    """Runs calls on rank 0 and shares value or error with every rank of the group."""

    def __init__(self) -> None:
        self._alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.rank = 0 if self._alone else dist.get_rank()
        self.is_speaker = self.rank == 0

    def ask(self, call: Callable[[], T]) -> T:
        """`call()` of rank 0, on all ranks. What it raises on rank 0, it raises there;
        other ranks raise PeerRankFailed."""
        if self._alone:
            return call()
        if not self.is_speaker:
            ok, value = self._share(None)
            if not ok:
                raise PeerRankFailed(value)
            return value
        try:
            value = call()
        except BaseException as e:
            self._share((False, f"{type(e).__name__}: {e}"))
            raise
        self._share((True, value))
        return value

    def tell(self, call: Callable[[], Any]) -> None:
        """`call()` on rank 0 only; nobody waits for the answer."""
        if self.is_speaker:
            call()

    def gather(self, value: T) -> list[T]:
        """Every rank's `value`, by rank, on all ranks."""
        if self._alone:
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values

    def all_agree(self, mine: bool) -> bool:
        """Whether every rank of the group says so."""
        return all(self.gather(mine))

    @staticmethod
    def _share(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]
