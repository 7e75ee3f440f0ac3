"""Which steps a rank profiles, and what is left of it."""

import gzip
import json

import pytest
import torch

from torchtitan_rl_ft.config.profile_steps import parse_steps
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.trainer.step_profiles import StepProfiles


@pytest.fixture
def events():
    return EventList()


@pytest.fixture
def profiles(tmp_path, events):
    return StepProfiles(
        tmp_path / "profiles", range(2, 4), "trainer-1.0", events, lambda phase: None
    )


def train(profiles, *steps):
    for step in steps:
        with profiles.around(step):
            torch.ones(4).mul(step)


def test_steps_of_the_range_leave_a_trace_each(profiles, tmp_path):
    train(profiles, 1, 2, 3, 4)
    found = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.gz"))
    assert found == [f"profiles/step_{k}/trainer-1.0.json.gz" for k in (2, 3)]
    trace = json.loads(gzip.decompress(profiles.path(2).read_bytes()))
    assert any(e.get("name") == "aten::mul" for e in trace["traceEvents"])


def test_a_step_that_is_trained_again_keeps_its_trace(profiles):
    train(profiles, 2)
    first = profiles.path(2).read_bytes()
    train(profiles, 2, 3)
    assert profiles.path(2).read_bytes() == first and profiles.path(3).exists()


def test_a_step_that_was_not_committed_leaves_none_and_is_profiled_again(profiles):
    with pytest.raises(RuntimeError, match="a peer"), profiles.around(2):
        raise RuntimeError("a peer is gone")
    assert not profiles.path(2).exists()
    train(profiles, 2)
    assert profiles.path(2).exists()


def test_a_trace_that_cannot_be_written_is_a_warning(profiles, tmp_path, events):
    (tmp_path / "profiles").write_text("in the way")
    train(profiles, 2, 3)
    assert [(e["kind"], e["step"]) for e in events.events] == [(Kind.WARN, 2)]


def test_ranges():
    assert list(parse_steps("10-12")) == [10, 11, 12] and list(parse_steps(" 7 ")) == [7]
    assert not parse_steps("")
    for wrong in ("a-b", "3-", "-3", "0", "5-4", "1-2-3"):
        with pytest.raises(ValueError):
            parse_steps(wrong)
