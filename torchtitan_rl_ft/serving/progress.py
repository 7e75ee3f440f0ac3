"""What engines have given of a request so far, and what a caller has been told of it. Pure but for
the waking of waiters."""

from __future__ import annotations

from typing import Any

from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.requests import GenerateRequest
from torchtitan_rl_ft.serving.samples import Draft


class Progress:
    """The drafts of a request in work."""

    def __init__(self, request: GenerateRequest) -> None:
        held = request.held
        self.drafts = [Draft.of(h) for h in held] if held else [Draft() for _ in range(request.n)]
        self.changes = Changes()
        self.told = [len(draft.output_ids) for draft in self.drafts]
        """Tokens of each sample that some caller has."""

    @property
    def untold(self) -> int:
        """Tokens that no caller has."""
        pairs = zip(self.drafts, self.told, strict=True)
        return sum(max(0, len(draft.output_ids) - told) for draft, told in pairs)


class Account:
    """What one caller knows of a request: `news` is what it lacks. Together with the tokens that
    engines have drawn and not sent yet, at most `stream_interval`, that is less than the caller's
    interval."""

    def __init__(
        self, progress: Progress, request: GenerateRequest, stream_interval_tokens: int
    ) -> None:
        self._progress = progress
        self._known = [len(h.output_ids) for h in request.held] or [0] * request.n
        self._ended = [h.finish_reason is not None for h in request.held] or [False] * request.n
        self._revisions = [0] * request.n
        self._most = stream_limit(request.partial_interval_tokens, stream_interval_tokens)[1]

    @property
    def due(self) -> bool:
        """Whether the caller should be told now."""
        for i, draft in enumerate(self._progress.drafts):
            if len(draft.output_ids) - self._known[i] >= self._most:
                return True
            if any(at < self._known[i] for at in draft.revised[self._revisions[i] :]):
                return True
        return False

    @property
    def lacks(self) -> bool:
        """Whether there is anything that the caller does not know."""
        drafts = enumerate(self._progress.drafts)
        return self.due or any(len(draft.output_ids) != self._known[i] for i, draft in drafts)

    def news(self) -> list[dict[str, Any]]:
        """What has come, or was changed, since the last time: of each sample, everything from
        token `start` on."""
        found = []
        for i, draft in enumerate(self._progress.drafts):
            start = min([self._known[i], *draft.revised[self._revisions[i] :]])
            ended = draft.finish_reason is not None
            length = len(draft.output_ids)
            if start == self._known[i] == length and ended == self._ended[i]:
                continue
            found.append(
                {
                    "index": i,
                    "start": start,
                    "output_ids": draft.output_ids[start:],
                    "logprobs": draft.logprobs[start:],
                    "versions": draft.versions[start:],
                    "finish_reason": draft.finish_reason,
                }
            )
            self._revisions[i] = len(draft.revised)
            self._known[i], self._ended[i] = length, ended
            self._progress.told[i] = length
        return found


def stream_limit(partial_tokens: int, stream_tokens: int) -> tuple[int, int]:
    """(tokens between two messages of an engine, untold tokens at which the caller is told), such
    that a caller never lacks `partial_tokens` of a sample: of two messages, one may be under way
    here and one in the engine."""
    interval = min(stream_tokens, max(1, partial_tokens // 4))
    return interval, max(1, partial_tokens - 2 * interval)
