"""Who holds which version of the policy, and who gives it to whom next (docs/architecture.md).

No clock, no network: every call brings the time. A holder gives to one receiver at a time, and a
receiver that has all of a version gives it on, so N receivers have it after about log2(N) times
what one transfer takes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.pieces import (
    Piece,
    Range,
    contains,
    cover,
    intersect,
    merge,
    subtract,
    total,
)

SILENT_S = 5.0
"""A holder that was not heard of for so long is asked for nothing."""

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0
"""A holder that failed a receiver is not given to it for so long: doubling, up to this."""

SEVERAL = 2
"""So many receivers that it fails at a time mean that the holder itself is at fault."""

KEPT_WANTED = 16


class Superseded(Exception):
    """A newer version can be had, this one is not worth its transfer any more."""


class NotWanted(Exception):
    """Nobody has asked for this version."""


class Replaced(Exception):
    """A younger process has this holder's name: it is to end."""


@dataclass(frozen=True)
class Held:
    """A version that a holder has, or a part of it. `pieces`: None when it has told them before,
    or has all."""

    key: Key
    layout_digest: str
    whole: bool
    pieces: tuple[Piece, ...] | None = None


@dataclass(frozen=True)
class Report:
    """What a holder tells of itself."""

    name: str
    kind: Literal["source", "relay"]
    url: str
    pid: int
    start_time: float
    host: str
    held: tuple[Held, ...] = ()


@dataclass(frozen=True)
class Answer:
    """To a report: versions that are not to be dropped, and those whose pieces are known here."""

    keep: list[Key]
    known: list[Key]


@dataclass(frozen=True)
class Wanted:
    """A version that relays are to get. `nbytes`: size of its image."""

    key: Key
    layout_digest: str
    nbytes: int


@dataclass(frozen=True)
class Lease:
    """`giver`, at `url`, pushes `ranges` to `receiver`, and nothing to anyone else meanwhile."""

    id: str
    giver: str
    url: str
    receiver: str
    key: Key
    ranges: tuple[Range, ...]
    granted_s: float


@dataclass
class _Holding:
    layout_digest: str
    whole: bool
    ranges: list[Range] | None  # None: all of it, or not told yet
    conflict: str | None = None

    @property
    def told(self) -> bool:
        return self.whole or self.ranges is not None

    def of(self, missing: Iterable[Range]) -> list[Range]:
        """What it has of `missing`."""
        if self.conflict is not None:
            return []
        return merge(missing) if self.whole else intersect(self.ranges or (), missing)


@dataclass
class _Failures:
    in_a_row: int = 0
    until_s: float = 0.0


@dataclass
class _Holder:
    report: Report
    seen_s: float
    held: dict[Key, _Holding] = field(default_factory=dict)
    used: int = 0
    lease: Lease | None = None
    failures: dict[str, _Failures] = field(default_factory=dict)  # by receiver

    @property
    def is_relay(self) -> bool:
        return self.report.kind == "relay"

    def barred(self, receiver: str, now_s: float) -> bool:
        failing = [r for r, f in self.failures.items() if f.until_s > now_s]
        return receiver in failing or len(failing) >= SEVERAL

    def holds_whole(self, wanted: Wanted) -> bool:
        held = self.held.get(wanted.key)
        return held is not None and held.whole and held.layout_digest == wanted.layout_digest


class Directory:
    """Times are seconds of one monotonic clock. `lease_limit_s`: no lease lasts longer."""

    def __init__(self, lease_limit_s: float = 60.0, silent_s: float = SILENT_S) -> None:
        self._lease_limit_s, self._silent_s = lease_limit_s, silent_s
        self._holders: dict[str, _Holder] = {}
        self._wanted: dict[Key, Wanted] = {}  # the newest last
        self._sums: dict[Key, dict[Range, tuple[str, str]]] = {}  # -> digest, who has told it first
        self._ids = count(1)

    # Reports --------------------------------------------------------------------------------

    def report(self, told: Report, now_s: float, needed: Iterable[Key] = ()) -> Answer:
        """`needed`: versions that somebody here reads. Raises Replaced."""
        self._expire(now_s)
        holder = self._holders.get(told.name)
        if holder is not None and not _same(holder.report, told):
            if holder.report.host == told.host and holder.report.start_time > told.start_time:
                raise Replaced(f"{told.name} is process {holder.report.pid} now")
            self.gone(told.name)
            holder = None
        if holder is None:
            holder = self._holders[told.name] = _Holder(told, now_s)
        holder.report, holder.seen_s = told, now_s
        before = holder.held
        holder.held = {h.key: self._holding(told.name, h, before.get(h.key)) for h in told.held}
        known = [key for key, held in holder.held.items() if held.told]
        return Answer(self._keep(holder, now_s, needed), known)

    def _holding(self, name: str, told: Held, before: _Holding | None) -> _Holding:
        if told.pieces is None:
            same = before is not None and before.layout_digest == told.layout_digest
            ranges = before.ranges if same and before is not None else None
            conflict = before.conflict if same and before is not None else None
            return _Holding(told.layout_digest, told.whole, ranges, conflict)
        conflict = self._conflict(name, told)
        ranges = cover(told.pieces)
        return _Holding(told.layout_digest, told.whole, ranges, conflict)

    def _conflict(self, name: str, told: Held) -> str | None:
        """Who has told other checksums of the same bytes; that one was first."""
        sums = self._sums.setdefault(told.key, {})
        for piece in told.pieces or ():
            first = sums.setdefault(piece.range, (piece.digest, name))
            if first[0] != piece.digest:
                if first[1] == name:  # its process was started anew
                    sums[piece.range] = (piece.digest, name)
                    continue
                return first[1]
        return None

    def _keep(self, holder: _Holder, now_s: float, needed: Iterable[Key]) -> list[Key]:
        newest = self.newest
        keep = {newest.key} if newest is not None else set()
        if holder.is_relay:
            # Until the newest is there, the one before it is what a late engine takes.
            whole = (w.key for w in reversed(self._wanted.values()) if self.whole(w.key, now_s))
            keep |= {*needed, *(k for k in [next(whole, None)] if k is not None)}
        return sorted(keep)

    def held(self, name: str) -> set[Key]:
        """Versions of which a holder has all, by its last report."""
        holder = self._holders.get(name)
        return {k for k, h in holder.held.items() if h.whole} if holder is not None else set()

    def gone(self, name: str) -> None:
        """Its process has ended."""
        self._holders.pop(name, None)
        for holder in self._holders.values():
            holder.failures.pop(name, None)
            if holder.lease is not None and holder.lease.receiver == name:
                holder.lease = None

    def found(self, name: str, pid: int) -> tuple[str, float] | None:
        """The address of a holder, and when it was heard of last; None before its first report as
        process `pid`."""
        holder = self._holders.get(name)
        if holder is None or holder.report.pid != pid:
            return None
        return holder.report.url, holder.seen_s

    def conflicts(self) -> list[tuple[str, Key, str]]:
        """Sources that are not used for a version, and whose checksums theirs contradict."""
        return [
            (name, key, held.conflict)
            for name, holder in self._holders.items()
            for key, held in holder.held.items()
            if held.conflict is not None
        ]

    # Versions -------------------------------------------------------------------------------

    def want(self, key: Key, layout_digest: str, nbytes: int) -> None:
        """Relays are to get this version: the newest from now on."""
        self._wanted.pop(key, None)
        self._wanted[key] = Wanted(key, layout_digest, nbytes)
        for old in list(self._wanted)[:-KEPT_WANTED]:
            del self._wanted[old]
        self._sums = {k: v for k, v in self._sums.items() if k in self._wanted or self._held(k)}

    def _held(self, key: Key) -> bool:
        return any(key in h.held for h in self._holders.values())

    @property
    def newest(self) -> Wanted | None:
        return next(reversed(self._wanted.values()), None)

    def whole(self, key: Key, now_s: float) -> list[str]:
        """Relays that have all of it, and were heard of lately."""
        wanted = self._wanted.get(key)
        if wanted is None:
            return []
        return [n for n, h in self._living(now_s) if h.is_relay and h.holds_whole(wanted)]

    def can_be_had(self, key: Key, now_s: float) -> bool:
        """Whether living holders have all of it together."""
        wanted = self._wanted.get(key)
        return wanted is not None and self._covered(wanted, [(0, wanted.nbytes)], now_s)

    def superseded(self, key: Key, missing: Sequence[Range], now_s: float) -> bool:
        """Whether a version that was wanted later is with a relay, or can alone be had."""
        keys = list(self._wanted)
        later = keys[keys.index(key) + 1 :]
        if any(self.whole(k, now_s) for k in later):
            return True
        return bool(later) and not self._covered(self._wanted[key], missing, now_s)

    def _covered(self, wanted: Wanted, missing: Sequence[Range], now_s: float) -> bool:
        held = [h.held[wanted.key] for _, h in self._living(now_s) if self._gives(h, wanted)]
        return contains((r for h in held for r in h.of(missing)), missing)

    def _gives(self, holder: _Holder, wanted: Wanted) -> bool:
        held = holder.held.get(wanted.key)
        if held is None or held.layout_digest != wanted.layout_digest or not held.told:
            return False
        return held.conflict is None and (held.whole or not holder.is_relay)

    def _living(self, now_s: float) -> Iterator[tuple[str, _Holder]]:
        for name, holder in self._holders.items():
            if now_s - holder.seen_s <= self._silent_s:
                yield name, holder

    # Leases ---------------------------------------------------------------------------------

    def lease(self, receiver: str, key: Key, missing: Iterable[Range], now_s: float) -> list[Lease]:
        """Who gives `receiver` what of `missing`, which it neither has nor is being given: leases
        of it for those bytes, and for other versions, are over. Empty while all who could are busy.
        Raises NotWanted, Superseded."""
        self._expire(now_s)
        wanted, missing = self._wanted.get(key), merge(missing)
        if wanted is None:
            raise NotWanted(f"{key} was not published here")
        self._end_leases(receiver, key, missing)
        if self.superseded(key, missing, now_s):
            raise Superseded(f"{key} is superseded")
        free = [
            (n, h)
            for n, h in self._living(now_s)
            if n != receiver
            and h.lease is None
            and self._gives(h, wanted)
            and not h.barred(receiver, now_s)
        ]
        free.sort(key=lambda p: (not p[1].is_relay, p[1].used, p[0]))
        granted = []
        for name, holder in free:
            ranges = holder.held[key].of(missing)
            if not ranges:
                continue
            missing = subtract(missing, ranges)
            url, number = holder.report.url, str(next(self._ids))
            holder.lease = Lease(number, name, url, receiver, key, tuple(ranges), now_s)
            holder.used += 1
            granted.append(holder.lease)
        return granted

    def returned(self, lease_id: str, ok: bool, now_s: float) -> Lease | None:
        """The lease, which is over; None when it was before."""
        for holder in self._holders.values():
            lease = holder.lease
            if lease is not None and lease.id == lease_id:
                holder.lease = None
                if ok:
                    holder.failures.clear()
                else:
                    _fail(holder, lease.receiver, now_s)
                return lease
        return None

    def leases(self) -> list[Lease]:
        return [h.lease for h in self._holders.values() if h.lease is not None]

    def _end_leases(self, receiver: str, key: Key, missing: list[Range]) -> None:
        """A receiver gets one version at a time."""
        for holder in self._holders.values():
            lease = holder.lease
            if lease is None or lease.receiver != receiver:
                continue
            if lease.key != key or intersect(lease.ranges, missing):
                holder.lease = None

    def _expire(self, now_s: float) -> None:
        """Leases of receivers that are not heard of, and those that have lasted too long."""
        living = {name for name, _ in self._living(now_s)}
        for holder in self._holders.values():
            lease = holder.lease
            if lease is None:
                continue
            if lease.receiver not in living:
                holder.lease = None
            elif now_s - lease.granted_s > self._lease_limit_s:
                holder.lease = None
                _fail(holder, lease.receiver, now_s)

    def receives(self, receiver: str, key: Key) -> bool:
        """Whether somebody gives it some of that version now."""
        return any((x.receiver, x.key) == (receiver, key) for x in self.leases())

    # Shown ----------------------------------------------------------------------------------

    def to_json(self, now_s: float) -> dict[str, Any]:
        return {
            "wanted": [
                {
                    "step": w.key.step,
                    "token": w.key.token,
                    "layout_digest": w.layout_digest,
                    "nbytes": w.nbytes,
                    "relays": self.whole(w.key, now_s),
                }
                for w in self._wanted.values()
            ],
            "holders": [self._shown(name, h, now_s) for name, h in self._holders.items()],
        }

    def _shown(self, name: str, holder: _Holder, now_s: float) -> dict[str, Any]:
        told, lease = holder.report, holder.lease
        return {
            "name": name,
            "kind": told.kind,
            "url": told.url,
            "pid": told.pid,
            "start_time": told.start_time,
            "host": told.host,
            "silent_s": round(now_s - holder.seen_s, 3),
            "used": holder.used,
            "gives_to": None if lease is None else lease.receiver,
            "failing": sorted(r for r, f in holder.failures.items() if f.until_s > now_s),
            "held": [
                {
                    "step": key.step,
                    "token": key.token,
                    "whole": held.whole,
                    "nbytes": None if held.ranges is None else total(held.ranges),
                    "conflict": held.conflict,
                }
                for key, held in holder.held.items()
            ],
        }


def _same(left: Report, right: Report) -> bool:
    """Whether both are of one process."""
    ids = [(r.host, r.pid, r.start_time) for r in (left, right)]
    return ids[0] == ids[1]


def _fail(holder: _Holder, receiver: str, now_s: float) -> None:
    failures = holder.failures.setdefault(receiver, _Failures())
    wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**failures.in_a_row)
    failures.in_a_row += 1
    failures.until_s = now_s + wait_s
