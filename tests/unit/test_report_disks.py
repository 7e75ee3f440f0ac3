"""`torchtitan report` of a run on a disk that takes nothing: full, or mounted for reading alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from fakes.told_run import ToldRun
from journal_cases import record, seal
from small_disks import mounted

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.run_folder import RunFolder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """1 MiB."""
    with mounted(tmp_path / "disk", "1m") as folder:
        yield folder


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_on_a_full_disk_leaves_nothing(
    disk: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ToldRun(RunFolder(tmp_path / "run-1"))
    run.write()
    free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
    (disk / "ballast").write_bytes(bytes(free - 4096))
    code = cli.main(["report", str(run.folder.path), "--trace", str(disk / name)])
    assert code == ExitCode.CONFIG
    assert "cannot be written to" in (told := capsys.readouterr().err) and "No space left" in told
    assert os.listdir(disk) == ["ballast"]


def test_accounts_of_a_run_that_is_mounted_for_reading(
    disk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = disk / "run"
    with Journal.open(run / "journal", events=EventList()) as journal:
        seal(journal)
        journal.commit(record(journal), reporter="a", metrics=None)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    assert cli.main(["report", "--ledger", str(run)]) == ExitCode.DONE
    assert "accounts   hold" in capsys.readouterr().out
