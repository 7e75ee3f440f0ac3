"""Exactly once, under random faults: the real ledger on a real file, the real split of a batch and
the real coverage proof, simulated groups and quorum, a fake clock. A quorum heals as torchft does:
everyone below the largest manager step takes the state of one that has it, whatever its history.

Killed at random points: each trainer group, all of them at once, the rollout role with the ledger,
the lighthouse (no quorum, then ids from 1 again, perhaps two quorums), serving (a publish that it
does not answer; the next owner wants the tip again). Checkpoints are torn, some before the ledger
hears of them."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from journal_cases import accept, issue, make_batch

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.ledger_report import LedgerReport
from torchtitan_rl_ft.journal.protocol import PUBLISH, SAVE, CheckpointRef, State
from torchtitan_rl_ft.journal.records import (
    GENESIS,
    CommitRecord,
    Decision,
    Member,
    SealedBatch,
    next_token,
)
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.journal.views import view
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.replica.group import Quorum, replica_name
from torchtitan_rl_ft.roles.report import main_ledger
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.trainer import coverage
from torchtitan_rl_ft.trainer.shares import shares

FAULTY_ROUNDS = 70
CALM_ROUNDS = 150
TARGET = 30  # steps that the run must reach after the faults
SAMPLES = 4  # of each batch: two prompt groups of two


class Unreachable(Exception):
    """The ledger did not answer within the caller's deadline."""


class RolloutDied(Exception):
    """kill -9 of the rollout role just after a transaction."""


@dataclass
class MortalEvents(EventList):
    """Sees every transaction; some kill the role before anything else happens."""

    rng: random.Random
    rate: float = 0.0

    def __post_init__(self) -> None:
        super().__init__()

    def emit(self, kind: Kind, **fields: Any) -> None:
        if self.rng.random() < self.rate:
            raise RolloutDied
        super().emit(kind, **fields)


@dataclass
class Group:
    """A trainer process. `params` are the batches its parameters were trained on, in order."""

    member: Member
    state: State = State(0, GENESIS)
    tail: CommitRecord | None = None
    params: list[int] = field(default_factory=list)
    manager_step: int = 0
    frozen: int = 0  # rounds

    def take(self, other: Group | Saved) -> None:
        self.state, self.tail, self.params = other.state, other.tail, list(other.params)
        self.manager_step = self.state.step


@dataclass(frozen=True)
class Saved:
    state: State
    tail: CommitRecord | None
    params: list[int]


@dataclass
class World:
    folder: Path
    rng: random.Random
    n_groups: int
    faults: bool = True
    now: float = 0.0
    version: int = 0
    pid: int = 0
    down: int = 0  # rounds until the rollout role is back
    groups: dict[int, Group] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)  # slot -> rounds until it restarts
    pids: set[int] = field(default_factory=set)
    lighthouse_down: int = 0
    serving_down: int = 0
    quorum_id: int = 0
    killed: Counter[str] = field(default_factory=Counter)
    saved: dict[str, Saved] = field(default_factory=dict)
    torn: set[str] = field(default_factory=set)
    sealed: dict[int, SealedBatch] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.remote = self.rng.random() < 0.3  # processes elsewhere: only beats tell of life
        self.asks_token = self.rng.random() < 0.7
        self.drops = self.rng.random() < 0.5
        self.poisoned: set[int] = set()  # batches that give NaN, whoever trains them
        self.events = MortalEvents(self.rng)
        self.open()
        self.waiting = dict.fromkeys(range(self.n_groups), 0)

    def chance(self, p: float) -> bool:
        return self.faults and self.rng.random() < p

    # Rollout role -----------------------------------------------------------------------

    def open(self) -> None:
        self.events.rate = 0.0
        self.journal = Journal.open(self.folder / "journal", events=self.events)
        self.ledger = Ledger(
            self.journal,
            events=self.events,
            metrics_path=self.folder / "metrics.jsonl",
            why_incomplete=lambda c: "torn" if c.path in self.torn else None,
            at_numeric_limit="drop" if self.drops else "stop",
            max_numeric_refusals=3 if self.drops else 10**9,
            mono_s=lambda: self.now,
            gone=lambda m: not self.remote and m.pid not in self.pids,
        )
        self.events.rate = 0.01 if self.faults else 0.0

    def kill_rollout(self) -> None:
        self.killed["rollout"] += 1
        self.journal.close()
        self.down = self.rng.randint(1, 4)

    def roll(self) -> None:
        """Generate for the newest policy and seal, as in sync mode with one batch ahead."""
        if self.down:
            self.down -= 1
            if self.down == 0:
                self.open()
            return
        try:
            if self.chance(0.02):
                raise RolloutDied
            published = self.journal.published()
            fresh = published is not None and published[1] == self.journal.tip
            if self.journal.sealed_ahead == 0 and fresh:
                self._seal()
        except RolloutDied:
            self.kill_rollout()

    def _seal(self) -> None:
        todo = [g.group_id for g in self.journal.pending()]
        have = [g.group_id for g in self.journal.accepted()]
        if len(todo) + len(have) < 3:
            todo += issue(self.journal, 3)
        for group_id in todo:
            if self.chance(0.1):
                self.journal.drop(group_id, "too long")
                continue
            accept(self.journal, [group_id])
            have.append(group_id)
            if self.chance(0.02):
                raise RolloutDied
        if len(have) >= 2:
            batch_id = self.journal.next_batch_id()
            if self.drops and self.chance(0.05):
                self.poisoned.add(batch_id)
            self.sealed[batch_id] = make_batch(have[:2])
            self.journal.seal(self.sealed[batch_id], have[:2])

    def ask(self, question: Callable[[], Any]) -> Any:
        """As the client does: repeat through lost requests and lost replies, within bounds."""
        for _ in range(3):
            if self.down:
                raise Unreachable
            if self.chance(0.03):
                continue
            try:
                answer = question()
            except RolloutDied:
                self.kill_rollout()
                continue
            if self.chance(0.1):
                continue
            return answer
        raise Unreachable

    # Trainers ---------------------------------------------------------------------------

    def kill(self, group: Group) -> None:
        slot = group.member.replica_id
        if self.groups.pop(slot, None) is not None:
            self.killed["trainer"] += 1
            self.pids.discard(group.member.pid)
            self.waiting[slot] = self.rng.randint(1, 6)

    def restart_dead(self) -> None:
        for slot in list(self.waiting):
            if self.waiting[slot] > 0:
                self.waiting[slot] -= 1
                continue
            self.pid += 1
            host = "far" if self.remote else "here"
            group = Group(Member(slot, f"g{slot}-{self.pid}", self.pid, 0.0, host))
            self.pids.add(self.pid)
            try:
                answer = self.ask(lambda m=group.member: self.ledger.attach(m))
            except Unreachable:
                self.pids.discard(self.pid)
                continue
            if answer.checkpoint is not None:
                self.load(group, answer.checkpoint)
            self.groups[slot] = group
            del self.waiting[slot]

    def load(self, group: Group, checkpoint: CheckpointRef | None) -> None:
        if checkpoint is None:
            group.take(Saved(State(0, GENESIS), None, []))
            return
        assert checkpoint.path not in self.torn
        group.take(self.saved[checkpoint.path])
        assert group.state == State(checkpoint.step, checkpoint.token)

    def present(self) -> Iterator[Group]:
        for group in list(self.groups.values()):
            if group.frozen:
                group.frozen -= 1
            elif self.chance(0.015):
                group.frozen = self.rng.randint(2, 16)
            elif self.chance(0.02):
                self.kill(group)
            else:
                yield group

    def kill_services(self) -> None:
        """The lighthouse, serving, or the place of all trainers."""
        if self.chance(0.02):
            self.lighthouse_down, self.quorum_id = self.rng.randint(1, 4), 0
            self.killed["lighthouse"] += 1
        if self.chance(0.02):
            self.serving_down = self.rng.randint(1, 5)
            self.killed["serving"] += 1
        if self.chance(0.01):
            self.killed["all trainers"] += 1
            for group in list(self.groups.values()):
                self.kill(group)

    def restart_services(self) -> None:
        self.lighthouse_down = max(0, self.lighthouse_down - 1)
        if self.serving_down:
            self.serving_down -= 1
            if not self.serving_down and not self.down:
                try:
                    self.ledger.publish_awaited(f"owner-{self.killed['serving']}")
                except RolloutDied:
                    self.kill_rollout()

    def round(self) -> None:
        self.now += 1.0
        self.roll()
        self.restart_dead()
        self.kill_services()
        self.restart_services()
        ready = [group for group in self.present() if self.poll(group)]
        self.rng.shuffle(ready)
        if self.lighthouse_down:
            return self.check()
        if len(ready) > 1 and self.chance(0.1):  # a restarted lighthouse may split them
            cut = self.rng.randint(1, len(ready) - 1)
            quorums = [ready[:cut], ready[cut:]]
        else:
            quorums = [ready]
        for quorum in quorums:
            self.attempt([g for g in quorum if g.member.replica_id in self.groups])
        return self.check()

    def poll(self, group: Group) -> bool:
        """Beat and long poll; True when there is something to begin."""
        m, state = group.member, group.state
        try:
            if not self.chance(0.1):
                self.ask(lambda: self.ledger.live(m, state, "waiting"))
            token = state.token if self.asks_token else ""
            answer = self.ask(lambda: self.ledger.next_now(state.step, m.uuid, token))
            if answer is None:
                return False
            assert answer["status"] != "stop", answer
            if answer["status"] == "waiting":
                self.publish(group, answer["duties"])
                return False
        except Unreachable:
            return False
        if answer["heal"]:
            group.manager_step = 0
        return True

    def publish(self, group: Group, duties: list[str]) -> None:
        state = group.state
        if (
            PUBLISH not in duties
            or not self.ask(lambda: self.ledger.duty(group.member, PUBLISH, state))[0]
        ):
            return
        self.do_publish(group)

    def do_publish(self, group: Group) -> None:
        if self.chance(0.05):
            return self.kill(group)
        if self.serving_down or self.chance(0.1):
            return None  # serving did not answer: given up, still the holder
        self.version += 1
        result = {"version": self.version}
        try:
            self.ask(lambda: self.ledger.duty_done(group.member, PUBLISH, group.state, result))
        except Unreachable:
            return None

    def attempt(self, quorum: list[Group]) -> None:
        """One step as the trainers try it."""
        if not quorum:
            return
        self.quorum_id += 1
        quorum.sort(key=lambda g: g.member.replica_id)  # ranks go by the names
        top = max(g.manager_step for g in quorum)
        donor = self.rng.choice([g for g in quorum if g.manager_step == top])
        for group in quorum:
            if group.manager_step < top:
                group.take(donor)
        answers = [self.begin(g, len(quorum)) for g in quorum]
        if any(self.chance(0.02) and (self.kill(g) is None) for g in quorum):
            return
        proofs = self.prove(quorum, answers)
        if None in proofs:
            assert proofs == [None] * len(quorum)  # one group's doubt is everybody's
            return
        batch = answers[0].batch
        assert all(a.batch == batch for a in answers)
        poisoned = batch.batch_id in self.poisoned
        if poisoned or self.chance(0.1):
            self.refuse(quorum, batch.batch_id, numeric=poisoned or self.chance(0.2))
            return
        for group, proof in zip(quorum, proofs, strict=True):
            if self.chance(0.05):
                continue  # an error local to this group: it refuses, the others commit
            if self.chance(0.03):
                self.kill(group)  # between the vote and the optimizer step
                continue
            self.commit(group, batch, proof, quorum)

    def prove(self, quorum: list[Group], answers: list[Any]) -> list[coverage.Outcome | None]:
        """What each group finds in the sum of all groups' coverage vectors; None: no proof."""
        claims, total = [], torch.zeros(coverage.HEAD + SAMPLES, dtype=torch.float64)
        for rank, (group, answer) in enumerate(zip(quorum, answers, strict=True)):
            if answer is None or answer.decision is not Decision.GO:
                claims.append(None)
                total += coverage.abstain(SAMPLES, speaks=True)
                continue
            state = group.state
            claims.append(coverage.Claim(state.step, state.token, answer.batch.digest, SAMPLES))
            lengths = self.sealed[answer.batch.batch_id].lengths()
            total += coverage.fill(
                claims[-1],
                view(lengths, rank, len(quorum)),
                rank=rank,
                nonce=self.rng.getrandbits(32),
                speaks=True,
                nonfinite=False,
                loss=0.0,
                stats=None,
            )
        return [self.proof(total, claim, len(quorum)) for claim in claims]

    def proof(
        self, total: torch.Tensor, claim: coverage.Claim | None, participants: int
    ) -> coverage.Outcome | None:
        if claim is None:
            return None
        try:
            return coverage.check(total, claim, participants)
        except coverage.CoverageError:
            return None

    def begin(self, group: Group, participants: int) -> Any:
        try:
            answer = self.ask(
                lambda: self.ledger.begin(
                    group.member,
                    group.state,
                    group.tail,
                    participants=participants,
                    quorum_id=self.quorum_id,
                )
            )
        except Unreachable:
            return None
        if answer.decision is Decision.HEAL:
            group.manager_step = 0
        elif answer.decision is Decision.RESTORE:
            self.load(group, answer.checkpoint)
        assert answer.decision is not Decision.STOP, answer
        return answer

    def refuse(self, quorum: list[Group], batch_id: int, numeric: bool) -> None:
        for group in quorum:
            attempt = f"{group.member.uuid}-{self.now}"
            try:
                self.ask(
                    lambda g=group, a=attempt: self.ledger.refused(
                        g.member, batch_id, "nan", numeric=numeric, attempt=a
                    )
                )
            except Unreachable:
                continue

    def commit(
        self, group: Group, batch: Any, proof: coverage.Outcome, quorum: list[Group]
    ) -> None:
        prev = group.state
        token = next_token(prev.token, batch.digest, proof.nonce)
        members = [replica_name(g.member.replica_id) + ":x" for g in quorum]
        seen = Quorum(len(quorum), 0, self.quorum_id, members)
        record = CommitRecord(
            prev.step + 1,
            batch.batch_id,
            batch.digest,
            prev.token,
            token,
            len(quorum),
            self.quorum_id,
            shares(seen, proof.owners, self.sealed[batch.batch_id].lengths()),
        )
        group.state, group.tail = State(record.step, token), record
        group.params.append(batch.batch_id)
        group.manager_step = record.step
        if self.chance(0.04):
            return self.kill(group)  # a commit that nobody hears of
        if self.chance(0.08):
            return None  # its report did not arrive in time
        try:
            status, _, duties = self.ask(
                lambda: self.ledger.committed(group.member, record, {"loss": float(record.step)})
            )
        except Unreachable:
            return None
        if status == "refused":
            group.manager_step = 0
            return None
        if PUBLISH in duties:
            self.do_publish(group)
        if record.step % 4 == 0 and group.member.replica_id in self.groups:
            self.save(group)

    def save(self, group: Group) -> None:
        state = group.state
        try:
            if not self.ask(lambda: self.ledger.duty(group.member, SAVE, state))[0]:
                return
            path = f"step-{state.step}-{group.member.uuid}"
            self.saved[path] = Saved(state, group.tail, list(group.params))
            if self.chance(0.1):
                return self.kill(group)
            if self.chance(0.1):
                self.torn.add(path)  # its bytes are lost before the ledger hears of it
            self.ask(lambda: self.ledger.duty_done(group.member, SAVE, state, {"path": path}))
        except Unreachable:
            return
        self.tear()

    def tear(self) -> None:
        """Damage a checkpoint, but never the oldest that can be loaded."""
        view = self.ledger.view()
        whole = [
            c
            for c in view.checkpoints
            if c.path not in self.torn and view.on_chain(State(c.step, c.token))
        ]
        if self.chance(0.2) and len(whole) > 1:
            self.torn.add(self.rng.choice(whole[:-1]).path)

    # What must hold at all times --------------------------------------------------------

    def check(self) -> None:
        """A state on the chain is what the chain says, batch by batch."""
        if self.down:
            return
        chain = [c.record.batch_id for c in self.journal.commits_after(0) if not c.superseded]
        for group in self.groups.values():
            if self.ledger.view().on_chain(group.state):
                assert group.params == chain[: group.state.step]

    def arrived(self) -> bool:
        """The target is reached and every group holds the tip."""
        if self.down or self.journal.tip.step < TARGET or len(self.groups) < self.n_groups:
            return False
        return {g.state for g in self.groups.values()} == {self.journal.tip}

    def calm(self) -> None:
        self.faults = False
        self.events.rate = 0.0
        self.torn.clear()
        self.lighthouse_down = self.serving_down = 0
        for group in self.groups.values():
            group.frozen = 0


@pytest.fixture
def folder() -> Iterator[Path]:
    """In memory where there is such a place: the simulated kills spare the operating system."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None) as name:
        yield Path(name)


@pytest.mark.row("G11")
@pytest.mark.row("E6")
@pytest.mark.scenario("L-1")
@pytest.mark.parametrize("seed", range(100))
def test_history_is_each_batch_once(seed: int, folder: Path) -> None:
    survive(seed, folder)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_history_is_each_batch_once_for_many_seeds(folder: Path) -> None:
    for seed in range(100, 4000):
        survive(seed, folder / str(seed))
        shutil.rmtree(folder / str(seed))


def survive(seed: int, folder: Path) -> None:
    """One run: faults, then calm until the target; then prove the accounts."""
    rng = random.Random(seed)
    world = World(folder, rng, n_groups=rng.randint(1, 4))
    for _ in range(FAULTY_ROUNDS):
        world.round()
    world.calm()
    for _ in range(CALM_ROUNDS):
        world.round()
        if world.arrived():
            break
    assert world.arrived(), world.ledger.status()
    journal, tip = world.journal, world.journal.tip

    found = LedgerReport.of(folder / "journal").audit
    assert found.problems == []
    assert main_ledger(RunFolder(folder), as_json=False) == ExitCode.DONE
    assert [row.step for row in found.history] == list(range(1, tip.step + 1))
    trained = [row.batch_id for row in found.history]
    assert len(set(trained)) == len(trained)
    for group in world.groups.values():
        assert group.params == trained
    commits = journal.commits_after(0)
    assert len(commits) == len(trained) + found.superseded
    assert sum(found.counts.values()) == journal.counts()["issued"]

    world.ledger.set_outcome("done", "enough")
    lines = [json.loads(s) for s in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["commit"] for line in lines] == [c.commit_id for c in commits]
    assert [line["step"] for line in lines] == [c.record.step for c in commits]
    journal.close()


def test_the_simulation_does_provoke_what_it_claims(folder: Path) -> None:
    """Over some seeds: rewinds, adopted reports, dropped batches, restores, reopened files, and
    kills of every role."""
    killed: Counter[str] = Counter()
    seen: dict[str, int] = dict.fromkeys(("rewound", "adopted", "dropped", "freed", "owners"), 0)
    decisions: set[str] = set()
    for seed in range(40):
        rng = random.Random(seed)
        world = World(folder / str(seed), rng, n_groups=rng.randint(1, 4))
        for _ in range(FAULTY_ROUNDS):
            world.round()
        if world.down:
            world.open()
        found = world.journal.audit()
        killed += world.killed
        seen["rewound"] += world.journal.era
        seen["adopted"] += sum(c.adopted for c in world.journal.commits_after(0))
        seen["dropped"] += sum("refused" in reason for reason in found.dropped)
        seen["freed"] += world.journal.freed_through > 0
        seen["owners"] += world.journal.owner - 1
        decisions |= {e["decision"] for e in world.events.events if e["kind"] is Kind.BEGIN}
        world.journal.close()
    assert all(seen.values()), seen
    roles = {"trainer", "all trainers", "rollout", "lighthouse", "serving"}
    assert set(killed) == roles and min(killed.values()) >= 10, killed
    assert decisions == {Decision.WAIT, Decision.HEAL, Decision.RESTORE}, decisions
