"""Rendezvous keys that stay unique across lighthouse restarts.

torchft names the store prefix of a new process group after the quorum id alone. After a
lighthouse restart ids start over, so a key can repeat and crash or stall survivors; and members
can change under an equal id. This wraps the manager's client: the id that torchft sees changes
whenever the members or the lighthouse's id change, or this group has missed a quorum, and names
members, id and step together.
"""

from __future__ import annotations

import hashlib
from typing import Any

ID_BITS = 48


class QuorumView:
    """A quorum result with `quorum_id` replaced; everything else is the lighthouse's."""

    def __init__(self, result: Any, quorum_id: int) -> None:
        self._result = result
        self.quorum_id = quorum_id
        self.lighthouse_quorum_id: int = result.quorum_id

    def __getattr__(self, name: str) -> Any:
        return getattr(self._result, name)


def rendezvous_id(replica_ids: list[str], quorum_id: int, max_step: int) -> int:
    """A 48-bit id of one rendezvous; equal in all members."""
    text = "|".join([*replica_ids, str(quorum_id), str(max_step)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: ID_BITS // 8], "little")


class RendezvousClient:
    """Stands in for `torchft.ManagerClient` inside a Manager."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._members: tuple[tuple[str, ...], int] | None = None
        self._id = -1
        self.latest: QuorumView | None = None

    def _quorum(self, **kwargs: Any) -> QuorumView:
        result = self._client._quorum(**kwargs)
        members = (tuple(result.replica_ids), result.quorum_id)
        # Others have committed without us, so they had another quorum in between and come anew to
        # this one, though a restarted lighthouse may have counted up to its old id. At step 0 it
        # is us who want a peer's state, and their process group is the old one.
        step = kwargs.get("step", 0)
        missed = 0 < step < result.max_step
        if members != self._members or missed:
            self._id = rendezvous_id(result.replica_ids, result.quorum_id, result.max_step)
            self._members = members
        self.latest = QuorumView(result, self._id)
        return self.latest

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)
