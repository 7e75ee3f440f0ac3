"""The state of a run in Prometheus' words.

Keys of `metrics.jsonl` are gauges under their exported names, of the last committed step. Counters
are over all lives of the run folder, those of outages over the present one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.observability.health import Health
from torchtitan_rl_ft.observability.live_ettr import Measured
from torchtitan_rl_ft.observability.metric_names import PREFIX, exported_name
from torchtitan_rl_ft.observability.outage import PHASES, Outage
from torchtitan_rl_ft.observability.run_members import kind_of
from torchtitan_rl_ft.observability.run_state import RunState

MOST_KEYS = 300
"""Keys of a row of metrics.jsonl that are exported."""

ENGINE_STATES = (
    "starting", "standby", "stale", "installing", "serving", "paused", "suspect", "draining",
    "retired", "restarting", "lent", "unknown", "ended",
)  # fmt: skip


class RunCollector:
    """Asked at each scrape."""

    def __init__(
        self,
        state: RunState,
        measured: Callable[[], Measured],
        health: Callable[[], Health],
        now_mono_s: Callable[[], float],
        run: str,
    ) -> None:
        self._state, self._measured, self._health = state, measured, health
        self._now_mono_s, self._run = now_mono_s, run

    def collect(self) -> Iterator[Metric]:
        own = [*self._progress(), *self._processes(), *self._counts(), *self._times()]
        names = {metric.name for metric in own}
        yield from own
        for key, value in list(self._state.metrics.items())[:MOST_KEYS]:
            name = exported_name(key)
            if name not in names and isinstance(value, int | float):
                names.add(name)
                yield GaugeMetricFamily(name, f"{key} of the last committed step", value)

    def _progress(self) -> Iterator[Metric]:
        state, now_s = self._state, self._now_mono_s()
        info = _gauge("run_info", "the run folder's name", labels=["run"])
        info.add_metric([self._run], 1)
        yield info
        yield _gauge("healthy", "1 while the job starts or makes progress", self._health().ok)
        yield _gauge("step", "last committed step", state.step)
        yield _gauge("target_steps", "steps of the whole job", state.total_steps)
        yield _gauge("elapsed_seconds", "since the start of this life", state.elapsed_s(now_s))
        if state.progress_mono_s is not None:
            age_s = max(0.0, now_s - state.progress_mono_s)
            yield _gauge("progress_age_seconds", "since the job last came forward", age_s)
        if state.version is not None:
            yield _gauge("published_version", "newest policy version", state.version)
        if state.checkpoint_step is not None:
            yield _gauge("checkpoint_step", "step of the last checkpoint", state.checkpoint_step)
        ahead = "batches that are sealed and not trained yet"
        yield _gauge("buffered_batches", ahead, state.buffered_batches)

    def _processes(self) -> Iterator[Metric]:
        state, members = self._state, self._state.members
        yield _gauge("groups_up", "trainer groups that have started", state.groups_up)
        yield _gauge("groups_expected", "trainer groups of the job", state.groups)
        yield _gauge("engines_serving", "engines that serve", state.engines_serving)
        yield _gauge("engines_expected", "engines of the job", state.engines)
        engines = _gauge("engines", "engines by state", labels=["state"])
        states = Counter(e.state for e in members.engines.values())
        for name in ENGINE_STATES:
            engines.add_metric([name], states[name])
        yield engines
        roles = _gauge("role_up", "1 while the role's process is there", labels=["role"])
        for name, role in sorted(members.roles.items()):
            roles.add_metric([name], float(role.alive))
        yield roles
        if (quorum := members.quorum) is not None:
            yield _gauge("quorum_id", "id of the quorum", quorum.quorum_id)
            yield _gauge("quorum_participants", "groups that train in it", quorum.participants)

    def _counts(self) -> Iterator[Metric]:
        state, totals = self._state, self._state.totals
        yield _counter("commits", "commits", totals[Kind.COMMIT])
        yield _counter("refused_commits", "commits that were refused", totals[Kind.REFUSE])
        yield _counter("heals", "states taken from a peer", totals[Kind.HEAL])
        yield _counter("faults", "faults", state.faults)
        yield _counter("warnings", "warnings", totals[Kind.WARN])
        yield _counter("quorum_changes", "quorums with another id", state.members.quorum_changes)
        yield _counter("groups_issued", "prompt groups that were drawn", state.groups_issued)
        accepted = "prompt groups that were rolled out and rewarded"
        yield _counter("groups_accepted", accepted, totals[Kind.ACCEPT])
        dropped = _counter("groups_dropped", "prompt groups by reason", labels=["reason"])
        for reason, n in state.dropped.items():
            dropped.add_metric([reason], n)
        yield dropped
        restarts = _counter("restarts", "restarts of processes by role", labels=["role"])
        known = {kind_of(name) for name in [*state.members.roles, *state.members.engines]}
        for role in sorted(known | set(state.members.restarts)):
            restarts.add_metric([role], state.members.restarts[role])
        yield restarts

    def _times(self) -> Iterator[Metric]:
        measured = self._measured()
        if measured.ettr is None:
            return
        strict, paper = measured.ettr.strict, measured.ettr.paper
        for key, figure in (("strict", strict), ("paper", paper)):
            yield _gauge(f"ettr_{key}", f"ETTR of this life, {key} definition", figure.ratio)
            if figure.fault_free is not None:
                free = "the same without its outages"
                yield _gauge(f"ettr_{key}_fault_free", free, figure.fault_free)
        if measured.samples:
            last = measured.samples[-1]
            yield _gauge("ettr_strict_window", "strict, sliding", last.strict_window)
            yield _gauge("ettr_paper_window", "paper, sliding", last.paper_window)
        lost = _gauge(
            "lost_slot_seconds", "slot-seconds that strict ETTR lacks", labels=["role", "cause"]
        )
        for role, causes in strict.lost_s.items():
            for cause, seconds in causes.items():
                lost.add_metric([role, cause], seconds)
        yield lost
        yield from _outages(measured.ettr.outages)


def _outages(found: list[Outage]) -> Iterator[Metric]:
    """Those that are over are counted: their phases do not change any more."""
    over = [o for o in found if o.done_s is not None or o.overtaken]
    counts = _counter("outages", "outages that are over", labels=["role"])
    seconds = _counter("outage_seconds", "of outages that are over", labels=["role", "cause"])
    for role in sorted({o.role for o in found}):
        of_role = [o for o in over if o.role == role]
        counts.add_metric([role], len(of_role))
        for phase in PHASES:
            seconds.add_metric([role, phase], sum(o.phase_s[phase] for o in of_role))
    yield counts
    yield seconds
    yield _gauge("outages_open", "outages that last", len(found) - len(over))


def _gauge(
    name: str, text: str, value: float | None = None, labels: list[str] | None = None
) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value, labels=labels)


def _counter(
    name: str, text: str, value: float | None = None, labels: list[str] | None = None
) -> CounterMetricFamily:
    """`_total` is added by Prometheus' text format."""
    return CounterMetricFamily(PREFIX + name, text, value, labels=labels)


def exposition(collector: RunCollector) -> bytes:
    """Prometheus' text format."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return generate_latest(registry)
