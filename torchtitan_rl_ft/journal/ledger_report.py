"""`torchtitan report --ledger`: the journal's accounts, proved and shown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.journal.audit import Audit, HistoryRow, Rows, audit_rows, snapshot
from torchtitan_rl_ft.journal.records import GENESIS

MAX_SPANS = 12
"""Spans of steps with the same groups that are shown; JSON has every step."""


@dataclass(frozen=True)
class GroupRow:
    """Where one prompt group is. `step`: of the batch that it is in, trained or planned."""

    group_id: int
    key: str | None
    state: str  # pending, accepted, sealed, trained, dropped
    batch_id: int | None
    step: int | None
    reason: str | None


@dataclass(frozen=True)
class SupersededRow:
    """A commit that no longer leads to the current parameters."""

    step: int
    batch_id: int
    token: str
    participants: int
    from_step: int
    to_step: int
    reason: str


@dataclass(frozen=True)
class LedgerReport:
    """The accounts of one run; they hold when `audit.ok`."""

    folder: Path
    audit: Audit
    groups: list[GroupRow]
    superseded: list[SupersededRow]

    @classmethod
    def of(cls, folder: Path) -> LedgerReport:
        """Of the journal in `folder` (RUN/journal), whether its owner lives or has died.

        Nothing is written. Raises JournalError when there is no journal, or it is damaged or of
        another format.
        """
        with snapshot(folder) as rows:
            return cls(folder, audit_rows(rows), _groups(rows), _superseded(rows))

    @property
    def shares(self) -> dict[str, tuple[int, int, int]]:
        """(steps, samples, tokens) that each replica group trained of the living history."""
        total: dict[str, tuple[int, int, int]] = {}
        for commit in self.audit.history:
            for share in commit.shares:
                steps, samples, tokens = total.get(share.group, (0, 0, 0))
                total[share.group] = steps + 1, samples + share.samples, tokens + share.tokens
        return dict(sorted(total.items()))

    def to_json(self) -> dict[str, Any]:
        """Everything, fit for JSON: each step with its digest, tokens and shares, each prompt
        group, each superseded commit."""
        history = self.audit.history
        return {
            "journal": str(self.folder),
            "ok": self.audit.ok,
            "problems": self.audit.problems,
            "tip": {
                "step": len(history),
                "token": history[-1].token if history else GENESIS,
            },
            "history": [
                {**asdict(c), "shares": [share._asdict() for share in c.shares]} for c in history
            ],
            "superseded": [asdict(s) for s in self.superseded],
            "prompts": self.audit.counts,
            "dropped": self.audit.dropped,
            "groups": [asdict(g) for g in self.groups],
            "shares": {
                name: {"steps": steps, "samples": samples, "tokens": tokens}
                for name, (steps, samples, tokens) in self.shares.items()
            },
        }

    def lines(self) -> list[str]:
        """The report for people."""
        history, counts = self.audit.history, self.audit.counts
        rows = [
            ("journal", str(self.folder)),
            ("history", _history_text(history)),
            ("superseded", _superseded_text(self.superseded)),
            ("prompts", _prompts_text(counts)),
            *_labelled("dropped", [f"{n}  {why}" for why, n in self.audit.dropped.items()]),
            *_labelled("trained", _shares_text(self.shares, history)),
            *_labelled("steps", _spans(history)),
            *_labelled("violation", self.audit.problems),
            ("accounts", "hold" if self.audit.ok else f"{len(self.audit.problems)} violations"),
        ]
        return [f"{name:<11}{text}" for name, text in rows]


def _groups(rows: Rows) -> list[GroupRow]:
    return [
        GroupRow(*row)
        for row in rows(
            "SELECT g.id, g.key, CASE WHEN c.id IS NULL THEN g.state ELSE 'trained' END,"
            " g.batch_id, p.step, g.reason FROM groups g"
            " LEFT JOIN plan p ON p.batch_id = g.batch_id"
            " LEFT JOIN commits c ON c.batch_id = g.batch_id AND c.superseded_by IS NULL"
            " ORDER BY g.id"
        )
    ]


def _superseded(rows: Rows) -> list[SupersededRow]:
    return [
        SupersededRow(*row)
        for row in rows(
            "SELECT c.step, c.batch_id, c.token, c.participants, r.from_step, r.to_step, r.reason"
            " FROM commits c JOIN rewinds r ON r.id = c.superseded_by ORDER BY c.id"
        )
    ]


def _labelled(name: str, texts: Iterable[str]) -> list[tuple[str, str]]:
    """A row per text, the label on the first."""
    return [(name if i == 0 else "", text) for i, text in enumerate(texts)]


def _history_text(history: list[HistoryRow]) -> str:
    if not history:
        return "no step is committed"
    adopted = sum(c.adopted for c in history)
    lost = f", {adopted} of them told by the state itself (lost reports)" if adopted else ""
    return f"{len(history)} steps{lost}; tip {history[-1].token}"


def _superseded_text(superseded: list[SupersededRow]) -> str:
    if not superseded:
        return "none"
    rewinds = Counter((s.from_step, s.to_step) for s in superseded)
    spans = ", ".join(f"{start} -> {to}" for start, to in rewinds)
    return f"{len(superseded)} commits, kept; the history went back {spans}"


def _prompts_text(counts: dict[str, int]) -> str:
    parts = ", ".join(f"{n} {state}" for state, n in counts.items())
    return f"{sum(counts.values())} groups: {parts}"


def _shares_text(shares: dict[str, tuple[int, int, int]], history: list[HistoryRow]) -> list[str]:
    samples = sum(c.samples for c in history)
    return [
        f"{name}: {n} of {samples} samples ({n / samples:.1%}), {tokens} tokens, {steps} steps"
        for name, (steps, n, tokens) in shares.items()
    ]


def _spans(history: list[HistoryRow]) -> list[str]:
    """Steps that the same groups trained, run together."""
    spans = []
    for names, commits in groupby(history, key=lambda c: [s.group for s in c.shares]):
        span = list(commits)
        samples = (sum(c.shares[i].samples for c in span) for i in range(len(names)))
        told = " + ".join(f"{name} {n}" for name, n in zip(names, samples, strict=True))
        spans.append(f"{span[0].step}..{span[-1].step}: {told} samples")
    hidden = len(spans) - MAX_SPANS
    return spans if hidden <= 0 else [f"({hidden} more, see --json)", *spans[-MAX_SPANS:]]
