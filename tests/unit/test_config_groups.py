"""`[[rollout.groups]]` and the placement of trainers and engines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from config_jobs import GOOD, job

from torchtitan_rl_ft.config.checks import check
from torchtitan_rl_ft.config.groups import engine_groups
from torchtitan_rl_ft.config.placement import engine_devices, exceeded
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.rules.job import Machine
from torchtitan_rl_ft.config.sections import EngineGroup, RolloutSection

MACHINE = Machine(exists=lambda path: "missing" not in path, find_program=lambda name: name)
WITHOUT_ENGINES = GOOD.replace("engines = 2\n", "")


def group(**values: object) -> str:
    lines = [f"{k} = {str(v).lower() if v is True else repr(v)}" for k, v in values.items()]
    return "\n[[rollout.groups]]\n" + "\n".join(lines).replace("'", '"') + "\n"


def resolved(tmp_path: Path, *groups: str, text: str = WITHOUT_ENGINES, more: str = "") -> Resolved:
    return job(tmp_path, text + more + "".join(groups))


PREFILL = group(name="p", role="prefill")
DECODE = group(name="d", role="decode", engines=2)
REFERENCE = group(name="reference", role="frozen", model="/models/base")


def test_no_table_is_one_regular_group(tmp_path: Path) -> None:
    made = resolved(tmp_path, text=GOOD)
    assert engine_groups(made.sections.rollout) == [EngineGroup(name="policy", engines=2)]


def test_tables_become_groups_and_say_how_many_engines_there_are(tmp_path: Path) -> None:
    made = resolved(tmp_path, PREFILL, DECODE, REFERENCE)
    groups = engine_groups(made.sections.rollout)
    assert [(g.name, g.role, g.engines) for g in groups] == [
        ("p", "prefill", 1),
        ("d", "decode", 2),
        ("reference", "frozen", 1),
    ]
    assert groups[2].model == "/models/base"
    assert made.sections.rollout.engines == 3  # those that serve the policy
    assert "rollout.groups" in made.origins["rollout.engines"]
    assert check(made, MACHINE).problems == []
    # As the roles read it.
    again = Resolved.read(made.write())
    assert engine_groups(again.sections.rollout) == groups


BROKEN = [
    ([group(name="a"), group(name="a")], "[0] has this name already: rollout.groups[1].name = 'a'"),
    ([group(name="a b")], "rollout.groups[0].name = 'a b'"),
    ([group(name="a", engines=0)], "rollout.groups[0].engines = 0"),
    ([group(name="a", nodes_per_engine=0)], "rollout.groups[0].nodes_per_engine = 0"),
    ([group(name="a", nodes_per_engine=2)], "the 1 ranks of an engine"),
    ([PREFILL], "a prefill group needs a decode group: rollout.groups[0].role"),
    ([DECODE], "a decode group needs a prefill group: rollout.groups[0].role"),
    ([PREFILL, DECODE, group(name="x", role="prefill")], "there is one prefill group at most"),
    ([REFERENCE], "no group serves the policy"),
    ([group(name="a"), group(name="f", role="frozen")], "rollout.groups[1].model = ''"),
    (
        [group(name="a"), group(name="f", role="frozen", model="/missing")],
        "there is no model directory with a config.json: rollout.groups[1].model = '/missing'",
    ),
    (
        [group(name="a"), group(name="b", model="/models/other")],
        "rollout.groups[1].model = '/models/other'",
    ),
    ([group(name="a"), group(name="policy")], "rollout.groups[1].name = 'policy'"),
    (
        [group(name="a"), group(name="policy", role="frozen", model="/m")],
        "rollout.groups[1].name = 'policy'",
    ),
    ([group(name="a", engine_args=["--api-key=k"])], "rollout.groups[0].engine_args: no secret"),
]


@pytest.mark.parametrize(("groups", "message"), BROKEN)
def test_a_broken_table_is_named(tmp_path: Path, groups: list[str], message: str) -> None:
    problems = check(resolved(tmp_path, *groups), MACHINE).problems
    found = [p for p in problems if message in p]
    assert found, problems
    assert "job.toml" in found[0] or "no secret" in found[0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('name = "a"\nenginess = 1\n', "rollout.groups[0]: unknown key 'enginess'"),
        ("engines = 1\n", "rollout.groups[0]: key 'name' is missing"),
        ('name = "a"\nengines = "two"\n', "rollout.groups[0].engines: expected int"),
        ('name = "a"\nrole = "frosen"\n', "rollout.groups[0].role: expected one of"),
    ],
)
def test_a_key_of_a_table_is_named(tmp_path: Path, table: str, message: str) -> None:
    with pytest.raises(Exception) as e:  # noqa: PT011
        resolved(tmp_path, f"\n[[rollout.groups]]\n{table}")
    assert message in str(e.value)


def test_engines_and_groups_together_are_refused(tmp_path: Path) -> None:
    problems = check(resolved(tmp_path, group(name="a"), text=GOOD), MACHINE).problems
    assert "leave rollout.engines out" in problems[0]
    assert "rollout.engines = 2" in problems[0]


def test_groups_replace_the_engines_of_a_registry_function(tmp_path: Path) -> None:
    file = '[job]\nconfig = "rl_ft"\n' + group(name="a", engines=3)
    made = job(tmp_path, file)
    assert made.sections.rollout.engines == 3
    assert check(made, MACHINE).problems == []


def test_the_floor_counts_engines_that_serve_the_policy(tmp_path: Path) -> None:
    made = resolved(tmp_path, group(name="a"), REFERENCE, more="min_engines = 2\n")
    problems = check(made, MACHINE).problems
    assert len(problems) == 1
    assert "rollout.min_engines = 2" in problems[0]
    assert "rollout.engines = 1" in problems[0]


# Placement ------------------------------------------------------------------------------------


@pytest.mark.row("F5")
@pytest.mark.parametrize(
    ("trainer", "engines", "refused"),
    [(1, 2, False), (2, 2, False), (4, 2, True), (3, 2, True)],
)
def test_colocated_trainers_do_not_exceed_the_devices_of_the_engines(
    trainer: int, engines: int, refused: bool
) -> None:
    problem = exceeded(trainer, engines)
    assert (problem is not None) == refused
    if problem is not None:
        assert f"take {trainer} devices, the engines hold {engines}" in problem


@pytest.mark.row("F5")
@pytest.mark.parametrize(
    ("placement", "groups", "refused"),
    [
        ("separate", 4, False),
        ("colocated", 4, True),
        ("colocated", 2, False),
        ("colocated", 1, False),
    ],
)
def test_the_rule_of_a_job(tmp_path: Path, placement: str, groups: int, refused: bool) -> None:
    text = GOOD.replace("replica_groups = 2", f"replica_groups = {groups}")
    made = resolved(tmp_path, text=text + f'placement = "{placement}"\n')
    problems = check(made, MACHINE).problems
    assert bool(problems) == refused, problems
    if refused:
        assert "colocated trainers take 4 devices, the engines hold 2" in problems[0]
        assert "fault_tolerance.replica_groups = 4" in problems[0]


def test_devices_follow_the_parallel_degrees_of_each_group() -> None:
    rollout = RolloutSection(
        engine_args=["--tp-size", "2"],
        groups=[
            EngineGroup(name="a", engines=2),
            EngineGroup(name="b", engines=1, engine_args=["--tp=4", "--pp-size=2"]),
        ],
    )
    assert engine_devices(rollout) == 2 * 2 + 4 * 2


def test_external_engines_are_not_colocated(tmp_path: Path) -> None:
    text = GOOD + 'placement = "colocated"\nexternal_urls = ["http://h:1"]\n'
    problems = check(resolved(tmp_path, text=text), MACHINE).problems
    assert any("do not give their memory up" in p for p in problems), problems


DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_examples_of_the_page_are_jobs(tmp_path: Path) -> None:
    page = DOCS.read_text().partition("## Groups of engines")[2].partition("\n## ")[0]
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    rest = GOOD.partition("[rollout]")[0].replace("seq_len = 32", "seq_len = 128")
    devices = []
    for example in examples:
        made = resolved(tmp_path, text=rest + example)
        assert check(made, MACHINE).problems == []
        devices.append(engine_devices(made.sections.rollout))
    assert devices == [3, 6]


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("standby_engines = 1\n", "rollout.standby_engines = 1"),
        ('\n[rl]\nmode = "async"\nmax_policy_age = 1\n', "rl.mode = 'async'"),
    ],
)
def test_engines_and_trainer_take_turns(tmp_path: Path, text: str, key: str) -> None:
    rollout = '\n[rollout]\nengines = 2\nplacement = "colocated"\n' + text
    rest = GOOD.partition("[rl]")[0]
    problems = check(resolved(tmp_path, text=rest + rollout), MACHINE).problems
    assert any(key in p and "rollout.placement = 'colocated'" in p for p in problems), problems
