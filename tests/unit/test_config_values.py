"""Types of config values and how values are read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.config.schema import load_schema
from torchtitan_rl_ft.config.value_types import ValueType, WrongValue


@dataclass
class Group:
    pattern: str
    kwargs: dict[str, Any] = field(default_factory=dict)


ANNOTATIONS = [
    (bool, "bool"),
    (int, "int"),
    (float, "float"),
    (float | int, "float"),
    (str, "str"),
    (str | None, "str or none"),
    (Literal["a", "b"], "one of 'a', 'b'"),
    (list[str], "list[str]"),
    (list[list[str]] | None, "list[list[str]] or none"),
    (dict[str, Any], "table"),
    (list[Group], "list[table]"),
]


@pytest.mark.parametrize(("annotation", "text"), ANNOTATIONS)
def test_annotations_are_understood_and_survive_json(annotation: Any, text: str) -> None:
    kind = ValueType.of(annotation)
    assert str(kind) == text
    assert ValueType.from_json(kind.to_json()) == kind


@pytest.mark.parametrize("annotation", [int | str, set[int], object])
def test_annotations_that_no_file_can_hold_are_refused(annotation: Any) -> None:
    with pytest.raises(TypeError, match="cannot be a config value"):
        ValueType.of(annotation)


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (int, "5", "expected int, got str '5'"),
        (int, 5.0, "expected int, got float 5.0"),
        (int, True, "expected int, got bool True"),
        (float, True, "expected float, got bool True"),
        (float, float("nan"), "expected a finite number, got nan"),
        (float, float("inf"), "expected a finite number, got inf"),
        (bool, 1, "expected bool, got int 1"),
        (str, 1, "expected str, got int 1"),
        (str, None, "expected str, got NoneType None"),
        (Literal["sync", "async"], "synk", "did you mean 'sync'"),
        (list[int], [1, "2"], "expected int, got str '2'"),
        (list[str], "a", r"expected list\[str\], got str 'a'"),
        (list[Group], [{"kwargs": {}}], "key 'pattern' is missing"),
        (list[Group], [{"pattern": "x", "kwarg": {}}], "did you mean 'kwargs'"),
        (list[Group], [{"pattern": 1}], "expected str, got int 1"),
    ],
)
def test_wrong_values_say_what_was_expected(annotation: Any, value: Any, message: str) -> None:
    with pytest.raises(WrongValue, match=message):
        ValueType.of(annotation).accept(value)


@pytest.mark.parametrize(
    ("annotation", "value", "result"),
    [
        (float, 1, 1.0),
        (str | None, "none", None),
        (float | None, "none", None),
        (str, "none", "none"),
        (list[str], [], []),
        (dict[str, Any], {"a": [1]}, {"a": [1]}),
    ],
)
def test_values_take_their_final_form(annotation: Any, value: Any, result: Any) -> None:
    found = ValueType.of(annotation).accept(value)
    assert found == result and type(found) is type(result)


@pytest.mark.parametrize(
    ("annotation", "text", "result"),
    [
        (int, "-1", -1),
        (int, "1_000", 1000),
        (float, "3e-3", 0.003),
        (bool, "True", True),
        (bool, "false", False),
        (str, "a,b", "a,b"),
        (str | None, "None", None),
        (list[str], "a,b, c", ["a", "b", "c"]),
        (list[str], '["--a", "b,c"]', ["--a", "b,c"]),
        (list[int], "1,2", [1, 2]),
        (list[str], "", []),
        (list[list[str]], '[["a"], ["b"]]', [["a"], ["b"]]),
        (dict[str, Any], '{"a": 1}', {"a": 1}),
    ],
)
def test_text_of_the_command_line(annotation: Any, text: str, result: Any) -> None:
    assert ValueType.of(annotation).parse(text) == result


@pytest.mark.parametrize(
    ("annotation", "text"),
    [(int, "1e3"), (int, "x"), (float, "nan"), (float, "x"), (bool, "1"), (dict[str, Any], "{")],
)
def test_wrong_text_of_the_command_line(annotation: Any, text: str) -> None:
    with pytest.raises(WrongValue, match="expected"):
        ValueType.of(annotation).parse(text)


@given(st.data())
def test_every_default_of_the_schema_is_legal(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(list(load_schema().all_keys())))
    assert key.type.accept(key.default) == key.default, key.path
