"""HTTP routes of the ledger; the rollout role mounts them (`rpc.server.make_app`)."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Generator
from typing import Any

from aiohttp import web

from torchtitan_rl_ft.journal.errors import JournalError, JournalStateError, JournalWriteError
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.protocol import CheckpointRef, State
from torchtitan_rl_ft.journal.records import CommitRecord, Member
from torchtitan_rl_ft.rpc.server import RequestError

MAX_POLL_S = 30.0

Answer = dict[str, Any]


def routes(ledger: Ledger) -> list[web.RouteDef]:
    """All of /v1/ledger and /v1/batches, as docs/architecture.md has them."""
    service = _Service(ledger)
    posts: dict[str, Callable[[Answer], Answer]] = {
        "attach": service.attach,
        "begin": service.begin,
        "committed": service.committed,
        "duty": service.duty,
        "duty_done": service.duty_done,
        "live": service.live,
        "refused": service.refused,
        "exit": service.exit,
        "unusable": service.unusable,
    }
    return [
        *(web.post(f"/v1/ledger/{name}", service.handler(f)) for name, f in posts.items()),
        web.get("/v1/ledger/next", service.next),
        web.get("/v1/ledger/status", service.status),
        web.get(r"/v1/batches/{batch_id:\d+}", service.batch),
    ]


class _Service:
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def handler(
        self, answer: Callable[[Answer], Answer]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                body = await request.json()
            except ValueError as e:
                raise RequestError(400, f"the body is not JSON: {e}") from e
            with self._errors():
                return web.json_response(answer(body))

        return handle

    @contextlib.contextmanager
    def _errors(self) -> Generator[None]:
        """Answer errors by name; a journal that cannot be used ends the run."""
        try:
            yield
        except (KeyError, TypeError, ValueError) as e:
            raise RequestError(400, f"bad request: {type(e).__name__}: {e}") from e
        except JournalStateError as e:
            raise RequestError(409, str(e)) from e
        except JournalError as e:
            self._ledger.fail(str(e))
            raise RequestError(507 if isinstance(e, JournalWriteError) else 500, str(e)) from e

    async def next(self, request: web.Request) -> web.StreamResponse:
        try:
            step = int(request.query["step"])
            timeout_s = min(float(request.query.get("timeout_s", "0")), MAX_POLL_S)
        except (KeyError, ValueError) as e:
            raise RequestError(400, f"bad request: {type(e).__name__}: {e}") from e
        uuid = request.query.get("uuid", "")
        token = request.query.get("token", "")
        with self._errors():
            return web.json_response(await self._ledger.next(step, uuid, timeout_s, token))

    async def status(self, request: web.Request) -> web.StreamResponse:
        with self._errors():
            return web.json_response(self._ledger.status())

    async def batch(self, request: web.Request) -> web.StreamResponse:
        batch_id = int(request.match_info["batch_id"])
        with self._errors():
            data = self._ledger.journal.batch_bytes(batch_id)
            return web.Response(body=data, content_type="application/octet-stream")

    def attach(self, body: Answer) -> Answer:
        answer = self._ledger.attach(_member(body))
        tip = self._ledger.journal.tip
        return {
            "start": answer.start,
            "checkpoint": _checkpoint(answer.checkpoint),
            "tip": {"step": tip.step, "token": tip.token},
            "skipped": list(answer.skipped),
        }

    def begin(self, body: Answer) -> Answer:
        tail = body.get("tail")
        verdict = self._ledger.begin(
            _member(body),
            _state(body),
            None if tail is None else CommitRecord.from_json(tail),
            participants=int(body["participants"]),
            quorum_id=int(body["quorum_id"]),
        )
        return {
            "decision": str(verdict.decision),
            "reason": verdict.reason,
            "batch_id": verdict.batch.batch_id if verdict.batch else None,
            "digest": verdict.batch.digest if verdict.batch else None,
            "checkpoint": _checkpoint(verdict.checkpoint),
            "outcome": verdict.outcome,
        }

    def committed(self, body: Answer) -> Answer:
        status, reason, duties = self._ledger.committed(
            _member(body), CommitRecord.from_json(body["record"]), dict(body["metrics"])
        )
        return {"status": status, "reason": reason, "duties": duties}

    def duty(self, body: Answer) -> Answer:
        granted, reason = self._ledger.duty(_member(body), body["kind"], _state(body))
        return {"granted": granted, "reason": reason}

    def duty_done(self, body: Answer) -> Answer:
        removable = self._ledger.duty_done(
            _member(body), body["kind"], _state(body), body["result"]
        )
        return {"removable": removable}

    def unusable(self, body: Answer) -> Answer:
        self._ledger.unusable(_member(body), str(body["path"]), str(body["reason"]))
        return {}

    def live(self, body: Answer) -> Answer:
        self._ledger.live(_member(body), _state(body), str(body["phase"]))
        return {}

    def refused(self, body: Answer) -> Answer:
        action = self._ledger.refused(
            _member(body),
            int(body["batch_id"]),
            str(body["cause"]),
            numeric=bool(body["numeric"]),
            attempt=str(body.get("attempt", "")),
        )
        return {"action": action}

    def exit(self, body: Answer) -> Answer:
        replica_id = body.get("replica_id")
        group = None if replica_id is None else int(replica_id)
        return {"action": self._ledger.ask_exit(str(body["reason"]), group)}


def _member(body: Answer) -> Member:
    return Member.from_json(body["member"])


def _state(body: Answer) -> State:
    return State(int(body["step"]), str(body["token"]))


def _checkpoint(checkpoint: CheckpointRef | None) -> Answer | None:
    if checkpoint is None:
        return None
    return {"step": checkpoint.step, "token": checkpoint.token, "path": checkpoint.path}
