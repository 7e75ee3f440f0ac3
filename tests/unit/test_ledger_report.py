"""`torchtitan report`: the accounts of a run folder, proved and shown, or refused by name."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from journal_cases import accept, issue, record, seal

from torchtitan_rl_ft import cli
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.journal.database import FILE_NAME
from torchtitan_rl_ft.journal.ledger_report import LedgerReport
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList


def fill(run: Path) -> Journal:
    """Four batches; three steps, one of them trained twice; a dropped, an accepted, a pending
    prompt group."""
    journal = Journal.open(run / "journal", events=EventList())
    for _ in range(4):
        seal(journal)
    for nonce in range(3):
        journal.commit(record(journal, nonce), reporter="a", metrics=None)
    journal.rewind(1, reason="its holders are dead", member="b")
    journal.commit(record(journal, 9), reporter="b", metrics=None)
    journal.commit(record(journal, 9), reporter="b", metrics=None, adopted=True)
    ids = issue(journal, 3)
    accept(journal, ids[:1])
    journal.drop(ids[1], "too long")
    return journal


@pytest.fixture
def run(tmp_path: Path) -> Path:
    fill(tmp_path / "run").close()
    return tmp_path / "run"


def report(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = cli.main(["report", *map(str, argv)])
    told = capsys.readouterr()
    return code, told.out, told.err


def files(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if not f.name.endswith("-shm")}


@pytest.mark.row("G11")
def test_the_accounts_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = files(run / "journal")
    code, out, err = report(capsys, "--ledger", run)
    assert (code, err) == (ExitCode.DONE, "")
    for line in (
        "history    3 steps, 1 of them told by the state itself (lost reports); tip ",
        "superseded 2 commits, kept; the history went back 3 -> 1",
        "prompts    11 groups: 1 pending, 1 accepted, 2 sealed, 6 trained, 1 dropped",
        "dropped    1  too long",
        "trained    trainer-0: 6 of 12 samples (50.0%), ",
        "           trainer-1: 6 of 12 samples (50.0%), ",
        "steps      1..3: trainer-0 6 + trainer-1 6 samples",
        "accounts   hold",
    ):
        assert line in out
    assert {k: v for k, v in files(run / "journal").items() if k in before} == before


@pytest.mark.row("G11")
def test_json_has_every_step_prompt_and_superseded_commit(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = report(capsys, run, "--ledger", "--json")
    told = json.loads(out)
    assert code == ExitCode.DONE and told["ok"] and told["problems"] == []
    assert [c["step"] for c in told["history"]] == [1, 2, 3]
    for commit in told["history"]:
        assert len(commit["digest"]) == 64 and len(commit["token"]) == 32
        assert [s["group"] for s in commit["shares"]] == ["trainer-0", "trainer-1"]
        assert sum(s["samples"] for s in commit["shares"]) == commit["samples"] == 4
        assert sum(s["tokens"] for s in commit["shares"]) == commit["tokens"]
    assert told["tip"] == {"step": 3, "token": told["history"][-1]["token"]}
    assert [(s["step"], s["from_step"], s["to_step"]) for s in told["superseded"]] == [
        (2, 3, 1),
        (3, 3, 1),
    ]
    states = [(g["state"], g["batch_id"], g["step"]) for g in told["groups"]]
    assert states == [
        *[("trained", b, b) for b in (1, 1, 2, 2, 3, 3)],
        *[("sealed", 4, 4)] * 2,
        ("accepted", None, None),
        ("dropped", None, None),
        ("pending", None, None),
    ]


@pytest.mark.row("G11")
def test_a_run_that_goes_on_is_read_as_well(tmp_path: Path) -> None:
    journal = fill(tmp_path / "run")
    first = LedgerReport.of(tmp_path / "run" / "journal")
    journal.commit(record(journal), reporter="a", metrics=None)
    assert [len(first.audit.history), len(LedgerReport.of(first.folder).audit.history)] == [3, 4]
    journal.close()


def test_a_killed_owner_leaves_what_it_committed(tmp_path: Path) -> None:
    """The write-ahead log is not folded in; its last transaction may be cut."""
    journal = fill(tmp_path / "run")
    crashed = tmp_path / "crashed" / "journal"
    shutil.copytree(tmp_path / "run" / "journal", crashed)
    journal.close()
    assert len(LedgerReport.of(crashed).audit.history) == 3
    log = crashed / f"{FILE_NAME}-wal"
    os.truncate(log, log.stat().st_size - 1000)
    cut = LedgerReport.of(crashed)
    assert cut.audit.ok and cut.audit.counts["dropped"] == 0  # the last thing that was done


@pytest.mark.row("G11")
def test_a_violation_is_named_and_fails(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with sqlite3.connect(run / "journal" / FILE_NAME) as db:
        db.execute("""UPDATE commits SET shares = '[["trainer-0", 3, 9], ["trainer-1", 2, 5]]'""")
    code, out, _ = report(capsys, "--ledger", run)
    assert code == ExitCode.FAILED
    assert "violation  commit of step 1: 5 samples of 14 tokens were trained, its batch" in out
    assert "accounts   3 violations" in out
    code, out, _ = report(capsys, "--ledger", run, "--json")
    assert code == ExitCode.FAILED and len(json.loads(out)["problems"]) == 3


def no_journal(run: Path) -> None:
    shutil.rmtree(run / "journal")


def cut_in_half(run: Path) -> None:
    file = run / "journal" / FILE_NAME
    os.truncate(file, file.stat().st_size // 2)


def not_a_database(run: Path) -> None:
    (run / "journal" / FILE_NAME).write_bytes(b"something else" * 100)


def set_pragma(name: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        with sqlite3.connect(run / "journal" / FILE_NAME) as db:
            db.execute(f"PRAGMA {name} = 77")

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_journal, "there is no journal in {run}/journal: no run with a journal has been"),
        (cut_in_half, "{run}/journal/journal.sqlite is "),
        (not_a_database, "{run}/journal/journal.sqlite is not a readable journal"),
        (set_pragma("user_version"), "{run}/journal/journal.sqlite has journal format 77"),
        (set_pragma("application_id"), "{run}/journal/journal.sqlite is another program's"),
    ],
)
def test_what_cannot_be_read_is_one_error(
    run: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], message: str
) -> None:
    damage(run)
    code, out, err = report(capsys, "--ledger", run)
    assert (code, out) == (ExitCode.FAILED, "")
    (line,) = err.splitlines()
    assert line.startswith("torchtitan: error: " + message.format(run=run))


def test_a_folder_that_is_not_there_is_wrong_input(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = report(capsys, tmp_path / "nowhere")
    assert code == ExitCode.CONFIG
    assert err.splitlines() == [
        f"torchtitan: error: {tmp_path}/nowhere is not a run folder: there is no such directory"
    ]
