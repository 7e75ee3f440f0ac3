"""What is not replayed, and how that is told: a cold start, a run without a journal, a journal that
cannot free its batches. What does survive is in test_ledger_across_crash.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from config_jobs import GOOD, job
from journal_cases import make_ledger, member, record, seal
from test_session_status import session

from torchtitan_rl_ft.config.start_state import Found, Start, Wish, decide
from torchtitan_rl_ft.journal.client import LedgerClient, Stop
from torchtitan_rl_ft.journal.errors import JournalWriteError
from torchtitan_rl_ft.journal.protocol import SAVE
from torchtitan_rl_ft.journal.records import GENESIS
from torchtitan_rl_ft.journal.service import routes
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.roles.session import Session
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused
from torchtitan_rl_ft.rpc.server import make_app, start


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


@pytest.mark.row("E11")
def test_a_cold_start_takes_nothing_of_a_stale_journal(tmp_path: Path) -> None:
    """It is refused where it would be the run's own, and left alone where the run keeps none."""
    stale = Found("/run", checkpoint=False, journal=True, session_alive=False)
    cold = Wish(auto_continue=False, exit_on_missing_checkpoint=False, journaling=True)
    assert decide(stale, cold).start is Start.REFUSE
    without = Wish(auto_continue=True, exit_on_missing_checkpoint=False, journaling=False)
    assert decide(stale, without).start is Start.FRESH

    with Journal.open(tmp_path, events=EventList()) as journal:
        seal(journal)
        journal.commit(record(journal), reporter="a", metrics=None)
    file = tmp_path / "journal.sqlite"
    before = (file.read_bytes(), file.stat().st_mtime_ns)
    with Journal.open(tmp_path, events=EventList(), durable=False) as journal:
        assert (journal.tip.step, journal.tip.token, journal.cursor()) == (0, GENESIS, None)
        seal(journal)
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


@pytest.mark.row("E11")
@pytest.mark.parametrize(
    ("argv", "told"), [((), False), (("--rollout.no-journal",), True)], ids=["journal", "none"]
)
def test_without_a_journal_a_kept_session_says_that_nothing_is_replayed(
    home: Path, argv: tuple[str, ...], told: bool
) -> None:
    session()
    lines = Session(job(home, GOOD, "--rollout.session_id", "s", *argv)).farewell()
    assert "serving session s is kept for" in lines[0]
    replay = "rollout.journal = false: the batches and prompts of this run cannot be replayed"
    assert any(replay in line for line in lines) is told


@pytest.mark.row("E11")
async def test_batches_that_cannot_be_freed_stop_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails as a checkpoint frees what it covers: every trainer is told, and nothing of
    the journal is lost."""
    events = EventList()
    with Journal.open(tmp_path / "journal", events=events) as journal:
        ledger = make_ledger(journal, tmp_path, events)
        url, runner = await start(make_app("secret", routes(ledger)))
        rpc = RoleClient("rollout", lambda: url, "secret")
        trainers = [LedgerClient(rpc, member(name), deadline_s=5.0) for name in ("a", "b")]
        seal(journal)
        ledger.attach(member("a"))
        ledger.committed(member("a"), record(journal), {})
        tip = journal.tip

        def broken(step: int) -> int:
            raise JournalWriteError("cannot write journal.sqlite: disk I/O error")

        monkeypatch.setattr(journal, "free_through", broken)
        assert (await asyncio.to_thread(trainers[0].duty, SAVE, tip))[0]
        saved = {"path": "checkpoint/step-1"}
        with pytest.raises(RoleRefused, match="disk I/O error") as refused:
            await asyncio.to_thread(trainers[0].duty_done, SAVE, tip, saved)
        assert refused.value.status == 507
        for trainer in trainers:
            stop = await asyncio.to_thread(trainer.next_batch, 1, 5.0)
            assert isinstance(stop, Stop) and stop.outcome == "failed"
            assert "disk I/O error" in stop.reason
        assert journal.audit().ok and journal.batch_bytes(1)
        await runner.cleanup()
