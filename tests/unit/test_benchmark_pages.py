"""BENCHMARKS.md is what the saved results say."""

import json

import pytest

from benchmarks import pages
from benchmarks.report import transport_of
from torchtitan_rl_ft.observability.events import Event, Kind


def test_the_page_is_up_to_date():
    assert pages.PAGE.read_text() == pages.page(), "python -m benchmarks.pages"


def test_a_section_shows_aims_tables_figures_and_the_picture(tmp_path):
    found = {
        "figures": {
            "seconds": {"spare": [1.0, 1.5, 4.0]},
            "ratio": 0.25,
            "name": "not a figure",
            "transport": "nixl",
        },
        "tables": [{"title": "Sweep", "head": ["faults", "points"], "rows": [["2 %", "a|b"]]}],
        "aims": {
            "ratio": {"value": 0.25, "aim": 0.2, "met": False},
            "speed": {"value": 3.0, "aim": 2.0, "met": True},
            "time": {"value": -1e-14, "aim": 0, "wanted": "0 ± 1", "met": True, "note": ""},
            "hours": {"value": 0.4, "aim": 1.5, "met": False, "note": "contradicts the ratio"},
        },
    }
    (tmp_path / "simulated.json").write_text(json.dumps(found))
    (tmp_path / "simulated.png").touch()
    (tmp_path / "soak.txt").write_text("22 faults\n" + json.dumps({"aims": {}}) + "\n")
    text = pages.page(tmp_path)
    for line in (
        "| simulated | ratio | 0.25 | <= 0.2 | **missed** |",
        "| simulated | speed | 3 | >= 2 | met |",
        "| simulated | time | 0 | 0 ± 1 | met |",
        "| simulated | hours | 0.4 | 1.5 | **missed**: contradicts the ratio |",
        "| seconds / spare | 1.5 (1..4, 3 times) |",
        "| 2 % | a\\|b |",
        "![simulated](benchmarks/results/simulated.png)",
        "22 faults",
        "Policies travelled by nixl.",
    ):
        assert line in text.splitlines(), line
    assert "not a figure" not in text and '"aims"' not in text


def test_a_file_that_is_no_json_is_named(tmp_path):
    (tmp_path / "torn.json").write_text('{"figures": {')
    with pytest.raises(ValueError, match=r"torn\.json is no JSON"):
        pages.page(tmp_path)


def test_every_benchmark_with_results_says_how_to_run_it():
    commands = [x for x in pages.page().splitlines() if x.startswith("    python ")]
    partials = "    python benchmarks/partials.py [--rounds 5] [--intervals 16,64,256] [--out FILE]"
    assert partials in commands
    for path in pages.RESULTS.iterdir():
        scripts = (f"{path.stem}.py", f"{path.stem}/__main__.py")
        if any((pages.ROOT / "benchmarks" / script).exists() for script in scripts):
            assert any(path.stem in command for command in commands), path.name


def test_the_transport_is_that_of_the_last_policy():
    def event(kind, transport):
        who = {"run": "r", "role": "serving", "name": "serving", "attempt": 1, "pid": 1}
        return Event(**who, wall_s=1.0, mono_s=1.0, kind=kind, data={"transport": transport})

    initial, trained = event(Kind.PUBLISH, "disk"), event(Kind.PUBLISH, "nixl")
    assert transport_of([]) == ""
    assert transport_of([initial, trained, event(Kind.INSTALL, "disk")]) == "nixl"
