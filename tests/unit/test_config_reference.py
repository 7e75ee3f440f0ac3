"""docs/configuration.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from test_config_start_state import TABLE

from torchtitan_rl_ft.config.reference import with_tables
from torchtitan_rl_ft.config.toml_file import shipped

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_tables_of_keys_are_current() -> None:
    page = PAGE.read_text()
    assert page == with_tables(page), (
        "write them anew: python -m torchtitan_rl_ft.config.reference docs/configuration.md"
    )


def test_the_table_of_starts_is_the_tested_one() -> None:
    rows = re.findall(
        r"^\| (no|yes) \| (no|yes) \| ([a-z ]+) \| (\w+) \| (\w+)", PAGE.read_text(), re.M
    )
    written = {}
    for checkpoint, journal, session, without, with_auto in rows:
        for alive in session.split(" or "):
            key = (checkpoint == "yes", journal == "yes", alive == "yes")
            written[key] = tuple(
                w.removesuffix("d") if w == "refused" else w for w in (without, with_auto)
            )
    assert written == {state: tuple(s.value for s in starts) for state, starts in TABLE.items()}


def test_every_shipped_file_is_named() -> None:
    assert all(f"`{name}`" in PAGE.read_text() for name in shipped())
