"""kill -9 of a writer at random points: the file holds the old or the new record, never less."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.events import EventList

# Says on stdout what is durable, after each call returned: the reader must find at least that.
WRITER = textwrap.dedent(
    """
    import sys
    sys.path.insert(0, sys.argv[2])
    from pathlib import Path
    from journal_cases import accept, issue, make_batch, record
    from torchtitan_rl_ft.journal.protocol import CheckpointRef
    from torchtitan_rl_ft.journal.store import Journal
    from torchtitan_rl_ft.observability.events import EventList

    def say(*words):
        sys.stdout.write(" ".join(map(str, words)) + "\\n")
        sys.stdout.flush()

    journal = Journal.open(Path(sys.argv[1]), events=EventList())
    say("open")
    while True:
        for i in issue(journal, 3):
            say("issued", i)
        for group in journal.pending():
            if group.group_id % 5 == 0:
                journal.drop(group.group_id, "every fifth")
                continue
            accept(journal, [group.group_id])
            say("accepted", group.group_id)
        ids = [g.group_id for g in journal.accepted()]
        if len(ids) >= 2:
            journal.seal(make_batch(ids, samples_per_group=200), ids)
            say("sealed", len(journal.plan))
        while journal.head() is not None:
            journal.commit(record(journal), reporter="w", metrics={"loss": 1.0})
            say("committed", journal.tip.step)
        if journal.tip.step % 4 == 0 and journal.tip.step:
            journal.add_checkpoint(CheckpointRef(journal.tip.step, journal.tip.token, "p"))
            journal.free_through(journal.tip.step)
            say("freed", journal.tip.step)
    """
)


@pytest.mark.row("E2")
@pytest.mark.row("E7")
@pytest.mark.row("E8")
@pytest.mark.row("E10")
@pytest.mark.timeout(180)
def test_kill_at_random_points(tmp_path: Path) -> None:
    kill_and_check(tmp_path / "journal", kills=50, seed=0)


@pytest.mark.soak
@pytest.mark.row("E8")
@pytest.mark.timeout(900)
def test_kill_at_many_random_points(tmp_path: Path) -> None:
    for seed in range(1, 5):
        kill_and_check(tmp_path / f"journal-{seed}", kills=50, seed=seed)


def kill_and_check(folder: Path, kills: int, seed: int) -> None:
    rng = random.Random(seed)
    largest: dict[str, int] = {}
    for _ in range(kills):
        said = run_and_kill(folder, after_lines=rng.randint(1, 40), delay_s=rng.random() * 0.003)
        for word, number in said:
            largest[word] = max(largest.get(word, 0), number)
        check(folder, largest)
    assert largest["committed"] > kills / 4  # it was killed at work, not at its start


def run_and_kill(folder: Path, after_lines: int, delay_s: float) -> list[tuple[str, int]]:
    """Kill the writer a moment after its n-th line; returns what it said was durable."""
    command = [sys.executable, "-c", WRITER, str(folder), str(Path(__file__).parent)]
    writer = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    assert writer.stdout is not None and writer.stderr is not None
    lines = []
    for _ in range(after_lines):
        if not (line := writer.stdout.readline()):
            break
        lines.append(line)
    _spin(delay_s)
    os.kill(writer.pid, signal.SIGKILL)
    rest, errors = writer.communicate()
    assert "Traceback" not in errors, errors  # the journal opened: no stale lock, no damage
    # A line cut by the kill tells nothing.
    said = "".join(lines) + rest[: rest.rfind("\n") + 1]
    words = [line.split() for line in said.splitlines()]
    return [(w[0], int(w[1])) for w in words if len(w) == 2]


def _spin(seconds: float) -> None:
    """Shorter than a sleep can be."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def check(folder: Path, largest: dict[str, int]) -> None:
    with Journal.open(folder, events=EventList()) as journal:
        found = journal.audit()
        assert found.problems == []
        counts = journal.counts()
        assert counts["issued"] >= largest.get("issued", 0)
        # Source position and groups are one: nothing skipped, nothing issued twice.
        assert (journal.cursor() or 0) == counts["issued"]
        beyond = {g.group_id for g in journal.pending()}
        assert all(g > largest.get("accepted", 0) or g % 5 == 0 for g in beyond)
        assert len(journal.plan) >= largest.get("sealed", 0)
        assert journal.tip.step >= largest.get("committed", 0)
        assert journal.freed_through >= largest.get("freed", 0)
        for step in range(journal.tip.step + 1, len(journal.plan) + 1):
            assert journal.batch(journal.plan[step].batch_id).n_samples
