"""The history of a simulated job, kept by our own exactly-once rules."""

from __future__ import annotations

from torchtitan_rl_ft.journal import protocol
from torchtitan_rl_ft.journal.protocol import BatchRef, CheckpointRef, LedgerView, MemberView, State
from torchtitan_rl_ft.journal.records import GENESIS, CommitRecord, Decision, next_token

KEPT_CHECKPOINTS = 3


class History:
    """What the ledger knows. Names of members are those of groups: a new process has a new one."""

    def __init__(self, groups: int) -> None:
        self._tokens = [GENESIS]
        self._saves: list[tuple[float, CheckpointRef]] = []
        self._lives = [0] * groups
        self._alive = [True] * groups

    @property
    def step(self) -> int:
        return len(self._tokens) - 1

    @property
    def alive(self) -> int:
        return sum(self._alive)

    @property
    def state(self) -> State:
        return State(self.step, self._tokens[-1])

    def commit(self) -> None:
        """Raises RuntimeError when our rules do not take the next step."""
        batch = _batch(self.step + 1)
        prev = self._tokens[-1]
        token = next_token(prev, batch.digest, sum(self._lives))
        record = CommitRecord(
            self.step + 1, batch.batch_id, batch.digest, prev, token, self.alive, 0
        )
        status, why = protocol.decide_commit(self._view(()), record)
        if status != "committed":
            raise RuntimeError(f"step {record.step} was {status}: {why}")
        self._tokens.append(token)

    def save(self, durable_s: float) -> None:
        """A checkpoint of this state counts from `durable_s` on, if its writers live so long."""
        ref = CheckpointRef(self.step, self._tokens[-1], f"step-{self.step}")
        self._saves = [(durable_s, ref), *self._saves][:KEPT_CHECKPOINTS]

    def lose(self, group: int, now_s: float) -> None:
        self._alive[group] = False
        if not self.alive:
            self._saves = [(s, ref) for s, ref in self._saves if s <= now_s]

    def lose_all(self, now_s: float) -> None:
        for group in range(len(self._alive)):
            self.lose(group, now_s)

    def is_alive(self, group: int) -> bool:
        return self._alive[group]

    def join(self, group: int) -> int:
        """A new process of `group` has started: attach, then begin until it may train; the step of
        the job afterwards. It heals from a living group, or all go back to a checkpoint."""
        self._lives[group] += 1
        uuid = self._uuid(group)
        others = [
            MemberView(self._uuid(g), True, self.state)
            for g, alive in enumerate(self._alive)
            if alive and g != group
        ]
        answer = protocol.decide_attach(self._view(others), uuid)
        state = State(0, GENESIS)
        if answer.start == "restore" and answer.checkpoint is not None:
            state = State(answer.checkpoint.step, answer.checkpoint.token)
        for _ in range(3):
            verdict = protocol.decide_begin(self._view(others), uuid, state, None)
            for effect in verdict.effects:
                if isinstance(effect, protocol.Rewind):
                    del self._tokens[effect.to_step + 1 :]
            if verdict.decision is Decision.GO:
                self._alive[group] = True
                return self.step
            if verdict.decision in (Decision.WAIT, Decision.HEAL) and others:
                state = self.state
            elif verdict.decision is Decision.RESTORE:
                ref = verdict.checkpoint
                state = State(ref.step, ref.token) if ref else State(0, GENESIS)
            else:
                break
        raise RuntimeError(f"{uuid} cannot train: {verdict.decision}, {verdict.reason}")

    def _uuid(self, group: int) -> str:
        return f"trainer-{group}.{self._lives[group]}"

    def _view(self, members: list[MemberView] | tuple[()]) -> LedgerView:
        head = self.step + 1
        return LedgerView(
            tokens=self._tokens,
            plan=_Plan(head),
            members=members,
            checkpoints=[ref for _, ref in self._saves],
            known_history=self.step > 0,
        )


class _Plan(dict[int, BatchRef]):
    """Every step up to the head has its batch: a rewound one keeps it."""

    def __init__(self, head: int) -> None:
        super().__init__()
        self._head = head

    def get(self, step: int, default: BatchRef | None = None) -> BatchRef | None:
        return _batch(step) if step <= self._head else default


def _batch(step: int) -> BatchRef:
    return BatchRef(step, str(step))
