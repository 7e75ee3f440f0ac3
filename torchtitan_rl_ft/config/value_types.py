"""Types of config values: from annotations, to JSON and back, and the reading of values."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from torchtitan_rl_ft.config.errors import near_miss

_SCALARS = {bool: "bool", int: "int", float: "float", str: "str"}
_NONE_WORDS = ("none", "None", "null")


class WrongValue(ValueError):
    """A value does not fit its type; the message says what was expected and what came. `place`:
    where inside of the value, as `[1].engines`."""

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"{place}: {message}" if place else message)
        self.message, self.place = message, place

    def at(self, path: str) -> str:
        """The whole problem of the key `path`."""
        return f"{path}{self.place}: {self.message}"


@dataclass(frozen=True)
class ValueType:
    """One of bool, int, float, str (perhaps with choices), list of items, table, or any."""

    base: str
    item: ValueType | None = None
    choices: tuple[str, ...] = ()
    optional: bool = False
    keys: tuple[tuple[str, ValueType, bool], ...] = ()
    """Keys of a table: name, type, whether it must be there. Empty: a free table."""

    # From and to ------------------------------------------------------------------------

    @classmethod
    def of(cls, annotation: Any) -> ValueType:
        """The type that a dataclass annotation means. Raises TypeError for others."""
        if annotation in _SCALARS:
            return cls(_SCALARS[annotation])
        if annotation is Any:
            return cls("any")
        if dataclasses.is_dataclass(annotation):
            return cls("table", keys=_keys(typing.cast(type, annotation)))
        origin, args = get_origin(annotation), get_args(annotation)
        if origin in (Union, types.UnionType):
            return _of_union(args)
        if origin is Literal and all(isinstance(a, str) for a in args):
            return cls("str", choices=args)
        if origin is list or annotation is list:
            return cls("list", item=cls.of(args[0]) if args else cls("any"))
        if origin is dict or annotation is dict:
            return cls("table")
        raise TypeError(f"{annotation!r} cannot be a config value")

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {"base": self.base}
        if self.item is not None:
            data["item"] = self.item.to_json()
        if self.choices:
            data["choices"] = list(self.choices)
        if self.optional:
            data["optional"] = True
        if self.keys:
            data["keys"] = [[name, kind.to_json(), must] for name, kind, must in self.keys]
        return data

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ValueType:
        return cls(
            data["base"],
            cls.from_json(data["item"]) if "item" in data else None,
            tuple(data.get("choices", ())),
            data.get("optional", False),
            tuple((name, cls.from_json(kind), must) for name, kind, must in data.get("keys", ())),
        )

    def __str__(self) -> str:
        if self.choices:
            text = "one of " + ", ".join(repr(c) for c in self.choices)
        elif self.base == "list":
            text = "list" if self.item is None or self.item.base == "any" else f"list[{self.item}]"
        else:
            text = self.base
        return f"{text} or none" if self.optional else text

    # Values -----------------------------------------------------------------------------

    def accept(self, value: Any) -> Any:
        """`value`, as TOML or JSON gives it, in its final form. Raises WrongValue.

        A whole number is accepted for a float; "none" for an optional value.
        """
        if self.optional and (value is None or (isinstance(value, str) and value in _NONE_WORDS)):
            return None
        match self.base:
            case "any":
                return value
            case "float" if isinstance(value, int | float) and not isinstance(value, bool):
                if not math.isfinite(value):
                    raise WrongValue(f"expected a finite number, got {value}")
                return float(value)
            case "bool" if isinstance(value, bool):
                return value
            case "int" if isinstance(value, int) and not isinstance(value, bool):
                return value
            case "str" if isinstance(value, str):
                return self._choice(value)
            case "list" if isinstance(value, list):
                assert self.item is not None
                return [self._item(i, v) for i, v in enumerate(value)]
            case "table" if isinstance(value, dict):
                return self._table(value)
        raise WrongValue(f"expected {self}, got {_kind(value)} {_shown(value)}")

    def parse(self, text: str) -> Any:
        """A value from the command line. Lists are `a,b,c` or JSON, tables JSON.

        Raises WrongValue.
        """
        if self.optional and text in _NONE_WORDS:
            return None
        match self.base:
            case "str":
                return self.accept(text)
            case "bool":
                if text.lower() in ("true", "false"):
                    return text.lower() == "true"
            case "int":
                try:
                    return int(text)
                except ValueError:
                    pass
            case "float":
                try:
                    return self.accept(float(text))
                except ValueError as e:
                    if isinstance(e, WrongValue):
                        raise
            case "list" if not text.lstrip().startswith("["):
                assert self.item is not None
                return [self.item.parse(part.strip()) for part in text.split(",") if part.strip()]
            case _:
                try:
                    return self.accept(json.loads(text))
                except json.JSONDecodeError as e:
                    raise WrongValue(f"expected {self} as JSON, got {text!r} ({e})") from None
        raise WrongValue(f"expected {self}, got {text!r}")

    def _item(self, i: int, value: Any) -> Any:
        assert self.item is not None
        try:
            return self.item.accept(value)
        except WrongValue as e:
            raise WrongValue(e.message, f"[{i}]{e.place}" if self.item.keys else "") from None

    def _choice(self, value: str) -> str:
        if self.choices and value not in self.choices:
            raise WrongValue(f"expected {self}, got {value!r}{near_miss(value, self.choices)}")
        return value

    def _table(self, value: dict[str, Any]) -> dict[str, Any]:
        if not self.keys:
            return value
        known = {name: kind for name, kind, _ in self.keys}
        for key in value:
            if key not in known:
                raise WrongValue(f"unknown key {key!r}{near_miss(key, known)}")
        for name, _, must in self.keys:
            if must and name not in value:
                raise WrongValue(f"key {name!r} is missing")
        return {key: _under(key, known[key], v) for key, v in value.items()}


def _under(key: str, kind: ValueType, value: Any) -> Any:
    """Raises WrongValue with the place of the key."""
    try:
        return kind.accept(value)
    except WrongValue as e:
        raise WrongValue(e.message, f".{key}{e.place}") from None


def _of_union(args: tuple[Any, ...]) -> ValueType:
    parts = [a for a in args if a is not type(None)]
    # `float | int` is how TorchTitan writes a number.
    if set(parts) == {int, float}:
        parts = [float]
    if len(parts) != 1:
        raise TypeError(f"a union of {parts} cannot be a config value")
    return dataclasses.replace(ValueType.of(parts[0]), optional=type(None) in args)


def _keys(cls: type) -> tuple[tuple[str, ValueType, bool], ...]:
    hints = typing.get_type_hints(cls)
    missing = dataclasses.MISSING
    return tuple(
        (f.name, ValueType.of(hints[f.name]), f.default is missing and f.default_factory is missing)
        for f in dataclasses.fields(cls)
    )


def _kind(value: Any) -> str:
    names = {bool: "bool", int: "int", float: "float", str: "str", list: "list", dict: "table"}
    return names.get(type(value), type(value).__name__)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
