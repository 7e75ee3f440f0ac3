"""The watcher beside trainers that a test has started, as it runs in the supervisor."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from contextlib import contextmanager

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.observability.events import EventLog
from torchtitan_rl_ft.roles.watcher import Lessons, Watcher, job_limits
from torchtitan_rl_ft.run_folder import RunFolder


@contextmanager
def watched(folder: RunFolder) -> Generator[None]:
    """Watch the ranks of the run while the body runs, by its configuration."""
    resolved = Resolved.read(folder.path)
    events = EventLog(folder.events, run=folder.path.name, role="supervisor", name="supervisor")
    recovery = resolved.sections.recovery
    lessons = Lessons.of(resolved) if recovery.calc_ft_timeouts else None
    watcher = Watcher(folder, events, job_limits(resolved), lessons=lessons)
    loop = asyncio.new_event_loop()
    task = loop.create_task(watcher.run())

    def run() -> None:
        try:
            loop.run_until_complete(task)
        except asyncio.CancelledError:
            pass
        finally:
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        events.close()
