"""The small files of a policy's folder that go with its weights."""

from __future__ import annotations

import shutil
from pathlib import Path

ASSET_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)


def copy_assets(assets: Path, folder: Path) -> None:
    """Those that are there. Raises OSError."""
    for name in ASSET_FILES:
        if (assets / name).exists():
            shutil.copyfile(assets / name, folder / name)
