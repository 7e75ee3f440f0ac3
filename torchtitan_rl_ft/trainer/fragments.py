"""Fragments of a model: the units of the outer all-reduce and of the outer step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def named_trainable(
    model_parts: Iterable[torch.nn.Module],
) -> dict[str, torch.nn.Parameter]:
    """Each trained parameter once, under its first name: a tied weight is one parameter, so it is
    in one fragment and gets one outer step."""
    found: dict[str, torch.nn.Parameter] = {}
    seen: set[int] = set()
    for part in model_parts:
        for name, p in part.named_parameters():
            if p.requires_grad and id(p) not in seen:
                seen.add(id(p))
                found[_plain(name)] = p
    return found


def fragments(
    sizes: dict[str, int], count: int, modules: Sequence[Sequence[str]] = ()
) -> list[list[str]]:
    """Names of the parameters of each fragment; `sizes`: elements of each parameter, in order.

    With `modules`, a parameter goes to the first fragment that names a module it is in. Without,
    `count` runs of consecutive parameters of about equal size. Raises ValueError when a parameter
    is in no fragment, a fragment is empty, or there are more fragments than parameters.
    """
    return _by_module(list(sizes), modules) if modules else _by_size(sizes, count)


def _by_module(names: list[str], modules: Sequence[Sequence[str]]) -> list[list[str]]:
    key = "fault_tolerance.module_fqns_per_model_fragment"
    found: list[list[str]] = [[] for _ in modules]
    for name in names:
        holders = [
            i
            for i, fqns in enumerate(modules)
            if any(name == fqn or name.startswith(f"{fqn}.") for fqn in fqns)
        ]
        if not holders:
            raise ValueError(f"{key} names no module that holds {name}: its training would be lost")
        found[holders[0]].append(name)
    if [] in found:
        empty = modules[found.index([])]
        raise ValueError(
            f"{key}: the fragment {list(empty)} holds no parameter of its own (a tied weight "
            f"belongs to its first name); the model has {names}"
        )
    return found


def _by_size(sizes: dict[str, int], count: int) -> list[list[str]]:
    if count > len(sizes):
        raise ValueError(
            f"fault_tolerance.num_fragments = {count}, but the model has {len(sizes)} parameters"
        )
    found: list[list[str]] = [[]]
    left, size = sum(sizes.values()), 0
    for i, (name, elements) in enumerate(sizes.items()):
        fragments_left = count - len(found) + 1  # the open one included
        full = size + elements / 2 > left / fragments_left
        must_close = len(sizes) - i == fragments_left - 1
        if found[-1] and fragments_left > 1 and (full or must_close):
            found.append([])
            left, size = left - size, 0
        found[-1].append(name)
        size += elements
    return found


def _plain(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
