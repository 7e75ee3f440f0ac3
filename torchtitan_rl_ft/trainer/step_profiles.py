"""torch.profiler around single steps: `observability.profile_steps`.

    RUN/profiles/step_<k>/trainer-<g>.<rank>.json.gz     (Chrome trace; Perfetto opens it)

A trace is written once its step is committed. A step whose trace is there is not profiled again,
when it is trained again after a rewind or a restart; one that died with its process is.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from torchtitan_rl_ft.observability.events import EventSink, Kind

logger = logging.getLogger(__name__)


class StepProfiles:
    """Of one rank."""

    def __init__(
        self,
        folder: Path,
        steps: range,
        rank_name: str,
        events: EventSink,
        enter: Callable[[str], None],
    ) -> None:
        """`folder`: RUN/profiles. `rank_name`: like trainer-1.0. `enter`: tells the phase."""
        self._folder, self._steps, self._rank_name = folder, steps, rank_name
        self._events, self._enter = events, enter
        self._said = False

    def path(self, step: int) -> Path:
        return self._folder / f"step_{step}" / f"{self._rank_name}.json.gz"

    @contextlib.contextmanager
    def around(self, step: int) -> Iterator[None]:
        """Profile the block, which trains `step`; not when it raises."""
        if step not in self._steps or self.path(step).exists():
            yield
            return
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=True) as profiler:
            yield
        self._enter("dump")
        self._write(profiler, step)

    def _write(self, profiler: profile, step: int) -> None:
        """Traces that cannot be written are one warning."""
        path = self.path(step)
        torn = path.with_name(f".{path.name}")  # of a kind that the profiler compresses
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(torn))
            torn.replace(path)
        except (OSError, RuntimeError) as e:
            with contextlib.suppress(OSError):
                torn.unlink(missing_ok=True)
            logger.warning("no profile of step %d: %s", step, e)
            if not self._said:  # of a range of steps each would say the same
                self._said = True
                cause = f"no profile of step {step}, the run goes on: {e}"
                self._events.emit(Kind.WARN, cause=cause, step=step, subject=self._rank_name)
            return
        logger.info("profile of step %d: %s", step, path)
