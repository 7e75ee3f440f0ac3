"""Engines that live and end together: the members of a prefill/decode unit."""

from __future__ import annotations

import asyncio

from torchtitan_rl_ft.serving.engine import Engine


class Unit:
    """The present engines of the slots of one unit. A generation ends with its first member:
    those that joined before are told, those that join later are the next one."""

    def __init__(self) -> None:
        self._members: dict[Engine, asyncio.Future[str]] = {}

    def join(self, engine: Engine) -> asyncio.Future[str]:
        """Is given the reason when another member has been retired."""
        ended = asyncio.get_running_loop().create_future()
        self._members[engine] = ended
        return ended

    def leave(self, engine: Engine, reason: str) -> None:
        """`engine` is being retired. Nothing, when another member was before it."""
        if engine not in self._members:
            return
        members, self._members = self._members, {}
        for other, ended in members.items():
            if other is not engine and not ended.done():
                ended.set_result(f"{engine.name} of its unit was retired: {reason}")
