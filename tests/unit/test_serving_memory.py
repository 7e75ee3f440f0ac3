"""Drained before memory is given up: bounded, and by the engine's own queues."""

from __future__ import annotations

import pytest

from torchtitan_rl_ft.serving.engine_client import EngineClient
from torchtitan_rl_ft.serving.memory import NotIdle, drain
from torchtitan_rl_ft.serving.samples import AnswerInvalid


class Engine:
    """Answers with the next of `states`, the last one for ever."""

    def __init__(self, *states: dict[str, int]) -> None:
        self.states, self.aborts = list(states), 0

    async def queues(self, timeout_s: float) -> dict[str, int]:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    async def abort_all(self, timeout_s: float) -> None:
        self.aborts += 1


async def test_an_idle_engine_is_not_disturbed() -> None:
    engine = Engine({"running": 0, "waiting": 0})
    await drain("engine-0", engine, lambda: 0, 1.0)
    assert engine.aborts == 0


@pytest.mark.row("C9")
async def test_aborted_until_idle() -> None:
    engine = Engine({"running": 3, "waiting": 1}, {"running": 1, "waiting": 0}, {"running": 0})
    await drain("engine-0", engine, lambda: 0, 5.0)
    assert engine.aborts == 2


@pytest.mark.row("C9")
@pytest.mark.parametrize(
    ("state", "in_flight", "named"),
    [
        ({"running": 2, "waiting": 1}, 0, "running 2, waiting 1"),
        # Nothing runs, but one request travels from prefill to decode.
        ({"running": 0, "prefill_inflight_queue": 1}, 0, "prefill_inflight_queue 1"),
        ({"running": 0, "decode_transfer_queue": 4}, 0, "decode_transfer_queue 4"),
        ({"running": 0}, 5, "in flight here 5"),
    ],
)
async def test_one_that_does_not_drain_is_named_with_its_queues(
    state: dict[str, int], in_flight: int, named: str
) -> None:
    with pytest.raises(TimeoutError, match=f"engine-0 is not idle after 0.2 s: {named}"):
        await drain("engine-0", Engine(state), lambda: in_flight, 0.2)


@pytest.mark.row("C9")
async def test_the_limit_is_the_clocks() -> None:
    now = [0.0]
    engine = Engine({"running": 1})

    def clock() -> float:
        now[0] += 0.3
        return now[0]

    with pytest.raises(NotIdle):
        await drain("engine-0", engine, lambda: 0, 1.0, clock)
    assert engine.aborts <= 2


ANSWER = {
    "loads": [
        {
            "num_running_reqs": 1,
            "num_waiting_reqs": 2,
            "queues": {"waiting": 2, "grammar": 0, "paused": 0, "retracted": 3},
            "disaggregation": {
                "mode": "decode",
                "decode_prealloc_queue_reqs": 1,
                "decode_transfer_queue_reqs": 4,
                "kv_transfer_latency_ms": 0.1,
            },
        },
        {
            "num_running_reqs": 1,
            "num_waiting_reqs": 0,
            "queues": {"waiting": 0, "grammar": 5, "paused": 0, "retracted": 0},
        },
    ]
}


async def test_queues_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    client = EngineClient(None, "http://e", "engine-0")  # type: ignore[arg-type]
    answers = [ANSWER, {"loads": [{"num_running_reqs": 0}]}]

    async def answered(*args: object, **kwargs: object) -> object:
        return answers.pop(0)

    monkeypatch.setattr(client, "_json", answered)
    assert {k: v for k, v in (await client.queues(1.0)).items() if v} == {
        "running": 2,
        "waiting": 2,
        "grammar": 5,
        "retracted": 3,
        "decode_prealloc_queue": 1,
        "decode_transfer_queue": 4,
    }
    with pytest.raises(AnswerInvalid, match="queues not understood"):
        await client.queues(1.0)
