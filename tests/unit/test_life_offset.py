"""Live ETTR of a run of several lives reads the last one alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fakes.told_run import ToldRun

from torchtitan_rl_ft.observability import jsonl
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.observability.life_offset import last_life_offset
from torchtitan_rl_ft.observability.live_ettr import LiveEttr
from torchtitan_rl_ft.run_folder import RunFolder


def log_of(folder: Path) -> EventLog:
    return EventLog(folder / "events.jsonl", run="r", role="supervisor", name="supervisor")


@pytest.mark.parametrize("block_bytes", [2**20, 700])
def test_it_is_that_of_the_last_beginning(tmp_path: Path, monkeypatch, block_bytes: int) -> None:
    monkeypatch.setattr(jsonl, "BLOCK_BYTES", block_bytes)
    log, path = log_of(tmp_path), tmp_path / "events.jsonl"
    assert last_life_offset(path) == 0 == last_life_offset(tmp_path / "none")
    for phase in ("start", "resume", "reattach"):
        before = path.stat().st_size
        log.emit(Kind.RUN, phase=phase, ranks={"trainer": 1})
        for step in range(30):
            log.emit(Kind.COMMIT, step=step, cause='a text with "kind":"run","phase":"start"')
        log.emit(Kind.RUN, phase="end")
        log.emit(Kind.WARN, kinds={"kind": "run", "phase": "start"})
        assert last_life_offset(path) == before
    log.close()
    # A line that a full disk tore, to which a beginning was appended.
    before = path.stat().st_size
    with open(path, "ab") as f:
        f.write(b'{"wall_s":1.0,"mono_s":')
    log = log_of(tmp_path)
    log.emit(Kind.RUN, phase="resume")
    log.close()
    assert last_life_offset(path) == before


def test_the_last_life_alone_is_measured(tmp_path: Path) -> None:
    run = ToldRun(RunFolder(tmp_path / "run-1"))
    run.write()
    told = run.folder.events.read_text().splitlines()
    compact = [json.dumps(json.loads(line), separators=(",", ":")) + "\n" for line in told]
    run.folder.events.write_text("".join(compact))
    one = LiveEttr(run.folder.events, window_s=30.0, every_s=2.0).measure_all()
    run.folder.events.write_text("".join([*compact[:200], *compact]))
    live = LiveEttr(run.folder.events, window_s=30.0, every_s=2.0)
    assert live.measure_all() == one and one.ettr is not None
    assert last_life_offset(run.folder.events) == len("".join(compact[:200]))


def test_a_file_that_was_written_anew_is_read_from_its_start(tmp_path: Path) -> None:
    """Also where it is longer by then than the one before."""
    path = tmp_path / "events.jsonl"
    path.write_text('{"a":1}\n')
    tail = jsonl.JsonlTail(path, may_begin_anew=True)
    assert tail.read() == [{"a": 1}]
    path.rename(tmp_path / "kept")
    assert tail.read() == []
    path.write_text('{"a":2}\n{"a":3}\n')
    assert tail.read() == [{"a": 2}, {"a": 3}]
    with open(path, "a") as f:
        f.write('{"a":4}\n')
    assert tail.read() == [{"a": 4}]


def test_events_that_cannot_be_read_for_a_moment_end_no_measurement(tmp_path: Path) -> None:
    run = ToldRun(RunFolder(tmp_path / "run-1"))
    run.write()
    now_s = [0.0]
    live = LiveEttr(run.folder.events, window_s=30.0, every_s=2.0, clock_s=lambda: now_s[0])

    def look() -> None:
        now_s[0] += 100.0
        live.look()
        assert live._thread is not None
        live._thread.join(30)

    kept = run.folder.events.rename(tmp_path / "kept")
    run.folder.events.mkdir()
    look()
    assert live.measured.ettr is None and live.measured.problem is None
    run.folder.events.rmdir()
    kept.rename(run.folder.events)
    look()
    assert live.measured.ettr is not None
