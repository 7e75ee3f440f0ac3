"""A TOML file with the line of each key: tomli gives values, a small scan gives lines."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import tomli

from torchtitan_rl_ft.config.errors import ConfigError, near_miss

KeyPath = tuple[str, ...]


@dataclass(frozen=True)
class TomlFile:
    name: str
    """The file as the user named it; stands in front of `:line` in messages."""

    data: dict[str, Any]
    lines: dict[KeyPath, int]

    def place(self, *path: str) -> str:
        """`file:line` of a key, or of the nearest parent that has a line."""
        for end in range(len(path), 0, -1):
            if (line := self.lines.get(path[:end])) is not None:
                return f"{self.name}:{line}"
        return self.name


def shipped() -> list[str]:
    """Names of the config files that come with the package."""
    folder = files("torchtitan_rl_ft").joinpath("configs")
    return sorted(f.name for f in folder.iterdir() if f.name.endswith(".toml"))


def read_toml(name: str) -> TomlFile:
    """Read a file: the path as given, else, for a bare name, the file of that name shipped with
    the package. Raises ConfigError when it is missing, unreadable or no TOML."""
    path = Path(name)
    try:
        if path.parent == Path() and not path.exists() and name in shipped():
            content = files("torchtitan_rl_ft").joinpath("configs", name).read_bytes()
        else:
            content = path.read_bytes()
    except FileNotFoundError:
        known = shipped()
        raise ConfigError(
            f"config file {name} does not exist{near_miss(path.name, known)} "
            f"(shipped with the package: {', '.join(known)})"
        ) from None
    except OSError as e:
        raise ConfigError(f"config file {name} cannot be read: {e.strerror}") from None
    return parse_toml(name, content)


def parse_toml(name: str, content: bytes) -> TomlFile:
    """Raises ConfigError with the line of a syntax error."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = content.count(b"\n", 0, e.start) + 1
        raise ConfigError(f"{name}:{line}: not UTF-8 text") from None
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as e:
        message = f"{e.msg[:1].lower()}{e.msg[1:]}"
        raise ConfigError(f"{name}:{e.lineno}: {message} (column {e.colno})") from None
    return TomlFile(name, data, key_lines(text))


# Lines of keys ------------------------------------------------------------------------------

_TOKEN = re.compile(
    r'(?P<string>"""(?:\\.|[^\\])*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\')'
    r"|(?P<comment>\#[^\n]*)|(?P<newline>\n)|(?P<open>[\[{])|(?P<close>[\]}])"
    r"|(?P<equals>=)|(?P<other>[^\"'\#\n\[\]{}=]+)",
    re.DOTALL,
)
_KEY_PART = re.compile(r'"((?:\\.|[^"\\])*)"|\'([^\']*)\'|([A-Za-z0-9_-]+)')


def key_lines(text: str) -> dict[KeyPath, int]:
    """Line (from 1) of each table header and key of a valid TOML text.

    The items of an array of tables are numbered: ("optimizer", "param_groups", "0", "pattern").
    """
    lines: dict[KeyPath, int] = {}
    table: KeyPath = ()
    items: dict[KeyPath, int] = {}
    for line, head, is_key in _statements(text):
        if is_key:
            lines.setdefault(table + _numbered(_parts(head), table, items), line)
            continue
        path = _parts(head)
        if head.startswith("[["):
            items[path] = items.get(path, -1) + 1
        table = _numbered(path, (), items)
        lines.setdefault(path, line)
        lines.setdefault(table, line)
    return lines


def _numbered(path: KeyPath, table: KeyPath, items: dict[KeyPath, int]) -> KeyPath:
    """`path` below `table` with the current item number after each array of tables."""
    if table:
        return path
    found: KeyPath = ()
    for end, part in enumerate(path, start=1):
        found += (part,)
        if path[:end] in items:
            found += (str(items[path[:end]]),)
    return found


def _statements(text: str) -> Iterator[tuple[int, str, bool]]:
    """(line, text up to `=` or the whole header, whether it is a key) of each statement."""
    line, depth, head, started, in_value = 1, 0, "", 1, False
    for token in _TOKEN.finditer(text):
        kind, part = token.lastgroup, token.group()
        if kind == "newline" and depth == 0:
            if head.strip() and not in_value:
                yield started, head.strip(), False
            head, in_value = "", False
        elif kind == "equals" and depth == 0 and not in_value:
            yield started, head.strip(), True
            in_value = True
        elif kind != "comment":
            if kind in ("open", "close"):
                depth += 1 if kind == "open" else -1
            if not in_value:
                if not head.strip():
                    started = line
                head += part
        line += part.count("\n")
    if head.strip() and not in_value:
        yield started, head.strip(), False


def _parts(head: str) -> KeyPath:
    """`[a."b.c"]` or `a.b` as its parts."""
    return tuple(a or b or c for a, b, c in _KEY_PART.findall(head))
