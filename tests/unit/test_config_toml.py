"""Lines of keys in TOML files, and errors of files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tomli
from hypothesis import given
from hypothesis import strategies as st

from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.file_values import file_values
from torchtitan_rl_ft.config.schema import load_schema
from torchtitan_rl_ft.config.toml_file import (
    TomlFile,
    key_lines,
    parse_toml,
    read_toml,
    shipped,
)

DOCUMENT = '''\
# a comment with [brackets] and "quotes"
[job] # x = 1
dump_folder = "a[b # no comment"
description = """many
lines = 3
[no]"""
[ optimizer ]
lr = 3e-3
args = [
  "a = 1", # [x]
  "b",
]
inline = {a = [1, 2], b = """x
y"""}
[[optimizer.param_groups]]
pattern = '.*"'
[[optimizer.param_groups]]
pattern = "\\"["
optimizer_kwargs = {lr = 1, betas = [0.9,
 0.95]}
[rl]
"mode" = "sync"
a.b = 1'''


def test_every_key_has_its_line() -> None:
    tomli.loads(DOCUMENT)
    assert key_lines(DOCUMENT) == {
        ("job",): 2,
        ("job", "dump_folder"): 3,
        ("job", "description"): 4,
        ("optimizer",): 7,
        ("optimizer", "lr"): 8,
        ("optimizer", "args"): 9,
        ("optimizer", "inline"): 13,
        ("optimizer", "param_groups"): 15,
        ("optimizer", "param_groups", "0"): 15,
        ("optimizer", "param_groups", "0", "pattern"): 16,
        ("optimizer", "param_groups", "1"): 17,
        ("optimizer", "param_groups", "1", "pattern"): 18,
        ("optimizer", "param_groups", "1", "optimizer_kwargs"): 19,
        ("rl",): 21,
        ("rl", "mode"): 22,
        ("rl", "a", "b"): 23,
    }


_NAME = st.text("abcdefgh_", min_size=1, max_size=4)
_VALUE = st.one_of(
    st.integers(-5, 5).map(str),
    st.text("ab[]{}=#, ", max_size=6).map(lambda t: f'"{t}"'),
    st.text("ab[]=#\n", max_size=6).map(lambda t: f'"""\n{t}"""'),
    st.lists(st.sampled_from(['"[x]"', "'= # '", "1"]), max_size=3).map(
        lambda v: "[ # c ]\n" + ",\n".join(v) + "\n]"
    ),
)


@given(st.dictionaries(_NAME, st.dictionaries(_NAME, _VALUE, max_size=4), max_size=4))
def test_lines_point_at_their_keys(document: dict[str, dict[str, str]]) -> None:
    text = "".join(
        f"[{table}]\n" + "".join(f"{key} = {value}\n" for key, value in keys.items())
        for table, keys in document.items()
    )
    tomli.loads(text)
    lines, source = key_lines(text), text.splitlines()
    assert set(lines) == {(t,) for t in document} | {(t, k) for t in document for k in document[t]}
    for path, line in lines.items():
        head = f"[{path[0]}]" if len(path) == 1 else f"{path[1]} ="
        assert source[line - 1].startswith(head)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"[a\nb = 1", 1),
        (b"[a]\nb = \n", 2),
        (b"[a]\nx = 1\nx = 2\n", 3),
        (b"[a]\n[b]\n[a]\n", 3),
        (b'[a]\nx = "abc', 2),
        (b"[a]\nx = \xff\n", 2),
    ],
)
def test_syntax_errors_name_file_and_line(content: bytes, line: int) -> None:
    with pytest.raises(ConfigError, match=rf"^job\.toml:{line}: ") as e:
        parse_toml("job.toml", content)
    assert len(e.value.problems) == 1 and "\n" not in e.value.problems[0]


def test_a_byte_order_mark_is_no_error() -> None:
    assert parse_toml("job.toml", b"\xef\xbb\xbf[job]\n").data == {"job": {}}


def test_a_bare_name_is_looked_up_here_first_then_among_the_shipped_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read_toml("rl_ft.toml").data["job"]["dump_folder"] == "./outputs/rl_ft"
    (tmp_path / "rl_ft.toml").write_text('[job]\ndump_folder = "here"\n')
    assert read_toml("rl_ft.toml").data["job"]["dump_folder"] == "here"


def test_a_missing_file_names_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'rl_ft.toml'") as e:
        read_toml("rl_fft.toml")
    assert all(name in str(e.value) for name in shipped())
    with pytest.raises(ConfigError, match="does not exist"):
        read_toml(str(tmp_path / "rl_ft.toml"))  # a path is not looked up among the shipped


def test_an_unreadable_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_toml(str(tmp_path))
    if os.geteuid() != 0:
        path = tmp_path / "secret.toml"
        path.touch(mode=0o000)
        with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
            read_toml(str(path))


_WORD = st.one_of(
    st.sampled_from(sorted(load_schema().sections)),
    st.sampled_from([key.name for key in load_schema().all_keys()]),
    st.text(max_size=5),
)


@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), _WORD),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(_WORD, inner, max_size=3)
        ),
        max_leaves=8,
    )
)
def test_no_document_breaks_the_reader(data: object) -> None:
    """Whatever a file holds, its values are of the right types or it is a ConfigError."""
    document = data if isinstance(data, dict) else {"rl": data}
    try:
        values = file_values(TomlFile("job.toml", document, {}))
    except ConfigError as e:
        assert e.problems and all(p.startswith("job.toml: ") for p in e.problems)
        return
    for section, keys in values.items():
        for key, value in keys.items():
            kind = load_schema().find(f"{section}.{key}").type
            assert kind.accept(value) == value


@given(st.binary(max_size=40))
def test_no_bytes_break_the_reader(content: bytes) -> None:
    try:
        parse_toml("job.toml", content)
    except ConfigError as e:
        (problem,) = e.problems
        assert problem.startswith("job.toml:")
