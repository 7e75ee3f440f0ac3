"""Second names of keys, as other frameworks call them."""

from __future__ import annotations

from collections.abc import Collection

ALIASES = {
    "recovery.autoresume": "recovery.adlr_autoresume",
    "recovery.autoresume_interval": "recovery.adlr_autoresume_interval",
}


def canonical(path: str) -> str:
    """The key that `section.key` names."""
    return ALIASES.get(path, path)


def spelled(section: str, key: str, table: Collection[str]) -> str:
    """How the key `section.key` is written in a file's table."""
    names = [a.partition(".")[2] for a, path in ALIASES.items() if path == f"{section}.{key}"]
    return next((name for name in names if name in table), key)


def given_twice(path: str, names: Collection[str]) -> str | None:
    """What is wrong when one place names a key in two ways; None when it does not."""
    different = sorted(set(names))
    if path not in ALIASES.values() or len(different) < 2:
        return None
    return f"{path} is given twice, as {' and '.join(different)}: keep one"
