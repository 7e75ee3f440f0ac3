"""What a user plugs in by `module:name`: a prompt source, a reward, a filter of groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One visit of a prompt. Everything is plain JSON: it is kept in the journal."""

    text: str
    """What the model continues, chat template applied."""

    answer: Any = None
    """What the reward needs to judge a response."""

    epoch: int = 0
    """How often the source has been through its prompts before this visit."""

    index: int = 0
    """Which prompt of the source this is. (epoch, index) names the visit and seeds it."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Prompt:
        return cls(**{k: data[k] for k in cls.__dataclass_fields__})


@dataclass(frozen=True)
class Response:
    """One sampled answer."""

    text: str
    """Decoded without special tokens."""

    token_ids: Sequence[int]
    """As sampled, the end token included."""

    finish_reason: str
    """"stop" (it ended itself) or "length" (it was cut at rollout.max_response_tokens)."""


@dataclass(frozen=True)
class PluginContext:
    """What a plug-in class is constructed with, as its only argument."""

    seed: int
    """rl.seed."""

    tokenizer: Tokenizer
    model_path: Path
    """HF directory of the initial model (tokenizer_config.json with the chat template)."""

    options: dict[str, Any] = field(default_factory=dict)
    """The query part of `module:name?key=value&key=value`, as text."""


@runtime_checkable
class DataSource(Protocol):
    """Prompts in an order that depends on the seed and the position alone."""

    def next(self, n: int) -> Sequence[Prompt]:
        """The next `n` visits; fewer only when the source is exhausted for good."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The position as JSON; kept in the journal with the prompts drawn up to it."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position. Raises ValueError when it is of another source."""
        ...


@runtime_checkable
class HeldOutSource(Protocol):
    """A source that can be evaluated."""

    def held_out(self, n: int) -> Sequence[Prompt]:
        """At most `n` prompts that `next` never gives, the same ones on every call."""
        ...


class Reward(Protocol):
    """A function, or a class constructed with a PluginContext. Called in a worker thread with
    one response at a time; an `async def` is awaited on the event loop instead, all samples of
    a group at once.

    Returns a finite number; None (or NaN) when the response cannot be judged: it is then kept
    out of the loss. An exception counts as a failure of the prompt. `close()`, if there is one,
    is called at the end.
    """

    def __call__(self, prompt: Prompt, response: Response) -> Any: ...


class GroupFilter(Protocol):
    """A function, or a class constructed with a PluginContext."""

    def __call__(self, prompt: Prompt, rewards: Sequence[float]) -> str | None:
        """Why the rolled-out group is not worth training on, or None to keep it. `rewards`
        holds NaN where there is none."""
        ...
