"""Help of a key: the string under its field, read from the source of its class.

Read and not imported, so that `torchtitan help` needs no torch, and TorchTitan's keys are
explained by the TorchTitan that is installed.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from torchtitan_rl_ft.config.schema import Section

# TorchTitan 0.2 spelled the optimizer with these keys; 0.3 has parameter groups instead.
_OWN_WORDS = {
    "optimizer.name": "Optimizer: AdamW, Adam, DistMuon or SGD.",
    "optimizer.lr": "Learning rate.",
    "optimizer.beta1": "First momentum coefficient of Adam and AdamW.",
    "optimizer.beta2": "Second momentum coefficient of Adam and AdamW.",
    "optimizer.eps": "Term added to the denominator of Adam and AdamW.",
    "optimizer.weight_decay": "Weight decay.",
    "activation_checkpoint.mode": "What is recomputed in the backward pass.",
}


def help_texts(section: Section) -> dict[str, str]:
    """Key -> its help on one line; keys without one are left out."""
    docs: dict[str, str] = {}
    for path, name in _sources(section):
        docs |= _field_docs(path, name)
    for key in section.keys:
        if text := _OWN_WORDS.get(f"{section.name}.{key}"):
            docs[key] = text
    return {key: docs[key] for key in section.keys if docs.get(key)}


def _sources(section: Section) -> Iterator[tuple[Path, str]]:
    """(file, qualified class name) of the section's classes, bases first."""
    if section.dataclass is not None:
        for base in reversed(section.dataclass.__mro__):
            if dataclasses.is_dataclass(base) and (file := inspect.getsourcefile(base)):
                yield Path(file), base.__qualname__
    for module, name in section.sources:
        package, _, rest = module.partition(".")
        spec = importlib.util.find_spec(package)  # of a top-level package: imports nothing
        if spec is None or not spec.submodule_search_locations:
            return
        for folder in spec.submodule_search_locations:
            file = Path(folder, *rest.split(".")).with_suffix(".py")
            if file.is_file():
                yield file, name


@cache
def _field_docs(path: Path, qualified_name: str) -> dict[str, str]:
    """The string under each field of one class."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for part in qualified_name.split("."):
        body = next(n for n in body if isinstance(n, ast.ClassDef) and n.name == part).body
    docs: dict[str, str] = {}
    for field, text in zip(body, body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            docs[field.target.id] = " ".join(str(text.value.value).split())
    return docs
