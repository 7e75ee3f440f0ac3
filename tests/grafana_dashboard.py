"""The Grafana dashboard of the repository, and what it asks Prometheus."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "grafana" / "torchtitan_rl_ft.json"
DASHBOARD: dict[str, Any] = json.loads(FILE.read_text())


def queries() -> list[str]:
    """Every query, variables and annotations included."""
    return list(_queries(DASHBOARD))


def _queries(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "definition") and isinstance(value, str):
                yield value
            else:
                yield from _queries(value)
    elif isinstance(node, list):
        for value in node:
            yield from _queries(value)


def metric_names(query: str) -> set[str]:
    return set(re.findall(r"\brl_ft_\w+", query))


def as_asked(query: str) -> str:
    """With the variables filled in, as Grafana does."""
    return query.replace("$instance", ".*").replace("$__rate_interval", "1m")
