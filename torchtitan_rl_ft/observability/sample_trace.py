"""What each sample went through, as spans of a trace: queue, prefill, decode, reward, the wait in
the buffer, training.

ACCEPT brings what rollout and serving saw of a group (`rollout/sample_times.py`), SEAL names its
batch, COMMIT or DROP ends it. Kept in memory: a few numbers of each group that is not trained yet,
and of the last `MOST_TRAINED` that are, in case their step is trained again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchtitan_rl_ft.observability.event_data import dropped, whole, wholes
from torchtitan_rl_ft.observability.events import Event
from torchtitan_rl_ft.observability.timeline import Timeline
from torchtitan_rl_ft.observability.trace_format import TraceFile, Track, text

SAMPLE = "sample"
MAX_LANES = 256
MOST_TRAINED = 2**16
"""Prompt groups of trained batches that are remembered."""

CLOCK_SLACK_US = 1_000_000
"""A group is judged before it is accepted: times later than that are another clock's."""


class _Leg(NamedTuple):
    """One engine's share of a sample. Times count from the request."""

    engine: str  # as it stands in JSON
    sent_us: int
    first_us: int | None
    end_us: int
    tokens: int
    queue_us: int | None

    @classmethod
    def of(cls, told: Sequence[Any]) -> _Leg:
        """Raises ValueError, TypeError, OverflowError."""
        engine, sent_ms, first_ms, end_ms, tokens, queue_ms = told
        return cls(
            text(str(engine))[1:-1],
            _us(sent_ms),
            None if first_ms is None else _us(first_ms),
            _us(end_ms),
            int(tokens),
            None if queue_ms is None else _us(queue_ms),
        )


class _Times(NamedTuple):
    """What ACCEPT tells of a group (`rollout/sample_times.py`)."""

    started_us: int
    asked_us: int
    generated_us: int
    judged_us: int
    failed: int
    rewards: list[Any]
    legs: list[list[_Leg]]

    @classmethod
    def of(cls, told: Any, timeline: Timeline) -> _Times | None:
        """None where it is not told, or cannot be."""
        try:
            started_us = timeline.us(float(told["started_s"]))
            asked, generated, judged = (started_us + _us(ms) for ms in told["at_ms"])
            legs = [[_Leg.of(leg) for leg in sample] for sample in told["legs"]]
            rewards, failed = list(told["rewards"]), int(told["failed"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        if not started_us <= asked <= generated <= judged:
            return None
        return cls(started_us, asked, generated, judged, failed, rewards, legs)


def _us(ms: float) -> int:
    """Raises TypeError, ValueError, OverflowError."""
    return max(0, round(ms * 1e3))


@dataclass(slots=True)
class _Group:
    samples: int
    told: bool  # its samples have spans
    accepted_us: int
    track: Track | None = None
    arrow_us: int = 0
    sealed_us: int = 0
    trained: int = 0
    until_us: int = 0  # end of its last span of training


@dataclass(slots=True)
class _Batch:
    step: int
    sealed_us: int
    groups: list[int]
    commits: int = 0


class SampleTrace:
    """`groups` has a slice per prompt group and per batch, with arrows group -> batch -> step;
    `samples` an asynchronous track per sample."""

    def __init__(self, file: TraceFile, timeline: Timeline) -> None:
        self._timeline = timeline
        self._rows, self._spans = file.process("prompt groups, batches"), file.process("samples")
        self._lanes: dict[str, list[Track]] = {"groups": [], "batches": []}
        self._groups: dict[int, _Group] = {}
        self._batches: dict[int, _Batch] = {}
        self._trained_batches: deque[tuple[int, list[int]]] = deque()  # with their groups
        self._remembered = 0  # groups of these
        self.samples = 0

    # Events -------------------------------------------------------------------------------

    def accept(self, event: Event) -> None:
        at_us = self._timeline.us(event.mono_s)
        number = whole(event, "group")
        if number is None or number in self._groups:
            return
        group = self._groups[number] = _Group(0, False, at_us)
        times = _Times.of(event.data.get("trace"), self._timeline)
        if times is not None and times.judged_us <= at_us + CLOCK_SLACK_US:
            self._rolled_out(number, group, times, event)

    def seal(self, event: Event) -> None:
        number, at_us = whole(event, "batch"), self._timeline.us(event.mono_s)
        if number is None:
            return
        groups = wholes(event, "groups")
        self._batches[number] = _Batch(event.step or 0, at_us, groups)
        for g in groups:
            if (group := self._groups.get(g)) is not None:
                group.sealed_us = max(at_us, group.accepted_us)
                self._span(g, group, group.accepted_us, group.sealed_us, "buffer")

    def commit(self, event: Event, began_us: int, steps: Track | None) -> None:
        """`began_us`: when its step began; `steps` has a slice from there to now."""
        number, at_us = whole(event, "batch"), self._timeline.us(event.mono_s)
        batch = self._batches.get(number) if number is not None else None
        if number is None or batch is None:
            return
        again = batch.commits > 0
        since_us = began_us if again else batch.sealed_us
        train_us = min(at_us, max(since_us, began_us))
        lane = self._lane("batches", since_us)
        name = f"batch {number}" + (" again" if again else "")
        start_us, _ = lane.slice(since_us, at_us, name, {"step": event.step, **event.data})
        for g in batch.groups:
            if (group := self._groups.get(g)) is not None:
                self._trained(g, group, train_us, at_us)
                if group.track is not None and steps is not None and not again:
                    self._arrow(f"g{g}", group, lane, start_us, steps, train_us, at_us)
        batch.commits += 1
        if not again:
            self._remember(number, batch)

    def _remember(self, number: int, batch: _Batch) -> None:
        """It is trained; of too many the oldest are forgotten."""
        self._trained_batches.append((number, batch.groups))
        self._remembered += len(batch.groups)
        while self._remembered > MOST_TRAINED and len(self._trained_batches) > 1:
            oldest, groups = self._trained_batches.popleft()
            self._remembered -= len(groups)
            self._batches.pop(oldest, None)
            for g in groups:
                self._groups.pop(g, None)

    def drop(self, event: Event) -> None:
        at_us = self._timeline.us(event.mono_s)
        if (batch := whole(event, "batch")) is not None:
            self._batches.pop(batch, None)
        for number in dropped(event):
            group = self._groups.pop(number, None)
            if group is not None and group.told and not group.trained:
                at_us = max(at_us, group.accepted_us, group.sealed_us)
                args = text({"dropped": event.cause})
                for key in self._keys(number, group):
                    self._spans.span(at_us, at_us, "dropped", SAMPLE, key, args)
                    self._spans.shut(at_us, SAMPLE, SAMPLE, key)

    def close(self, at_us: int) -> None:
        """The events are over: what is not trained stays unfinished."""
        for number, group in self._groups.items():
            if group.told and not group.trained:
                at_us = max(at_us, group.accepted_us, group.sealed_us)
                for key in self._keys(number, group):
                    self._spans.span(at_us, at_us, "not trained", SAMPLE, key)
                    self._spans.shut(at_us, SAMPLE, SAMPLE, key)

    # Spans --------------------------------------------------------------------------------

    def _rolled_out(self, number: int, group: _Group, times: _Times, event: Event) -> None:
        group.accepted_us = end_us = max(times.judged_us, group.accepted_us)
        lane = self._lane("groups", times.started_us)
        rewards = times.rewards
        args = {"version": event.version, "rewards": rewards, "failed_tries": times.failed}
        start_us, shown_us = lane.slice(times.started_us, end_us, f"group {number}", args)
        group.track, group.arrow_us = lane, max(start_us, shown_us - 1)
        group.samples, group.told = len(times.legs), True
        self.samples += len(times.legs)
        span = self._spans.span
        for i, key in enumerate(self._keys(number, group)):
            reward = rewards[i] if i < len(rewards) else None
            args_text = text({"group": number, "sample": i, "reward": reward})
            self._spans.open(times.started_us, SAMPLE, SAMPLE, key, args_text)
            if times.failed:
                span(times.started_us, times.asked_us, "tries that failed", SAMPLE, key)
            self._generated(key, times.legs[i], times.asked_us, times.generated_us)
            span(times.generated_us, times.judged_us, "reward", SAMPLE, key)

    def _generated(self, key: str, legs: Sequence[_Leg], asked_us: int, limit_us: int) -> None:
        span = self._spans.span
        done_us = asked_us
        for n, leg in enumerate(legs):
            sent_us = min(limit_us, max(done_us, asked_us + leg.sent_us))
            end_us = min(limit_us, max(sent_us, asked_us + leg.end_us))
            if n:
                span(done_us, sent_us, "moved", SAMPLE, key)
            self._spans.open(sent_us, leg.engine, SAMPLE, key, f'{{"tokens":{leg.tokens}}}')
            begun_us = sent_us
            if leg.queue_us is not None:
                begun_us = min(end_us, sent_us + leg.queue_us)
                span(sent_us, begun_us, "queue", SAMPLE, key)
            if leg.first_us is None:
                span(begun_us, end_us, "generate", SAMPLE, key)
            else:
                first_us = min(end_us, max(begun_us, asked_us + leg.first_us))
                span(begun_us, first_us, "prefill", SAMPLE, key)
                span(first_us, end_us, "decode", SAMPLE, key)
            self._spans.shut(end_us, leg.engine, SAMPLE, key)
            done_us = end_us

    def _trained(self, number: int, group: _Group, train_us: int, at_us: int) -> None:
        if not group.told:
            return
        name = "train" if not group.trained else "train again"
        if not group.trained:
            train_us = max(train_us, group.sealed_us)
            self._span(number, group, group.sealed_us, train_us, "sealed")
        train_us = max(train_us, group.until_us)
        at_us = group.until_us = max(train_us, at_us)
        for key in self._keys(number, group):
            self._spans.span(train_us, at_us, name, SAMPLE, key)
            if not group.trained:
                self._spans.shut(at_us, SAMPLE, SAMPLE, key)
        group.trained += 1

    def _span(self, number: int, group: _Group, start_us: int, end_us: int, name: str) -> None:
        if group.told:
            for key in self._keys(number, group):
                self._spans.span(start_us, max(start_us, end_us), name, SAMPLE, key)

    def _arrow(
        self,
        key: str,
        group: _Group,
        batch: Track,
        batch_us: int,
        steps: Track,
        train_us: int,
        at_us: int,
    ) -> None:
        assert group.track is not None
        if not group.arrow_us <= batch_us <= max(batch_us, train_us) < at_us:
            return  # a clock that was set: an arrow into the past is none
        group.track.arrow("s", group.arrow_us, "prompt group", key)
        batch.arrow("t", batch_us, "prompt group", key)
        steps.arrow("f", max(batch_us, train_us), "prompt group", key)

    # Places -------------------------------------------------------------------------------

    @staticmethod
    def _keys(number: int, group: _Group) -> list[str]:
        return [f"{number}.{i}" for i in range(group.samples)]

    def _lane(self, kind: str, start_us: int) -> Track:
        """A track that is free since `start_us`; of too many, the one that is free first."""
        lanes = self._lanes[kind]
        for lane in lanes:
            if lane.last_us <= start_us:
                return lane
        if len(lanes) >= MAX_LANES:
            return min(lanes, key=lambda lane: lane.last_us)
        lanes.append(self._rows.track(f"{kind} {len(lanes) + 1}"))
        return lanes[-1]
