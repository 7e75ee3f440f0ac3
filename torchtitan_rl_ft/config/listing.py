"""A job's values for people: each with its origin."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torchtitan_rl_ft.config.resolve import DEFAULT, Resolved


def show(resolved: Resolved, console: Console | None = None) -> None:
    """Print every value as `section.key`, value, origin: a table, or tab-separated lines when
    the output is no terminal."""
    console = console or Console()
    rows = [(path, shown(resolved.get(path)), origin) for path, origin in resolved.origins.items()]
    if not console.is_terminal:
        for row in rows:
            print("\t".join(row), file=console.file)
        return
    table = Table("key", "value", "origin", box=None, pad_edge=False)
    for path, value, origin in rows:
        style = "dim" if origin == DEFAULT else ""
        table.add_row(Text(path, style), Text(value, style), Text(origin, style))
    console.print(table)


def shown(value: Any) -> str:
    """A value as the command line takes it."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)
