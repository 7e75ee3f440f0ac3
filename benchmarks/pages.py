"""BENCHMARKS.md, made from benchmarks/results/.

    python -m benchmarks.pages [--check]

One section per file of results. A JSON file may have `aims` ({name: {value, aim, met, note}}),
`tables` ([{title, head, rows}]), `figures` or figures at its top, and lists of records; the live
benchmark's arms are its table; a picture of the same name is shown, a text file as it is. --check
writes nothing, and fails when the page is not up to date.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.live import tables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "BENCHMARKS.md"

HEAD = """# Benchmarks

Made from `benchmarks/results/` by `python -m benchmarks.pages`; not to be edited. Each section
names the command that measures it anew; `--verify` makes that fail when an aim is missed. Figures
are of the real thing (TorchTitan, torchft, SGLang) on two CPU cores, but for the simulator's, with
a model so small that a step is short; what does not depend on the machine is the ratio of two
figures of one run.
"""

MAX_FIGURES = 40
ROUNDING = 1e-9
"""What is nearer to 0 is 0."""

NOT_FIGURES = ("aims", "trials", "cases", "tables", "machine")


def page(results: Path = RESULTS) -> str:
    """The whole page. Raises ValueError: a file of results cannot be read."""
    sections = [section(path) for path in _files(results)]
    met = [row for path in _files(results) for row in _aim_rows(path)]
    overview = _table(("benchmark", "aim", "measured", "wanted", ""), met)
    return "\n".join([HEAD, "## Aims", "", *overview, "", *sections])


def _files(results: Path) -> list[Path]:
    return sorted(p for p in results.iterdir() if p.suffix in (".json", ".txt"))


def section(path: Path) -> str:
    """Of one file of results."""
    lines = [f"## {path.stem}", "", *_told(path.stem)]
    if path.suffix == ".txt":
        kept = [x for x in path.read_text().splitlines() if not x.startswith("{")]
        return "\n".join([*lines, "```", *kept, "```", ""])
    found = _read(path)
    if used := _transports(found):
        lines += [f"Policies travelled by {used}.", ""]
    if arms := found.get("arms"):
        rows = [tables.cells(row) for row in tables.rows(arms)]
        lines += [*_table(tables.HEAD, rows), ""]
    for table in found.get("tables", []):
        lines += [table["title"], "", *_table(table["head"], table["rows"]), ""]
    for name, value in found.items():
        if name not in (*NOT_FIGURES, "arms") and (records := _records(value)):
            lines += [f"{name}:", "", *_table(*records), ""]
    plain = found.get("figures", {} if "arms" in found or "tables" in found else found)
    if figures := list(flat(plain))[:MAX_FIGURES]:
        lines += [*_table(("figure", "value"), figures), ""]
    if path.with_suffix(".png").exists():
        lines += [f"![{path.stem}](benchmarks/results/{path.stem}.png)", ""]
    return "\n".join(lines)


def _transports(found: dict[str, Any]) -> str:
    """Of the jobs that were run, where that was noted."""
    told = [*found.get("arms", []), found.get("figures", {})]
    return ", ".join(sorted({t["transport"] for t in told if t.get("transport")}))


def _read(path: Path) -> dict[str, Any]:
    """Of a text file: the line of JSON with which it may end."""
    text = path.read_text()
    if path.suffix == ".txt":
        text = next((x for x in text.splitlines() if x.startswith("{")), "{}")
    try:
        found = json.loads(text)
    except ValueError as e:
        raise ValueError(f"{path} is no JSON: {e}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: an object is expected")
    return found


def _aim_rows(path: Path) -> list[tuple[str, ...]]:
    return [
        (path.stem, name, number(a["value"]), _wanted(a), _verdict(a))
        for name, a in _read(path).get("aims", {}).items()
    ]


def _wanted(aim: dict[str, Any]) -> str:
    """As the benchmark says it; else an Aim, which has one side: the one where it is met."""
    if wanted := aim.get("wanted"):
        return str(wanted)
    value, goal = aim["value"], aim["aim"]
    if "note" in aim or value == goal:
        return number(goal)
    return f"{'<=' if (value < goal) == aim['met'] else '>='} {number(goal)}"


def _verdict(aim: dict[str, Any]) -> str:
    told = "met" if aim["met"] else "**missed**"
    return f"{told}: {note}" if (note := aim.get("note")) else told


def _told(name: str) -> list[str]:
    """What the benchmark says of itself: its first line, and how it is started."""
    for path in (ROOT / f"benchmarks/{name}.py", ROOT / f"benchmarks/{name}/__main__.py"):
        if path.exists():
            text = ast.get_docstring(ast.parse(path.read_text())) or ""
            break
    else:
        return []
    first = text.splitlines()[0] if text else ""
    command = re.search(r"^ {4}(python .*(?:\n {8,}.*)*)", text, re.MULTILINE)
    lines = [first, ""] if first else []
    if command:
        lines += ["    " + " ".join(command[1].split()), ""]
    return lines


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Numbers and lists of numbers by the path to them; longer structures are left out."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in NOT_FIGURES:
                yield from flat(inner, f"{name} / {key}" if name else str(key))
    elif isinstance(value, bool) or value is None or isinstance(value, str):
        return
    elif isinstance(value, int | float):
        yield name, number(value)
    elif value and all(isinstance(v, int | float) for v in value):
        middle = number(statistics.median(value))
        yield name, f"{middle} ({number(min(value))}..{number(max(value))}, {len(value)} times)"


def _records(value: Any) -> tuple[list[str], list[list[str]]] | None:
    """Head and rows of a list of equal records, else None."""
    if not (isinstance(value, list) and value and all(isinstance(v, dict) for v in value)):
        return None
    head = list(value[0])
    return head, [[_cell(v.get(name)) for name in head] for v in value]


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_cell(v)}" for name, v in value.items())
    plain = isinstance(value, bool) or not isinstance(value, int | float)
    return str(value) if plain else number(value)


def number(value: float) -> str:
    if float(value).is_integer() or abs(value) < ROUNDING:
        return f"{round(value)}"
    return f"{value:.4g}"


def _table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(str(c).replace("|", "\\|") for c in line) + " |" for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    made = page()
    if not args.check:
        PAGE.write_text(made)
    elif not PAGE.exists() or PAGE.read_text() != made:
        print(f"{PAGE.name} is not up to date: python -m benchmarks.pages", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
