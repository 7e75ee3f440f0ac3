"""Flight recorder files: who writes one, and when."""

import os
import threading
import time

import pytest

from torchtitan_rl_ft.trainer import flight_record as module
from torchtitan_rl_ft.trainer.flight_record import FlightRecord


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "PEERS_TIMEOUT_S", 5.0)
    monkeypatch.setattr(module, "dump", lambda: b"record")
    return [FlightRecord(tmp_path / "traces", "rank_", rank, 2) for rank in range(2)]


def fail(record):
    with pytest.raises(RuntimeError, match="gloo"), record.kept():
        raise RuntimeError("gloo")


@pytest.mark.row("A7")
def test_the_other_ranks_write_when_one_fails(ranks, tmp_path):
    over = threading.Event()

    def wait() -> None:
        with ranks[1].kept():
            over.wait(10)

    waiting = threading.Thread(target=wait)
    waiting.start()
    fail(ranks[0])
    files = (tmp_path / "traces" / "quorum_0").iterdir()
    assert sorted(f.name for f in files) == ["rank_0", "rank_1"]
    over.set()
    waiting.join()


def test_a_good_end_writes_nothing(ranks, tmp_path):
    with ranks[0].kept():
        pass
    with pytest.raises(SystemExit), ranks[0].kept():
        raise SystemExit(75)
    assert not (tmp_path / "traces").exists()


def test_files_of_an_earlier_life_are_written_anew(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PEERS_TIMEOUT_S", 0.0)
    old = tmp_path / "traces" / "quorum_0" / "rank_0"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"old")
    os.utime(old, (1, 1))
    fail(ranks[0])
    assert old.read_bytes() == b"record"


def test_a_record_that_cannot_be_written_hides_no_error(ranks, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PEERS_TIMEOUT_S", 0.0)
    (tmp_path / "traces").write_text("in the way")
    fail(ranks[0])


@pytest.mark.row("K2")
def test_each_quorum_whose_collectives_fail_has_a_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.01)
    monkeypatch.setattr(module, "dump", lambda: b"record")
    quorum = iter([3, 3, 5])
    folder = tmp_path / "traces"
    failing = FlightRecord(folder, "rank_", 0, 2, lambda: next(quorum))
    waiting = FlightRecord(folder, "rank_", 1, 2, lambda: 99)
    with failing.kept(), waiting.kept():
        for _ in range(3):  # the second one of the same quorum adds nothing
            failing.attempt_failed()
        end = time.monotonic() + 20
        while len(list(folder.glob("quorum_*/rank_*"))) < 4 and time.monotonic() < end:
            time.sleep(0.01)
    found = sorted(str(f.relative_to(folder)) for f in folder.glob("*/*"))
    assert found == [f"quorum_{q}/rank_{r}" for q in (3, 5) for r in (0, 1)]


def test_the_others_record_of_a_quorum_is_looked_for_once(ranks, tmp_path, monkeypatch):
    """On a full disk too: no line for each look."""
    tried = []

    def no_space(path, content):
        tried.append(path)
        raise OSError("no space left")

    def after_the_other(quorum):
        folder = tmp_path / "traces" / quorum
        folder.mkdir(parents=True)
        (folder / "rank_1").write_bytes(b"record")
        end = time.monotonic() + 20
        while folder / "rank_0" not in tried and time.monotonic() < end:
            time.sleep(0.01)

    monkeypatch.setattr(module, "write_atomic", no_space)
    with ranks[0].kept():
        for quorum in ("quorum_3", "quorum_4"):
            after_the_other(quorum)
    mine = [path.parent.name for path in tried if tmp_path in path.parents]
    assert mine == ["quorum_3", "quorum_4"]
