"""All trainers are down: rollouts go on to the bound of the policy's age, and nothing of it is
lost, done twice, or trained too old. Then rollout, the lighthouse, and at last everything is killed
as well. One real job."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from job_run import Job

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.run_folder import ProcessId

pytestmark = pytest.mark.timeout(400)

GROUPS_PER_STEP, MAX_AGE = 4, 2
TRAINERS = ("trainer-0", "trainer-1")
KEYS = (
    *("--rl.mode", "async", "--rl.max_policy_age", str(MAX_AGE)),
    *("--checkpoint.interval", "2", "--recovery.role_max_restarts", "10"),
    *("--recovery.partial_interval_tokens", "4"),  # even these short answers are kept
)


def rollout_status(job: Job) -> dict[str, Any] | None:
    """What the rollout role says; None while it says nothing."""
    role = job.folder.role("rollout")
    assert job.session is not None
    headers = {"Authorization": f"Bearer {job.session.token()}"}
    try:
        answer = httpx.get(f"{role.url if role else ''}/v1/status", headers=headers, timeout=5)
    except (httpx.TransportError, httpx.UnsupportedProtocol):
        return None
    return answer.json()


def at_the_bound(job: Job) -> bool:
    """Admission has stopped: nothing is in flight, and there is a batch for each step that the
    policy that is served is young enough for. The trainers may have died before they published
    their last one."""
    found = rollout_status(job)
    if found is None or found["phase"] != "waiting_for_trainers" or found["in_flight"]:
        return False
    steps = found["policy"]["step"] + MAX_AGE + 1 - found["step"]
    assert MAX_AGE <= steps <= MAX_AGE + 1
    return found["accepted"] + GROUPS_PER_STEP * found["sealed_ahead"] == GROUPS_PER_STEP * steps


@contextmanager
def outage(job: Job) -> Iterator[None]:
    """All trainers are killed, and their successors wait until it is over."""
    before = {name: job.attempts(name) for name in TRAINERS}
    for name in TRAINERS:
        faults.kill(job.process_of(name), whole_tree=True)
    with ExitStack() as stack:
        for name in TRAINERS:
            job.wait_for(lambda n=name: job.attempts(n) > before[n], f"the next {name}", 30)
            stack.enter_context(faults.stopped(job.process_of(name)))
        yield


def stock(job: Job) -> int:
    """Groups that are accepted or sealed, and not trained."""
    counts = job.audit().counts
    return counts["accepted"] + counts["sealed"]


def accepted(job: Job) -> Counter[int]:
    return Counter(e.data["group"] for e in job.events(Kind.ACCEPT))


def since(job: Job, kind: Kind, mono_s: float) -> list[Event]:
    return [e for e in job.events(kind) if e.mono_s > mono_s]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with Job(tmp_path_factory.mktemp("outage") / "run") as made:
        made.start(*KEYS, "--training.steps", "100000")
        yield made


@pytest.mark.row("M1")
@pytest.mark.row("M2")
@pytest.mark.row("F10")
@pytest.mark.scenario("L-1")
def test_rollouts_go_on_to_the_bound_while_trainers_are_down(job: Job) -> None:
    job.wait_step(5, 120)
    began = time.monotonic()
    with outage(job):
        faults.kill(job.process_of("rollout"))
        job.wait_for(lambda: at_the_bound(job), "the bound, with a new rollout role", 60)
        full, issued = stock(job), len(accepted(job))
        # A role that starts again in this state asks for nothing more.
        role = job.attempts("rollout")
        faults.kill(job.process_of("rollout"))
        job.wait_for(lambda: job.attempts("rollout") > role, "the next rollout role", 30)
        job.wait_for(lambda: at_the_bound(job), "the bound again", 60)
        time.sleep(2.0)  # it would ask at once
        assert (stock(job), len(accepted(job))) == (full, issued)
        kept = set(accepted(job))
    job.wait_for(lambda: len(since(job, Kind.COMMIT, began)) >= 2 * (MAX_AGE + 1), "commits", 120)

    faults.kill(job.process_of("lighthouse"))
    job.wait_step(job.step() + 3, 60)
    assert set(accepted(job).values()) == {1}  # nothing was rolled out twice
    assert kept <= set(accepted(job))
    found = job.audit()
    assert found.problems == []
    assert all("too old" in reason for reason in found.dropped)
    ages = [row["policy_age/max"] for row in job.metrics()]
    assert max(ages) <= MAX_AGE and ages[-1] > 0


@pytest.mark.row("M2")
@pytest.mark.scenario("C-5")
@pytest.mark.scenario("W-2")
def test_everything_is_killed_and_goes_on_with_blank_engines(job: Job) -> None:
    """The policy of the restored trainer is served before anything is asked for; what was accepted
    before is used where it is young enough."""
    job.kill()
    engines: dict[str, ProcessId] = {n: job.process_of(n) for n in ("engine-0", "engine-1")}
    job.command("stop", str(job.folder.path))
    assert job.left(within_s=10) == []
    before = job.audit()
    steps, versions = len(before.history), [e.version for e in job.events(Kind.PUBLISH)]
    saved = max(e.step for e in job.events(Kind.CHECKPOINT))
    began = time.monotonic()
    last = steps + 3
    job.start(*KEYS, "--training.steps", str(last), "--recovery.auto_continue_train")
    assert job.end(timeout_s=150) == ExitCode.DONE, job.story()
    assert {n: job.process_of(n) for n in engines}.items().isdisjoint(engines.items())
    assert {e.step for e in since(job, Kind.RESTORE, began)} == {saved}
    published = [e for e in since(job, Kind.PUBLISH, began) if e.version is not None]
    assert min(e.version for e in published) > max(v for v in versions if v is not None)
    first = {k: min(e.mono_s for e in since(job, k, began)) for k in (Kind.PUBLISH, Kind.ACCEPT)}
    assert first[Kind.PUBLISH] < first[Kind.ACCEPT]
    rolled_out = [e.version for e in since(job, Kind.ACCEPT, began)]
    assert min(v for v in rolled_out if v is not None) >= published[0].version
    assert set(accepted(job).values()) == {1}
    found = job.audit()
    assert found.problems == [] and len(found.history) == last
    assert all("too old" in reason for reason in found.dropped)
    assert max(row["policy_age/max"] for row in job.metrics()) <= MAX_AGE
    assert {c.step: c.batch_id for c in before.history}.items() <= {
        c.step: c.batch_id for c in found.history
    }.items()
