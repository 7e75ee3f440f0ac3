"""What the supervisor shows while its job runs: progress in the terminal, and the status page."""

from __future__ import annotations

import asyncio
import logging

from rich.console import Console

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.observability.console import ProgressConsole
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.roles import status_page
from torchtitan_rl_ft.roles.following import follower_of

logger = logging.getLogger(__name__)


async def show(resolved: Resolved, events: EventLog) -> None:
    """Until cancelled. Nothing waits for it: what earlier lives of the run have left is read while
    the roles start (some seconds for 100 MB), and whatever fails here is a warning."""
    try:
        follower = follower_of(resolved)
        await follower.catch_up()
        console = ProgressConsole(follower, Console())
        async with status_page.served(resolved, follower, events) as url:
            if url is not None:
                console.say(f"status page: {url}/")
            await _follow(console, events)
            await asyncio.Event().wait()  # the page goes on without a terminal
    except Exception as e:
        logger.exception("nothing is shown")
        events.emit(Kind.WARN, cause=f"the run is not shown: {type(e).__name__}: {e}")


async def _follow(console: ProgressConsole, events: EventLog) -> None:
    """Progress is for people: when it cannot be shown (a closed pipe), the run goes on."""
    try:
        await console.follow()
    except Exception as e:
        logger.exception("the console has stopped")
        events.emit(Kind.WARN, cause=f"progress is no longer shown: {type(e).__name__}: {e}")
