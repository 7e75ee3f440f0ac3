"""The strict ratio of a run, counted tick by tick from the raw lines of its events: slow, and
without anything of what it checks but the lines themselves."""

from __future__ import annotations

import itertools
from collections import defaultdict

from torchtitan_rl_ft.observability.events import Event, Kind

IDLE = {"attach", "waiting_for_batch", "quorum", "starting", "restarting"}


def strict_by_hand(events: list[Event], until_s: float, tick_s: float = 0.002) -> float:
    """From the first event until `until_s`. Of runs without a rewind, an engine that is lent, and
    a role that stood still."""
    start_s = events[0].mono_s
    begin_s = min(e.mono_s for e in events if e.kind in (Kind.ISSUE, Kind.QUORUM, Kind.COMMIT))
    busy = trainers(events) | engines(events)
    ticks = int((until_s - start_s) / tick_s)
    commit_s = min(e.mono_s for e in events if e.kind is Kind.COMMIT)
    counted = total = 0
    for name, spans in busy.items():
        first_s = min(e.mono_s for e in events if name in (e.name, e.data.get("subject")))
        total += ticks if first_s <= commit_s else round((until_s - first_s) / tick_s)
        marks = [False] * ticks
        for since_s, end_s in spans:
            first = max(0, round((max(since_s, begin_s) - start_s) / tick_s))
            last = min(ticks, round((end_s - start_s) / tick_s))
            marks[first:last] = [True] * max(0, last - first)
        counted += sum(marks)
    return counted / total


def trainers(events: list[Event]) -> dict[str, list[tuple[float, float]]]:
    """From the first forward until the group waits again, of each step that it has voted for."""
    trained = defaultdict(set)
    for event in events:
        if event.kind is Kind.COMMIT:
            for name, *_ in event.data["shares"]:
                trained[name].add(event.step)
    found = defaultdict(list)
    began: dict[str, tuple[float, int, bool]] = {}
    last: dict[str, tuple[int, float]] = {}  # process, and when it was heard of
    for event in events:
        subject = event.data.get("subject")
        if event.kind is Kind.EXIT and subject in began:
            since_s, step, voted = began.pop(subject)
            if voted and step in trained[subject]:  # killed while it published, say
                found[subject].append((since_s, event.mono_s))
        if event.kind is not Kind.PHASE or event.role != "trainer":
            continue
        name = event.name
        found[name] += []
        pid, heard_s = last.get(name, (event.pid, event.mono_s))
        if pid != event.pid and name in began:  # it was killed, and nobody told
            since_s, step, voted = began.pop(name)
            if voted and step in trained[name]:
                found[name].append((since_s, heard_s))
        last[name] = (event.pid, event.mono_s)
        if event.phase == "forward_backward" and name not in began:
            began[name] = (event.mono_s, event.step, False)
        elif event.phase == "optimizer" and name in began:
            began[name] = (*began[name][:2], True)
        elif event.phase in IDLE and name in began:
            since_s, step, voted = began.pop(name)
            if voted and step in trained[name]:
                found[name].append((since_s, event.mono_s))
        elif event.phase == "publish" and name not in began:  # a duty of the step before
            began[name] = (event.mono_s, event.step - 1, True)
    for name, gaps in unnoticed(events).items():
        for other, spans in found.items():
            if other != name:
                found[other] = _without(spans, _common(held(events, other), gaps))
    return found


def unnoticed(events: list[Event]) -> dict[str, list[tuple[float, float]]]:
    """By group: from the last word of a process of whose end nobody told to the first of the
    next."""
    found = defaultdict(list)
    last: dict[str, tuple[int, float]] = {}
    for event in events:
        if event.kind is Kind.EXIT:
            last.pop(event.data["subject"], None)
        elif event.role == "trainer":
            pid, heard_s = last.get(event.name, (event.pid, event.mono_s))
            if pid != event.pid:
                found[event.name].append((heard_s, event.mono_s))
            last[event.name] = (event.pid, event.mono_s)
    return found


def held(events: list[Event], name: str) -> list[tuple[float, float]]:
    """When the group was where it waits for the others in the middle of a step."""
    phases = [e for e in events if e.kind is Kind.PHASE and e.name == name]
    pairs = itertools.pairwise(phases)
    return [(a.mono_s, b.mono_s) for a, b in pairs if a.phase in ("reduce", "commit")]


def engines(events: list[Event]) -> dict[str, list[tuple[float, float]]]:
    """While it served, and a group of a committed batch was with it."""
    steps = {e.step for e in events if e.kind is Kind.COMMIT}
    sealed = {
        g
        for e in events
        if e.kind is Kind.SEAL and e.step in steps
        for g in e.data.get("groups", [])
    }
    legs = defaultdict(list)
    for event in events:
        if event.kind is Kind.ACCEPT and event.data["group"] in sealed:
            told = event.data["trace"]
            asked_s = told["started_s"] + told["at_ms"][0] / 1e3
            for sample in told["legs"]:
                for engine, sent_ms, _, end_ms, tokens, _ in sample:
                    if tokens:
                        legs[engine].append((asked_s + sent_ms / 1e3, asked_s + end_ms / 1e3))
    found: dict[str, list[tuple[float, float]]] = {}
    since: dict[str, float] = {}
    for event in events:
        name = event.data.get("subject", "")
        if not name.startswith("engine-") or event.kind not in (Kind.TRANSITION, Kind.EXIT):
            continue
        found.setdefault(name, [])
        if name in since:
            found[name] += _common(legs[name], [(since.pop(name), event.mono_s)])
        if event.data.get("new") in ("serving", "draining", "suspect"):
            since[name] = event.mono_s
    for name, since_s in since.items():
        found[name] += _common(legs[name], [(since_s, float("inf"))])
    return found


def _common(spans, others):
    return [(max(a, c), min(b, d)) for a, b in spans for c, d in others if a < d and b > c]


def _without(spans, holes):
    for since_s, end_s in holes:
        spans = [
            (a, b) for c, d in spans for a, b in ((c, min(d, since_s)), (max(c, end_s), d)) if a < b
        ]
    return spans
