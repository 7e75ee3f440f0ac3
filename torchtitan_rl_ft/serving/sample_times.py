"""When which engine worked on a sample, for the trace of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class LegTimes:
    """One engine's share of a sample, on the router's clock.

    The first token is the first message of a stream. SGLang tells of the queue, and of the first
    token of an answer that was not streamed, only where it was started with --enable-metrics.
    """

    sent_s: float
    first_s: float | None = None
    end_s: float | None = None
    queue_s: float | None = None

    def told(self, now_s: float, message: Mapping[str, Any], ended: bool) -> None:
        """A message of the sample has come."""
        meta = message["meta_info"]
        if self.first_s is None and not ended:
            self.first_s = now_s
        if ended:
            self.end_s = now_s
            self.queue_s = _seconds(meta.get("queue_time"))
            latency_s = _seconds(meta.get("first_token_latency"))
            if latency_s is not None and self.first_s is None:
                self.first_s = min(now_s, self.sent_s + latency_s)

    def to_json(self, engine: str, tokens: int, since_s: float, now_s: float) -> list[Any]:
        """[engine, sent_ms, first_ms | null, end_ms, tokens, queue_ms | null], since `since_s`."""
        first_ms = None if self.first_s is None else _ms(self.first_s - since_s)
        queue_ms = None if self.queue_s is None else _ms(self.queue_s)
        end_s = now_s if self.end_s is None else self.end_s
        sent_ms, end_ms = _ms(self.sent_s - since_s), _ms(end_s - since_s)
        return [engine, sent_ms, first_ms, end_ms, tokens, queue_ms]


def _seconds(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
