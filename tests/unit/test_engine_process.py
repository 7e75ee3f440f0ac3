"""What is known of an engine's processes, looked at by several threads at once."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchtitan_rl_ft.host.process import Adopted
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.serving.engine_process import EngineProcess


@pytest.fixture
def forking() -> Iterator[subprocess.Popen[bytes]]:
    """Has other children all the time."""
    code = "import subprocess\nwhile True: subprocess.run(['true'])"
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True) as process:
        yield process
        process.kill()


def test_an_engine_is_observed_and_read_at_the_same_time(
    forking: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """An exit while it starts: the last look falls together with one that is in work."""
    root = ProcessId.of(forking.pid)
    engine = EngineProcess((Adopted(root, Path(os.devnull)),), "", "", tmp_path)
    errors: list[Exception] = []

    def observe() -> None:
        try:
            for _ in range(20):
                engine.observe()
        except Exception as e:
            errors.append(e)

    threads = [threading.Thread(target=observe) for _ in range(3)]
    for thread in threads:
        thread.start()
    seen = 0
    while any(thread.is_alive() for thread in threads):
        engine.work()
        record = engine.record(0, "policy", "active")
        assert len(record.members) >= seen  # nothing that was seen is forgotten
        seen = len(record.members)
    assert not errors and root in engine.members
