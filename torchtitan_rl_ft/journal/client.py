"""The ledger as trainers see it: blocking calls with typed answers."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from torchtitan_rl_ft.journal.protocol import (
    AttachAnswer,
    BatchRef,
    CheckpointRef,
    OutcomeKind,
    State,
)
from torchtitan_rl_ft.journal.records import CommitRecord, Decision, Member, SealedBatch
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused, RoleUnreachable

logger = logging.getLogger(__name__)

POLL_S = 20.0
GRACE_S = 10.0  # beyond a long poll's own time, for the answer to travel


@dataclass(frozen=True)
class Ready:
    """A batch may be begun. `step` is the step it is for: the caller's next, or a later one when
    the caller is behind and will be healed. `heal`: the caller's state is of another history: set
    the manager's step to 0 before the quorum, so that no peer heals from it."""

    step: int
    batch: BatchRef
    heal: bool = False


@dataclass(frozen=True)
class Offer:
    """While waiting: duties nobody holds. Ask `duty` for one, do it, then wait again."""

    duties: tuple[str, ...]


@dataclass(frozen=True)
class Stop:
    outcome: OutcomeKind
    reason: str


@dataclass(frozen=True)
class BeginAnswer:
    decision: Decision
    reason: str
    batch: BatchRef | None
    checkpoint: CheckpointRef | None
    outcome: OutcomeKind | None  # STOP: how the run ended


@dataclass(frozen=True)
class CommitAnswer:
    status: Literal["committed", "confirmed", "refused"]
    reason: str
    duties: tuple[str, ...]  # granted to the caller


class BatchWaitTimeout(Exception):
    """No batch was sealed, or the ledger did not answer, within the deadline."""


class LedgerClient:
    """Every request may repeat until its deadline, through restarts of the rollout role.

    Methods raise rpc.client.RoleUnreachable after the deadline and RoleRefused when the ledger
    answers with an error. Safe to use from the training loop and one side thread at once.
    """

    def __init__(self, rpc: RoleClient, member: Member, deadline_s: float = 60.0) -> None:
        self._rpc = rpc
        self._deadline_s = deadline_s
        self.member = member
        self._member = asdict(member)

    def attach(self) -> tuple[AttachAnswer, State]:
        """What a new process loads, and the ledger's tip."""
        answer = self._post("attach")
        start = AttachAnswer(
            answer["start"], _checkpoint(answer["checkpoint"]), tuple(answer["skipped"])
        )
        return start, State(answer["tip"]["step"], answer["tip"]["token"])

    def next_batch(self, step: int, deadline_s: float, token: str = "") -> Ready | Offer | Stop:
        """Wait for something to do at `step`; with the state's `token`, `Ready.heal` is told.
        Raises BatchWaitTimeout."""
        end = time.monotonic() + deadline_s
        why = "no batch was sealed"
        while (left := end - time.monotonic()) > 0:
            try:
                answer = self._rpc.get(
                    "/v1/ledger/next",
                    deadline_s=min(left, POLL_S + GRACE_S),
                    step=step,
                    timeout_s=min(left, POLL_S),
                    uuid=self.member.uuid,
                    token=token,
                )
            except RoleUnreachable as e:
                why = str(e)
                continue
            why = "no batch was sealed"
            match answer["status"]:
                case "ready":
                    ref = BatchRef(answer["batch_id"], answer["digest"])
                    return Ready(answer["step"], ref, answer["heal"])
                case "stop":
                    return Stop(answer["outcome"], answer["reason"])
                case "waiting" if answer["duties"]:
                    return Offer(tuple(answer["duties"]))
        raise BatchWaitTimeout(f"waited {deadline_s:g} s at step {step} for a batch: {why}")

    def batch(self, ref: BatchRef) -> SealedBatch:
        """The sealed batch, checked. Raises records.BatchCorrupt."""
        data = self._rpc.get_bytes(f"/v1/batches/{ref.batch_id}", deadline_s=self._deadline_s)
        return SealedBatch.from_bytes(data, ref.digest)

    def begin(
        self, state: State, tail: CommitRecord | None, *, participants: int, quorum_id: int
    ) -> BeginAnswer:
        """Ask after the quorum, before the forward pass; also before a refused step is tried
        again."""
        answer = self._post(
            "begin",
            **asdict(state),
            tail=None if tail is None else tail.to_json(),
            participants=participants,
            quorum_id=quorum_id,
        )
        ref = None
        if answer["batch_id"] is not None:
            ref = BatchRef(answer["batch_id"], answer["digest"])
        decision = Decision(answer["decision"])
        return BeginAnswer(
            decision, answer["reason"], ref, _checkpoint(answer["checkpoint"]), answer["outcome"]
        )

    def committed(self, record: CommitRecord, metrics: Mapping[str, float]) -> CommitAnswer:
        """Report a commit; every committing group does."""
        sent = {k: v if math.isfinite(v) else None for k, v in metrics.items()}
        answer = self._post("committed", record=record.to_json(), metrics=sent)
        return CommitAnswer(answer["status"], answer["reason"], tuple(answer["duties"]))

    def duty(self, kind: str, state: State) -> tuple[bool, str]:
        """Ask to be the one that does `kind` ("publish", "save") for `state`: (granted, why)."""
        answer = self._post("duty", kind=kind, **asdict(state))
        return answer["granted"], answer["reason"]

    def duty_done(self, kind: str, state: State, result: dict[str, Any]) -> list[str]:
        """publish: result = {"version": v}; save: {"path": p}, once it is durable. Returns paths
        of checkpoints that are not needed any more."""
        return self._post("duty_done", kind=kind, **asdict(state), result=result)["removable"]

    def unusable(self, path: str, reason: str) -> None:
        """The checkpoint at `path` is damaged: ask again for what to load."""
        self._post("unusable", path=path, reason=reason)

    def policy_version(self) -> int | None:
        """The newest version that was announced."""
        published = self.status()["published"]
        return None if published is None else published["version"]

    def live(self, state: State, phase: str, deadline_s: float) -> None:
        self._post("live", deadline_s, **asdict(state), phase=phase)

    def refused(
        self, step: int, batch_id: int, cause: str, *, numeric: bool
    ) -> Literal["retry", "drop", "stop"]:
        """Report a step that was not committed; `numeric`: NaN and the like."""
        return self._post(
            "refused",
            step=step,
            batch_id=batch_id,
            cause=cause,
            numeric=numeric,
            attempt=secrets.token_hex(8),
        )["action"]

    def ask_exit(self, reason: str, deadline_s: float) -> Literal["exit", "leave"]:
        """This process's group was told to end: the job stops at the next step boundary, or
        this group leaves at its own."""
        body = {"reason": reason, "replica_id": self.member.replica_id}
        return self._rpc.post("/v1/ledger/exit", body, deadline_s=deadline_s)["action"]

    def status(self) -> dict[str, Any]:
        return self._rpc.get("/v1/ledger/status", deadline_s=self._deadline_s)

    def dead_groups(self, deadline_s: float) -> set[int]:
        """Replica ids of groups none of whose processes lives, as far as the ledger knows."""
        members = self._rpc.get("/v1/ledger/status", deadline_s=deadline_s)["members"]
        living = {m["replica_id"] for m in members if m["alive"]}
        return {m["replica_id"] for m in members} - living

    def _post(self, name: str, deadline_s: float | None = None, **body: Any) -> Any:
        return self._rpc.post(
            f"/v1/ledger/{name}",
            {"member": self._member, **body},
            deadline_s=deadline_s or self._deadline_s,
        )


class LiveBeats:
    """Tells the ledger every `interval_s` from a side thread that this process lives."""

    def __init__(self, client: LedgerClient, interval_s: float = 2.0) -> None:
        self._client, self._interval_s = client, interval_s
        self._now: tuple[State, str] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger-live", daemon=True)

    def start(self, state: State, phase: str) -> None:
        self.update(state, phase)
        self._thread.start()

    def update(self, state: State, phase: str) -> None:
        """What the next beats say."""
        self._now = (state, phase)

    def stop(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2 * self._interval_s)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            assert self._now is not None
            state, phase = self._now
            try:
                self._client.live(state, phase, deadline_s=self._interval_s)
            except (RoleUnreachable, RoleRefused) as e:
                # The ledger may be restarting; the training loop's own calls decide.
                logger.debug("live beat: %s", e)


def _checkpoint(answer: dict[str, Any] | None) -> CheckpointRef | None:
    return None if answer is None else CheckpointRef(**answer)
