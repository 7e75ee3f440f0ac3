"""A NIXL agent in the test's process: writes go nowhere, and end as they are told to."""

from __future__ import annotations

from typing import Any

from torchtitan_rl_ft.weights.holder.agent import NixlError


class FakeAgent:
    def __init__(self) -> None:
        self.registered: list[Any] = []
        self.peers: list[str] = []
        self.written: list[tuple[int, int, int, bytes]] = []
        self.open_handles: set[int] = set()
        self.polls_needed = 1
        self.fails_at: int | None = None
        """Number of the write that ends with an error."""
        self.hangs_at: int | None = None
        self.dropped = False
        self.notes_to_come: list[bytes] = []

    def register(self, address: int, ranges: Any) -> Any:
        self.registered.append((address, tuple(ranges)))
        return self.registered[-1]

    def deregister(self, registered: Any) -> None:
        self.registered.remove(registered)

    def metadata(self) -> bytes:
        return b"agent"

    def notes(self) -> list[bytes]:
        found, self.notes_to_come = self.notes_to_come, []
        return found

    def add_peer(self, metadata: bytes) -> str:
        if metadata == b"garbage":
            raise NixlError("reading the receiver's metadata: garbage")
        self.peers.append(metadata.decode())
        return self.peers[-1]

    def remove_peer(self, name: str) -> None:
        self.peers.remove(name)

    def write(self, local: int, remote: int, nbytes: int, peer: str, note: bytes) -> Any:
        self.written.append((local, remote, nbytes, note))
        handle = len(self.written)
        self.open_handles.add(handle)
        return [handle, 0]

    def is_done(self, handle: Any) -> bool:
        handle[1] += 1
        if handle[0] == self.fails_at:
            raise NixlError("transfer: NIXL_ERR_REMOTE_DISCONNECT")
        return handle[0] != self.hangs_at and handle[1] >= self.polls_needed

    def release(self, handle: Any) -> bool:
        self.open_handles.discard(handle[0])
        return True

    def drain(self) -> None:
        pass

    def drop(self) -> None:
        self.dropped = True
