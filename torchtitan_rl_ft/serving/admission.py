"""Whether requests for samples are taken."""

from __future__ import annotations

from torchtitan_rl_ft.serving.changes import Changes


class Admission:
    """Open unless a session's owner has yet to publish (serving/ownership.py). Requests wait while
    it is closed; nothing is disposed of."""

    def __init__(self) -> None:
        self._changes = Changes()
        self.closed: str | None = None
        """Why, while it is."""

    def close(self, reason: str) -> None:
        self.closed = reason
        self._changes.notify()

    def open(self) -> None:
        self.closed = None
        self._changes.notify()

    async def opened(self, timeout_s: float) -> bool:
        """True as soon as it is open; False when it was not within `timeout_s`."""
        return await self._changes.wait_until(lambda: self.closed is None, timeout_s)
