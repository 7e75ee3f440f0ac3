"""The mathematics task: problems from a file, answers compared in worker processes."""

from __future__ import annotations

import asyncio
import json
import sys

import psutil
import pytest
from rollout_parts import TOKENIZER

from torchtitan_rl_ft.rollout.chat import ChatTemplate
from torchtitan_rl_ft.rollout.protocols import PluginContext, Prompt, Response
from torchtitan_rl_ft.rollout.tasks.math import MathProblems, MathReward, read_problems
from torchtitan_rl_ft.rollout.worker_pool import WorkerDied, WorkerPool, WorkerTimeout

pytestmark = pytest.mark.timeout(120)  # a worker imports sympy


def context(tmp_path, **options) -> PluginContext:
    return PluginContext(0, TOKENIZER, tmp_path, options)


def problem_file(tmp_path, n=40):
    path = tmp_path / "math.jsonl"
    lines = [json.dumps({"problem": f"What is {i} + 1?", "answer": i + 1}) for i in range(n)]
    path.write_text("\n".join(lines) + "\n")
    return path


async def scores(reward: MathReward, *pairs: tuple[str, str]) -> list[float | None]:
    return list(
        await asyncio.gather(
            *(reward(Prompt("", answer), Response(text, [], "stop")) for answer, text in pairs)
        )
    )


async def test_answers_are_compared_by_meaning(tmp_path):
    reward = MathReward(context(tmp_path, workers="2"))
    try:
        found = await scores(
            reward,
            ("72", "so 48 + 24 = 72, the answer is \\boxed{72}"),
            ("\\frac{1}{2}", "thus \\boxed{0.5}"),
            ("x^2 + 2x + 1", "it is \\boxed{(x+1)^2}"),
            ("72", "the answer is \\boxed{27}"),
            ("72", "I do not know"),
            ("72", ""),
            ("(1, 2)", "we find \\boxed{(1,2)}"),
        )
    finally:
        await reward.close()
    assert found == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 1.0]


async def test_workers_end_with_the_reward(tmp_path):
    reward = MathReward(context(tmp_path, workers="1"))
    await scores(reward, ("1", "\\boxed{1}"))
    (pid,) = [w.pid for w in reward._pool._idle]
    await reward.close()
    assert not psutil.pid_exists(pid)


ECHO = """
import json, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    q = json.loads(line)
    if q == "die": sys.exit(3)
    if q == "hang": time.sleep(60)
    print(json.dumps({"echo": q}), flush=True)
"""


async def test_late_worker_is_killed_and_replaced():
    pool = WorkerPool([sys.executable, "-c", ECHO], size=1, timeout_s=0.5)
    try:
        assert await pool.ask("a") == {"echo": "a"}
        pid = pool._idle[0].pid
        with pytest.raises(WorkerTimeout, match="0.5 s"):
            await pool.ask("hang")
        assert not psutil.pid_exists(pid)
        assert await pool.ask("b") == {"echo": "b"}
        with pytest.raises(WorkerDied):
            await pool.ask("die")
        assert await pool.ask("c") == {"echo": "c"}
    finally:
        await pool.close()


async def test_no_more_workers_than_allowed():
    pool = WorkerPool([sys.executable, "-c", ECHO], size=2, timeout_s=10)
    try:
        answers = await asyncio.gather(*(pool.ask(i) for i in range(10)))
        assert answers == [{"echo": i} for i in range(10)]
        assert len(pool._idle) == 2
    finally:
        await pool.close()


async def test_worker_that_does_not_start():
    pool = WorkerPool([sys.executable, "-c", "raise SystemExit(1)"], size=1, timeout_s=10)
    with pytest.raises(WorkerDied, match="ended"):
        await pool.ask("a")


def test_source_holds_out_a_part(tmp_path):
    path = problem_file(tmp_path)
    source = MathProblems(context(tmp_path, path=str(path), held_out="3"))
    held_out = {p.text for p in source.held_out(10)}
    trained = {p.text for p in source.next(200)}
    assert len(held_out) == 3 and len(trained) == 37 and not held_out & trained
    assert all("\\boxed" in t for t in held_out)


def test_source_resumes(tmp_path):
    path = str(problem_file(tmp_path))
    source = MathProblems(context(tmp_path, path=path))
    source.next(50)
    state = json.loads(json.dumps(source.state_dict()))
    expected = source.next(20)
    again = MathProblems(context(tmp_path, path=path))
    again.load_state_dict(state)
    assert again.next(20) == expected
    shorter = MathProblems(context(tmp_path, path=str(problem_file(tmp_path, n=20))))
    with pytest.raises(ValueError, match="size"):
        shorter.load_state_dict(state)


def test_bad_files_name_file_and_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"problem": "1+1", "answer": "2"}\n{"question": "?"}\n')
    with pytest.raises(ValueError, match=r"bad\.jsonl:2: .*problem"):
        read_problems(path)
    path.write_text("")
    with pytest.raises(ValueError, match="holds no problems"):
        read_problems(path)
    with pytest.raises(ValueError, match="path=FILE"):
        MathProblems(context(tmp_path))


CHATML = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)


def test_chat_template_of_the_model_is_used(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}))
    source = MathProblems(context(tmp_path, path=str(problem_file(tmp_path))))
    (prompt,) = source.next(1)
    assert prompt.text.startswith("<|im_start|>user\nWhat is ")
    assert prompt.text.endswith("<|im_start|>assistant")


@pytest.mark.timeout(120)
def test_chat_template_renders_as_transformers_does(tmp_path):
    transformers = pytest.importorskip("transformers")
    from torchtitan_rl_ft.models.tiny import make_tiny_model

    path = make_tiny_model(tmp_path / "m", 0)
    (path / "chat_template.jinja").write_text(CHATML)
    expected = transformers.AutoTokenizer.from_pretrained(path).apply_chat_template(
        [{"role": "user", "content": "1+1"}], tokenize=False, add_generation_prompt=True
    )
    assert ChatTemplate.of(path).user_turn("1+1") == expected


def test_broken_template_is_a_clear_error():
    with pytest.raises(ValueError, match="not valid"):
        ChatTemplate("{% if %}")
