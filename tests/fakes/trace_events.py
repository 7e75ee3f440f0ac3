"""A strict reading of Chrome's trace event format: what a viewer may rely on, checked."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

KNOWN = frozenset("BEXiCbensftM")
THREAD_PHASES = frozenset("BEXi")


class Invalid(AssertionError):
    pass


def load(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.name.endswith(".gz") else data)


def check(path: Path) -> Counter[str]:
    """Counts by phase. Raises Invalid."""
    trace = load(path)
    events = trace["traceEvents"]
    _need(isinstance(events, list), "traceEvents is no list", trace)
    for event in events:
        _fields(event)
    _names(events)
    slices = _threads(events)
    _spans(events)
    _arrows(events, slices)
    return Counter(e["ph"] for e in events)


def _need(holds: bool, what: str, event: Any) -> None:
    if not holds:
        raise Invalid(f"{what}: {json.dumps(event)[:500]}")


def _fields(e: dict[str, Any]) -> None:
    phase = str(e.get("ph"))
    _need(phase in KNOWN, "unknown phase", e)
    _need(type(e.get("pid")) is int and e["pid"] > 0, "pid", e)
    if phase != "C":
        _need(type(e.get("tid")) is int, "tid", e)
    if phase != "E":
        _need(isinstance(e.get("name"), str) and bool(e["name"]), "name", e)
    if phase != "M":
        ts = e.get("ts")
        _need(isinstance(ts, int | float) and math.isfinite(ts) and ts >= 0, "ts", e)
    if phase == "X":
        _need(isinstance(e.get("dur"), int | float) and e["dur"] >= 0, "dur", e)
    if phase == "i":
        _need(e.get("s") in ("g", "p", "t"), "scope", e)
    if phase in "bensft":
        _need(isinstance(e.get("id"), str) and isinstance(e.get("cat"), str), "id, cat", e)
    if phase == "C":
        values = e.get("args") or {}
        _need(bool(values), "a counter without values", e)
        _need(all(isinstance(v, int | float) for v in values.values()), "a value is no number", e)
    _need(isinstance(e.get("args", {}), dict), "args", e)


def _names(events: list[dict[str, Any]]) -> None:
    processes: set[int] = set()
    threads: set[tuple[int, int]] = set()
    for e in events:
        if e["ph"] != "M":
            continue
        key = "sort_index" if e["name"].endswith("_sort_index") else "name"
        _need(list(e["args"]) == [key], "metadata", e)
        if e["name"] == "process_name":
            _need(e["pid"] not in processes, "a process is named twice", e)
            processes.add(e["pid"])
        if e["name"] == "thread_name":
            _need((e["pid"], e["tid"]) not in threads, "a thread is named twice", e)
            threads.add((e["pid"], e["tid"]))
    for e in events:
        _need(e["pid"] in processes, "of a process without a name", e)
        if e["ph"] in THREAD_PHASES | frozenset("sft"):
            _need((e["pid"], e["tid"]) in threads, "of a thread without a name", e)


Slices = dict[tuple[int, int], list[tuple[float, float]]]


def _threads(events: list[dict[str, Any]]) -> Slices:
    """Slices by thread; they nest, and time does not go back within a thread."""
    last: dict[tuple[int, int], float] = defaultdict(float)
    stack: dict[tuple[int, int], list[float]] = defaultdict(list)
    slices: Slices = defaultdict(list)
    for e in events:
        if e["ph"] not in THREAD_PHASES:
            continue
        where = (e["pid"], e["tid"])
        _need(e["ts"] >= last[where], "time goes back", e)
        last[where] = e["ts"]
        if e["ph"] == "B":
            stack[where].append(e["ts"])
        elif e["ph"] == "E":
            _need(bool(stack[where]), "an E without a B", e)
            slices[where].append((stack[where].pop(), e["ts"]))
        elif e["ph"] == "X":
            slices[where].append((e["ts"], e["ts"] + e["dur"]))
            last[where] = e["ts"] + e["dur"]
    for where, open_ in stack.items():
        _need(not open_, "a B without an E", where)
    return slices


def _spans(events: list[dict[str, Any]]) -> None:
    stack: dict[tuple[int, str, str], list[str]] = defaultdict(list)
    last: dict[tuple[int, str, str], float] = defaultdict(float)
    for e in events:
        if e["ph"] not in "ben":
            continue
        key = (e["pid"], e["cat"], e["id"])
        _need(e["ts"] >= last[key], "time goes back", e)
        last[key] = e["ts"]
        if e["ph"] == "b":
            stack[key].append(e["name"])
        elif e["ph"] == "e":
            _need(bool(stack[key]) and stack[key].pop() == e["name"], "an e of another b", e)
    for key, open_ in stack.items():
        _need(not open_, "a b without an e", [*key, *open_])


def _arrows(events: list[dict[str, Any]], slices: Slices) -> None:
    """Each begins once, ends once, goes forward, and binds to a slice everywhere."""
    parts: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["ph"] in "sft":
            parts[e["id"]].append(e)
    for arrow in parts.values():
        _need([e["ph"] for e in arrow] == ["s", *"t" * (len(arrow) - 2), "f"], "an arrow", arrow)
        _need(
            all(a["ts"] <= b["ts"] for a, b in zip(arrow, arrow[1:], strict=False)), "back", arrow
        )
        for e in arrow:
            inside = (a <= e["ts"] < b for a, b in slices[e["pid"], e["tid"]])
            _need(any(inside), "an arrow's end in no slice", e)
        _need(arrow[-1].get("bp") == "e", "the end binds to the next slice", arrow)
