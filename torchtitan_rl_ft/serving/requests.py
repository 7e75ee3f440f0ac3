"""What is asked of serving, and how a request can fail."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchtitan_rl_ft.config.groups import POLICY


class RequestRejected(Exception):
    """The request itself is bad: no engine would take it."""


class RequestFailed(Exception):
    """No engine answered within the caller's limit or the number of tries. `tried`: an engine was
    asked, so the request itself may be what engines fail on."""

    def __init__(self, message: str, tried: bool) -> None:
        super().__init__(message)
        self.tried = tried


@dataclass(frozen=True)
class Held:
    """What a caller has of a sample from an earlier answer. The lists have one length."""

    output_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: str | None = None


@dataclass(frozen=True)
class GenerateRequest:
    """`n` samples of one prompt group; `seeds` has one integer for each, or is None. `sampling`
    has SGLang's names and values; the three that are read here have to be of the right type.
    `held` has one entry for each sample, from which it goes on, or is empty."""

    request_id: str
    input_ids: list[int]
    n: int
    sampling: dict[str, Any]
    seeds: list[int] | None
    timeout_s: float
    group: str = POLICY
    held: tuple[Held, ...] = ()
    partial_interval_tokens: int = 0
    """The caller is told of unfinished samples: at no time does it lack more tokens of one than
    this. 0: it is told at the end."""

    trace: bool = False
    """The answer says when which engine worked on each sample."""

    @property
    def max_new_tokens(self) -> int:
        return self.sampling.get("max_new_tokens", 128)  # SGLang's default

    @property
    def min_new_tokens(self) -> int:
        return self.sampling.get("min_new_tokens", 0)

    @property
    def stop_token_ids(self) -> list[int]:
        return self.sampling.get("stop_token_ids") or []
