"""Lists the rows of the acceptance checklist that no test shows (`@pytest.mark.row("B1")`)."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROWS = {
    "A": 7, "B": 9, "C": 12, "D": 10, "E": 11, "F": 10, "G": 11,
    "H": 8, "I": 7, "J": 4, "K": 4, "L": 2, "M": 5,
}  # fmt: skip
"""Rows of each section."""


def all_rows() -> list[str]:
    return [f"{section}{n}" for section, count in ROWS.items() for n in range(1, count + 1)]


def marked_rows(source: str) -> Iterator[str]:
    """The ids that `pytest.mark.row(...)` names anywhere in `source`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row":
            for argument in node.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield argument.value


def main(tests: Path) -> int:
    """Print the rows without a test; 1 when a test names a row that does not exist."""
    shown: dict[str, list[str]] = {}
    for file in sorted(tests.rglob("test_*.py")):
        for row in marked_rows(file.read_text()):
            shown.setdefault(row, []).append(str(file))
    known = all_rows()
    missing = [row for row in known if row not in shown]
    for section in ROWS:
        rows = [row for row in missing if row[0] == section]
        if rows:
            print(f"{section}  without a test: {' '.join(rows)}")
    print(f"{len(known) - len(missing)} of {len(known)} rows have a test")
    unknown = {row: files for row, files in shown.items() if row not in known}
    for row, files in unknown.items():
        print(f"error: no such row: {row} in {', '.join(files)}", file=sys.stderr)
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1] / "tests"))
