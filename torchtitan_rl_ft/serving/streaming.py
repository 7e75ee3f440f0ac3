"""The stream of an SGLang 0.5.23 /generate answer: server-sent events, and refusals in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torchtitan_rl_ft.serving.samples import ABORTED

DONE = b"[DONE]"
_FIELD = b"data: "
_END = b"\n\n"


class EventSplitter:
    """Bytes as they come in, whole events out. An event may be of any length: an abort in
    SGLang's queue repeats all log-probs of a sample."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        seen = max(0, len(self._rest) - 1)
        self._rest += data
        if self._rest.find(_END, seen) < 0:
            return
        *whole, rest = bytes(self._rest).split(_END)
        self._rest = bytearray(rest)
        for event in whole:
            if event.startswith(_FIELD):
                yield event[len(_FIELD) :]


def stream_refusal(message: dict[str, Any]) -> tuple[int, str] | None:
    """(HTTP status, text) of a request that is refused within its stream: a bad one, by an error
    in place of a message; one that the scheduler gives up, by an abort with a status."""
    error = message.get("error")
    if error is not None:
        return int(error["code"]), str(error["message"])
    finish = message["meta_info"]["finish_reason"]
    if finish is None or finish["type"] != ABORTED or finish.get("status_code") is None:
        return None
    return int(finish["status_code"]), str(finish["message"])
