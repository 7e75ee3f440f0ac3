"""TensorBoard event files, written without torch.

A START record with a step takes back what earlier files hold of that step and later (as
`SummaryWriter(purge_step=...)` does), so a folder shows one history, whatever rewinds and restarts
there were.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from tensorboard.compat.proto.event_pb2 import (
    Event,  # pyrefly: ignore[missing-module-attribute]
    SessionLog,  # pyrefly: ignore[missing-module-attribute]
)
from tensorboard.compat.proto.summary_pb2 import (
    Summary,  # pyrefly: ignore[missing-module-attribute]
)
from tensorboard.summary.writer.record_writer import RecordWriter

from torchtitan_rl_ft.observability.metric_sinks import History

_VERSION = "brain.Event:2"


class TensorBoardSink:
    """One event file for each time that it begins."""

    name = "TensorBoard"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None
        self._files = 0

    def begin(self, step: int, rewinds: int, history: History | None) -> None:
        self.close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files += 1
        # Readers take the files in the order of their names.
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{socket.gethostname()}"
        self._file = open(self._folder / f"{name}.{os.getpid()}.{self._files}", "xb")  # noqa: SIM115
        self._record(Event(wall_time=time.time(), file_version=_VERSION))
        start = SessionLog(status=SessionLog.START)
        self._record(Event(wall_time=time.time(), step=step, session_log=start))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        scalars = [Summary.Value(tag=k, simple_value=v) for k, v in values.items()]
        self._record(Event(wall_time=time.time(), step=step, summary=Summary(value=scalars)))

    def _record(self, event: Event) -> None:
        assert self._file is not None
        RecordWriter(self._file).write(event.SerializeToString())

    def flush(self) -> None:
        if self._file is not None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            file.close()
