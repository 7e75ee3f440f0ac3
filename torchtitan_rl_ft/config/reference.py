"""The tables of keys in docs/configuration.md, made from the sections themselves.

`python -m torchtitan_rl_ft.config.reference docs/configuration.md` writes them anew between the
markers; a test compares them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from torchtitan_rl_ft.config.help_texts import help_texts
from torchtitan_rl_ft.config.listing import shown
from torchtitan_rl_ft.config.schema import Section, load_schema

BEGIN = "<!-- keys: begin -->"
END = "<!-- keys: end -->"


def tables() -> str:
    """One Markdown table for each section of this package."""
    own = [s for s in load_schema().sections.values() if s.dataclass is not None]
    return "\n\n".join(_table(section) for section in own)


def _table(section: Section) -> str:
    texts = help_texts(section)
    rows = [f"### [{section.name}]", "", "| key | type | default | |", "|---|---|---|---|"]
    for key in section.keys.values():
        default = shown(key.default)
        cells = (f"`{key.name}`", str(key.type), f"`{default}`" if default else "", texts[key.name])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


def with_tables(page: str) -> str:
    """`page` with the tables between its markers."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{after}"


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.write_text(with_tables(target.read_text()))
    print(f"wrote {target}")
