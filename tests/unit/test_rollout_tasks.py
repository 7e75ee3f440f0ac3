"""The default task and the loading of plug-ins."""

from __future__ import annotations

import itertools
import sys
import types

import pytest
from rollout_parts import TOKENIZER, context

from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.models.tiny import BOS, EOS
from torchtitan_rl_ft.rollout import plugins
from torchtitan_rl_ft.rollout.protocols import DataSource, HeldOutSource, Prompt, Response
from torchtitan_rl_ft.rollout.tasks.sorting import SortDigits, is_held_out, reward

SORTING = "torchtitan_rl_ft.rollout.tasks.sorting"


def all_prompts() -> tuple[list[Prompt], list[Prompt]]:
    source = SortDigits(context())
    return list(source.next(80)), list(source.held_out(1000))


def score(prompt: Prompt, text: str) -> float:
    return reward(prompt, respond(text + EOS))


def respond(tokens: str) -> Response:
    """As the rollout loop makes it from sampled tokens."""
    ids = TOKENIZER.encode(tokens).ids
    finish_reason = "stop" if tokens.endswith(EOS) else "length"
    return Response(TOKENIZER.decode(ids, skip_special_tokens=True), ids, finish_reason)


def test_prompts_are_read_by_the_tiny_tokenizer():
    training, held_out = all_prompts()
    for prompt in training + held_out:
        ids = TOKENIZER.encode(prompt.text).ids
        assert len(ids) == 3 and TOKENIZER.decode(ids) == prompt.text


def test_held_out_prompts_are_not_trained():
    training, held_out = all_prompts()
    assert len({p.text for p in training}) == 80 and len(held_out) == 20
    assert not {p.text for p in training} & {p.text for p in held_out}


def test_every_digit_is_trained_in_every_place():
    for place in (0, 1):
        kept = [p.text[place] for p in all_prompts()[0]]
        assert all(kept.count(d) == 8 for d in "0123456789")
    assert sum(is_held_out(a, b) for a in range(10) for b in range(10)) == 20


def test_reward_rule():
    prompt = Prompt("73>", "37")
    assert score(prompt, "37") == 1.0
    assert score(prompt, "33") == score(prompt, "97") == 0.5
    assert score(prompt, "73") == 0.0
    assert score(prompt, "") == 0.0
    assert score(prompt, "3") == 0.5
    assert score(prompt, "370") == pytest.approx(2 / 3)
    assert score(prompt, "37" + "7" * 8) == pytest.approx(0.2)


def test_only_an_answer_that_ends_itself_is_right():
    prompt = Prompt("73>", "37")
    for tokens in (f"37{BOS}", "37+", "370", f"3{BOS}7"):
        assert reward(prompt, respond(tokens)) == pytest.approx(2 / 3)
    assert reward(prompt, respond("37")) == 1.0  # nothing after it, but for a limit of two tokens


def test_no_constant_answer_scores_above_three_tenths():
    training, held_out = all_prompts()
    texts = ["".join(t) for n in range(4) for t in itertools.product("0123456789>", repeat=n)]
    for prompts in (training, held_out, training + held_out):
        best = max(sum(score(p, t) for p in prompts) / len(prompts) for t in texts)
        assert best < 0.3


def test_order_depends_on_seed_and_epoch_alone():
    first = SortDigits(context(1)).next(160)
    assert first == SortDigits(context(1)).next(160)
    assert first != SortDigits(context(2)).next(160)
    epochs = [[p.index for p in first if p.epoch == e] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(80))
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("drawn", [0, 1, 79, 80, 81, 200])
def test_resume_continues_the_order(drawn):
    source = SortDigits(context(3))
    source.next(drawn)
    again = SortDigits(context(3))
    again.load_state_dict(source.state_dict())
    assert again.next(100) == source.next(100)


def test_position_of_another_seed_is_refused():
    with pytest.raises(ValueError, match="seed 1, this one has 2"):
        SortDigits(context(2)).load_state_dict(SortDigits(context(1)).state_dict())


# Plug-ins -------------------------------------------------------------------------------------


@pytest.fixture
def module():
    module = types.ModuleType("user_plugins")
    sys.modules["user_plugins"] = module
    yield module
    del sys.modules["user_plugins"]


def test_default_plugins_load():
    source = plugins.load_data_source(f"{SORTING}:SortDigits", context(), journaling=True)
    assert isinstance(source, DataSource) and isinstance(source, HeldOutSource)
    assert plugins.load_reward(f"{SORTING}:reward", context()) is reward
    assert plugins.load_filter("", context()) is None


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_module:X", "importing no_such_module: ModuleNotFoundError"),
        (f"{SORTING}:Nothing", "has no 'Nothing'"),
        (f"{SORTING}:DIGITS", "neither a function nor a class"),
        ("just_a_name", "must be written module:name"),
        (f"{SORTING}:reward?a=1", "only a class takes options"),
    ],
)
def test_what_cannot_be_loaded_says_why(spec, message):
    with pytest.raises(ConfigError, match="rl.reward") as caught:
        plugins.load_reward(spec, context())
    assert message in str(caught.value)


def test_constructor_errors_and_options(module):
    class Needy:
        def __init__(self, context):
            self.size = int(context.options["size"])

        def __call__(self, prompt, rewards):
            return None

    module.Needy = Needy
    with pytest.raises(ConfigError, match="rl.filter = 'user_plugins:Needy': KeyError"):
        plugins.load_filter("user_plugins:Needy", context())
    assert plugins.load_filter("user_plugins:Needy?size=3", context()).size == 3


def test_source_without_a_position_is_refused_while_journaling(module):
    class Stateless:
        def __init__(self, context):
            pass

        def next(self, n):
            return []

    module.Stateless = Stateless
    spec = "user_plugins:Stateless"
    with pytest.raises(ConfigError, match="no state_dict and no load_state_dict.*journal = false"):
        plugins.load_data_source(spec, context(), journaling=True)
    assert plugins.load_data_source(spec, context(), journaling=False).next(1) == []


def test_source_without_next_is_refused(module):
    module.Empty = type("Empty", (), {"__init__": lambda self, context: None})
    with pytest.raises(ConfigError, match=r"no method next\(n\)"):
        plugins.load_data_source("user_plugins:Empty", context(), journaling=False)
