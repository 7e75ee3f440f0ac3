"""Weights over holders in a whole job: real engines, real trainers, and whatever dies or freezes
while a policy is on its way. All is done to one job, since most of a job's time is its start.

What is to happen in the middle of a transfer is done by stopping a process first and looking then
whether it was in the middle of one: nothing here is a matter of luck or of time.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from job_run import Job
from phase_strike import EventTail

from torchtitan_rl_ft.chaos import faults
from torchtitan_rl_ft.chaos.targets import source
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import Event, Kind
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.trainer.source import sources_run_id
from torchtitan_rl_ft.weights.holder.files import noted_pieces
from torchtitan_rl_ft.weights.holder.settings import run_memory
from torchtitan_rl_ft.weights.holder.versions import read_image
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE

pytest.importorskip("nixl_cu13", reason="weights over UCX need the extra ucx")
pytestmark = pytest.mark.timeout(400)

LIMIT_S = 90.0
START_LIMIT_S = 240.0
RELAYS = ("relay-0", "relay-1", "relay-2")
TRAINERS = ("trainer-0", "trainer-1")
ENGINES = ("engine-0", "engine-1")
SOURCES = tuple(f"{name}.0" for name in TRAINERS)
TENSOR = "model.layers.1.mlp.up_proj.weight"
MEMORY = WeightsSection().memory_folder
STALL_S = WeightsSection().stall_timeout_s
KEYS = (
    *("--training.steps", "100000", "--checkpoint.interval", "5"),
    *("--recovery.role_max_restarts", "10", "--weights.holders", str(len(RELAYS))),
    *("--rollout.weight_transport", "nixl"),
)


class HeldJob(Job):
    """A job, and what serving tells of its holders."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._http = httpx.Client(timeout=20, trust_env=False)  # one that is asked often

    def __exit__(self, *error: object) -> None:
        self._http.close()
        super().__exit__(*error)

    def ask(self, path: str) -> dict[str, Any]:
        assert self.session is not None, self.story()
        answer = self._http.get(
            f"{self.session_record().serving.url}{path}",
            headers={"Authorization": f"Bearer {self.session.token()}"},
        )
        answer.raise_for_status()
        return answer.json()

    def leases(self) -> dict[str, str]:
        """Who is given weights now, and by whom."""
        holders = self.ask("/v1/holders")["holders"]
        return {h["gives_to"]: h["name"] for h in holders if h["gives_to"] is not None}

    def newest_wanted(self) -> int:
        return self.ask("/v1/holders")["wanted"][-1]["step"]

    def held_by(self, name: str) -> set[int]:
        found = self.ask("/v1/holders")["holders"]
        return {v["step"] for h in found if h["name"] == name for v in h["held"]}

    def find_source(self, name: str) -> ProcessId | None:
        """The living source of a rank, `trainer-1.0`."""
        return source(process.descendants(self.process_of(name.partition(".")[0])), name)

    def source(self, name: str) -> ProcessId:
        self.wait_for(lambda: self.find_source(name), f"a source of {name}")
        found = self.find_source(name)
        assert found is not None
        return found

    def source_folder(self, name: str, step: int) -> Path | None:
        """Where a source keeps a version, once it has hashed all of it."""
        memory = run_memory(MEMORY, sources_run_id(self.folder)) / name
        for folder in memory.glob(f"step-{step}-*"):
            if noted_pieces(folder):
                return folder
        return None

    def whole(self) -> None:
        """Wait until both groups train, both engines serve and all relays hold a version."""

        def is_whole() -> bool:
            rows = self.metrics()
            status = self.ask("/v1/status")
            return (
                bool(rows)
                and rows[-1]["participants"] == len(TRAINERS)
                and [e["state"] for e in status["engines"]].count("serving") == len(ENGINES)
                and all(r["holds"] for r in status["relays"])
            )

        def steady() -> bool:
            try:
                return is_whole()
            except httpx.HTTPError:  # serving is being started
                return False

        self.wait_for(steady, "a whole job", LIMIT_S)

    def go_on(self, steps: int = 2) -> None:
        self.wait_step(self.step() + steps, LIMIT_S)

    def since(self, mono_s: float, kind: Kind, **data: Any) -> list[Event]:
        return [e for e in self.events(kind, **data) if e.mono_s > mono_s]

    def published(self, since_mono_s: float = 0.0) -> list[Event]:
        """Versions that serving gave; rollout tells of the initial one, and what it takes, too."""
        return [e for e in self.since(since_mono_s, Kind.PUBLISH) if e.role == "serving"]

    def lives(self) -> dict[str, ProcessId]:
        names = ("lighthouse", "serving", "rollout", *TRAINERS, *ENGINES, *RELAYS)
        return {name: self.process_of(name) for name in names}

    def changed(self, before: dict[str, ProcessId]) -> set[str]:
        return {name for name, life in self.lives().items() if life != before[name]}

    def wait_fetched(self, step: int, names: tuple[str, ...] = RELAYS) -> dict[str, Event]:
        """The events of relays that hold a step's policy."""

        def found() -> dict[str, Event]:
            fetches = [e for e in self.events(Kind.FETCH) if e.step == step]
            return {str(e.data["subject"]): e for e in fetches}

        self.wait_for(lambda: set(names) <= set(found()), f"{names} to hold {step}", LIMIT_S)
        return found()

    def check(self) -> None:
        """The history is right, and no engine ever went back to an older policy."""
        audit = self.audit()
        assert audit.problems == [] and not audit.dropped
        assert [c.step for c in audit.history] == list(range(1, len(audit.history) + 1))
        for name in ENGINES:
            versions = [e.version for e in self.events(Kind.INSTALL, subject=name)]
            assert versions == sorted(versions)


@pytest.fixture(scope="module")
def held(tmp_path_factory) -> Iterator[HeldJob]:
    with HeldJob(tmp_path_factory.mktemp("holders") / "run") as job:
        job.start(*KEYS)
        job.wait_step(8, START_LIMIT_S)
        yield job


@pytest.fixture
def job(held: HeldJob) -> HeldJob:
    held.whole()
    return held


@contextlib.contextmanager
def frozen(*victims: ProcessId) -> Iterator[None]:
    stopped = [p for victim in victims for p in faults.stop(victim, whole_tree=False)]
    try:
        yield
    finally:
        faults.resume(stopped)


def stopped_giver(job: HeldJob, sources: dict[str, ProcessId]) -> str:
    """A source that was stopped while it gave a relay its part: its name."""
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        given = {g: r for r, g in job.leases().items() if g in SOURCES}
        if not given:
            time.sleep(0.002)
            continue
        giver = next(iter(given))
        stopped = faults.stop(sources[giver], whole_tree=False)
        time.sleep(0.3)  # what was over already has been told by now
        if job.leases().get(given[giver]) == giver:
            return giver
        faults.resume(stopped)
    raise AssertionError(f"no source was caught in a push in {LIMIT_S} s\n{job.story()}")


@contextlib.contextmanager
def relays_stopped(job: HeldJob) -> Iterator[int]:
    """All relays are stopped, and the sources of both groups hold a version that no relay has:
    its step."""
    for _ in range(10):
        relays = [job.process_of(name) for name in RELAYS]
        wait_phase(job, "forward_backward")  # they have what there is by then
        with frozen(*relays):
            before, end = job.newest_wanted(), time.monotonic() + 8.0
            while time.monotonic() < end:  # before serving takes them for dead
                step = job.newest_wanted()
                if step > before and all(step in job.held_by(name) for name in SOURCES):
                    yield step
                    return
                time.sleep(0.02)
        job.go_on(1)
    raise AssertionError(f"the groups never offered the same version\n{job.story()}")


def wait_phase(job: HeldJob, phase: str) -> int:
    """Until a trainer enters it; returns the step that it is at."""
    end = time.monotonic() + LIMIT_S
    with EventTail(job.folder.events) as tail:
        while not (seen := [e for e in tail.read() if e.get("phase") == phase]):
            assert time.monotonic() < end, job.story()
            time.sleep(0.0005)
    return seen[-1]["step"]


@pytest.mark.row("D10")
@pytest.mark.row("M4")
def test_a_relay_killed_in_a_fetch_costs_the_others_nothing(job: HeldJob) -> None:
    before = job.lives()
    with relays_in_a_fetch(job) as (victim, step):
        killed_s = time.monotonic()
        faults.kill(before[victim], whole_tree=False)
    others = tuple(name for name in RELAYS if name != victim)
    late_s = max(e.mono_s for e in job.wait_fetched(step, others).values()) - killed_s
    print(
        f"{victim} was killed in the fetch of step {step}: the others held it after {late_s:.2f} s"
    )
    assert 0 < late_s < STALL_S - 1.0, "nobody waited for a timeout"
    job.wait_for(lambda: job.process_of(victim) != before[victim], f"another {victim}")
    again_s = job.events(Kind.SPAWN, subject=victim)[-1].mono_s
    job.wait_for(lambda: job.since(again_s, Kind.FETCH, subject=victim), "the new one to hold one")
    job.go_on()
    assert job.changed(before) == {victim}
    job.check()


@contextlib.contextmanager
def relays_in_a_fetch(job: HeldJob) -> Iterator[tuple[str, int]]:
    """All relays are stopped, none has the newest version, and the one that is named is given it
    by a source now. The version's step."""
    relays = [job.process_of(name) for name in RELAYS]
    end = time.monotonic() + LIMIT_S
    while time.monotonic() < end:
        given = {r: g for r, g in job.leases().items() if g in SOURCES}
        if not given:
            time.sleep(0.002)
            continue
        with frozen(*relays):
            time.sleep(0.3)  # what was over already has been told by now
            found, now = job.ask("/v1/holders"), job.leases()
            still = [r for r, g in given.items() if now.get(r) == g]
            if still and not found["wanted"][-1]["relays"]:
                yield still[0], found["wanted"][-1]["step"]
                return
    raise AssertionError(f"no relay was caught in a fetch in {LIMIT_S} s\n{job.story()}")


@pytest.mark.row("D10")
def test_a_flipped_byte_names_its_tensor_and_the_engines_keep_what_they_have(job: HeldJob) -> None:
    before, began_s = job.lives(), time.monotonic()
    with relays_stopped(job) as step:
        version = job.ask("/v1/status")["version"]
        for name in ENGINES:
            job.wait_for(lambda n=name: installed(job, n) == version, f"{name} at {version}")
        for name in SOURCES:
            flip(job, name, step)
    for name in SOURCES:
        job.wait_for(lambda n=name: job.since(began_s, Kind.WARN, subject=n), f"refusal of {name}")
        cause = job.since(began_s, Kind.WARN, subject=name)[0].cause
        assert "differ from their digest; they are of tensor" in cause and TENSOR in cause
    assert job.ask("/v1/status")["version"] == version
    for engine in job.ask("/v1/status")["engines"]:
        assert (engine["state"], engine["version"]) == ("serving", version)
    assert job.generate_status() == 200
    assert not [e for e in job.events(Kind.FETCH) if e.step == step]
    for name in SOURCES:
        flip(job, name, step)  # back
    job.wait_fetched(step)
    job.go_on()
    assert job.changed(before) == set()
    job.check()


def installed(job: HeldJob, engine: str) -> int:
    return job.events(Kind.INSTALL, subject=engine)[-1].version


def flip(job: HeldJob, name: str, step: int) -> None:
    """A bit of what a source holds, after it was hashed."""
    folder = job.source_folder(name, step)
    assert folder is not None
    path = folder / WEIGHTS_FILE
    with open(path, "r+b") as f:
        f.seek(read_image(path).tensors[TENSOR].start + 17)
        byte = f.read(1)[0]
        f.seek(-1, 1)
        f.write(bytes([byte ^ 1]))


def test_when_the_source_of_one_group_is_dead_the_other_groups_is_used(job: HeldJob) -> None:
    before = job.lives()
    dead = job.source("trainer-0.0")
    with relays_stopped(job) as step:
        dead = job.source("trainer-0.0")
        faults.kill(dead, whole_tree=False)
    fetched = job.wait_fetched(step)
    for event in fetched.values():
        assert set(event.data["bytes_from"]) <= {"trainer-1.0", *RELAYS}, event
    assert any("trainer-1.0" in e.data["bytes_from"] for e in fetched.values())
    job.go_on()
    assert job.source("trainer-0.0") != dead
    assert job.changed(before) == set()
    job.check()


def test_a_source_frozen_in_a_push_is_left_and_its_rank_gets_another(job: HeldJob) -> None:
    before = job.lives()
    sources = {name: job.source(name) for name in SOURCES}

    victim = stopped_giver(job, sources)
    step, frozen_s = job.newest_wanted(), time.monotonic()
    fetched = job.wait_fetched(step)
    late_s = max(e.mono_s for e in fetched.values()) - frozen_s
    print(f"{victim} froze in a push: all relays held the version {late_s:.2f} s later")
    assert late_s < 2 * STALL_S + 2.0
    job.go_on(3)
    job.wait_for(lambda: job.source(victim) != sources[victim], f"another source of {victim}")
    assert not sources[victim].alive()
    assert job.changed(before) == set()
    job.check()


def test_the_command_hits_holders(job: HeldJob) -> None:
    before, old = job.lives(), job.source("trainer-1.0")
    done = job.command("chaos", str(job.folder.path), "kill source of trainer-1", "kill relay-2")
    assert done.returncode == 0, done.stderr
    assert f"source of trainer-1 (pid {old.pid})" in done.stdout
    job.wait_for(lambda: job.process_of("relay-2") != before["relay-2"], "another relay")
    job.whole()
    job.go_on()
    assert job.source("trainer-1.0") != old
    assert job.changed(before) == {"relay-2"}
    job.check()


@pytest.mark.row("D1")
@pytest.mark.row("D4")
@pytest.mark.row("M4")
def test_an_engine_killed_while_it_takes_a_version_holds_nobody_up_and_the_next_one_has_it_at_once(
    job: HeldJob,
) -> None:
    """What it costs the other engine's rounds is measured where no trainer takes the cores:
    test_replaced_engine.py."""
    before = job.lives()
    quorum = job.events(Kind.QUORUM)[-1].data["quorum_id"]
    version = stopped_while_it_installs(job, "engine-1")
    killed_s = time.monotonic()
    faults.kill(before["engine-1"])
    job.wait_for(lambda: installed(job, "engine-0") >= version, "the update to end")
    over = next(e for e in job.events(Kind.INSTALL, subject="engine-0") if e.version >= version)
    retired = {"subject": "engine-1", "new": "retired"}
    job.wait_for(lambda: job.since(killed_s, Kind.TRANSITION, **retired), "it to be retired")

    installs = {"kind": Kind.INSTALL, "subject": "engine-1"}
    job.wait_for(lambda: job.since(killed_s, **installs), "the next one", START_LIMIT_S)
    (ready,) = job.since(killed_s, Kind.READY, subject="engine-1")
    assert over.mono_s < ready.mono_s, "nobody waited for the next engine"
    install = job.since(killed_s, **installs)[0]
    assert install.data["transport"] == "nixl"
    assert install.version >= max(e.version for e in job.published() if e.mono_s < ready.mono_s)
    # Outside any update round: as soon as it is up, from its relay, which has it.
    installing = {"subject": "engine-1", "new": "installing"}
    began = job.since(ready.mono_s - 0.5, Kind.TRANSITION, **installing)[0]
    rounds = [e for e in job.published() if ready.mono_s < e.mono_s < began.mono_s]
    assert len(rounds) < 2, "it waited for no round"
    assert job.wait_fetched(install.step)["relay-1"].mono_s <= install.mono_s
    took_s = install.mono_s - ready.mono_s
    print(f"engine-1 held version {install.version} {took_s:.2f} s after it was up")

    job.go_on()
    assert job.changed(before) == {"engine-1"}
    ids = {e.data["quorum_id"] for e in job.since(killed_s, Kind.QUORUM)}
    assert ids == {quorum}, "no group was built anew"
    assert not job.since(killed_s, Kind.FAULT, subject="serving")
    job.check()


def stopped_while_it_installs(job: HeldJob, engine: str) -> int:
    """The version that it was taking when it was stopped."""
    end = time.monotonic() + LIMIT_S
    victim = job.process_of(engine)
    while time.monotonic() < end:
        with EventTail(job.folder.events) as tail:
            while not (seen := [e for e in tail.read() if takes(e, engine)]):
                assert time.monotonic() < end, job.story()
                time.sleep(0.0005)
        stopped = faults.stop(victim)
        time.sleep(0.2)
        version = max(e.version for e in job.published())
        last = job.events(Kind.TRANSITION, subject=engine)[-1]
        if last.data["new"] == "installing" and last.mono_s == seen[-1]["mono_s"]:
            return version
        faults.resume(stopped)
    raise AssertionError(f"{engine} was never stopped in an install\n{job.story()}")


def takes(event: dict[str, Any], engine: str) -> bool:
    data = event.get("data", {})
    return (
        event["kind"] == Kind.TRANSITION
        and data.get("subject") == engine
        and data.get("new") == "installing"
    )


@pytest.mark.row("D2")
@pytest.mark.row("D5")
def test_a_killed_serving_goes_on_with_what_its_relays_had_in_memory(job: HeldJob) -> None:
    before, killed_s = job.lives(), time.monotonic()
    version = max(e.version for e in job.published())
    faults.kill(before["serving"], whole_tree=False)
    job.wait_for(lambda: job.process_of("serving") != before["serving"], "another serving")
    job.wait_for(lambda: job.changed(before) == {"serving", *RELAYS}, "its relays")
    job.whole()
    job.go_on()
    assert not any(before[name].alive() for name in RELAYS)
    assert job.changed(before) == {"serving", *RELAYS}, "engines were adopted"
    assert all(e.version >= version for e in job.published(killed_s))
    assert not [e for e in job.since(killed_s, Kind.FAULT) if "lost" in (e.cause or "")]
    job.check()


def test_a_version_that_no_holder_has_any_more_is_offered_by_the_group_that_lives(
    job: HeldJob,
) -> None:
    """Serving is stopped from before the commit on: the group with the duty has offered, and cannot
    announce. It is killed, and the other group's source: what that group trains with is left."""
    attempts = {name: job.attempts(name) for name in TRAINERS}
    found = None
    for _ in range(10):
        if (found := killed_before_it_announces(job)) is not None:
            break
        job.whole()
    assert found is not None, job.story()
    victim, step, killed_s = found
    (survivor,) = set(TRAINERS) - {victim}
    job.wait_for(
        lambda: [e for e in job.published(killed_s) if e.step == step],
        f"step {step} to be published",
        LIMIT_S,
    )
    for event in job.wait_fetched(step).values():
        assert set(event.data["bytes_from"]) <= {f"{survivor}.0", *RELAYS}
    job.wait_for(lambda: job.attempts(victim) > attempts[victim], f"{victim} to be started again")
    assert job.attempts(survivor) == attempts[survivor]
    job.check()


def killed_before_it_announces(job: HeldJob) -> tuple[str, int, float] | None:
    """The group, the step and when; None when serving was stopped too late."""
    serving = job.process_of("serving")
    trainers = {name: job.process_of(name) for name in TRAINERS}
    sources = {name: job.source(f"{name}.0") for name in TRAINERS}
    step = wait_phase(job, "forward_backward")
    with frozen(serving):
        frozen_s = time.monotonic()
        while time.monotonic() < frozen_s + 4.0:  # before the supervisor takes it for dead
            last = {e.name: e for e in job.since(frozen_s, Kind.PHASE)}
            # A phase belongs to the step after the last commit.
            at = {last[n].phase: n for n in TRAINERS if n in last and last[n].step == step + 1}
            victim = at.get("publish")
            offered = victim is not None and job.source_folder(f"{victim}.0", step) is not None
            if victim is not None and offered and "waiting_for_batch" in at:
                faults.kill(trainers[victim])
                for found in sources.values():
                    faults.kill(found)
                return victim, step, time.monotonic()
            time.sleep(0.02)
    return None


@pytest.mark.row("D5")
def test_a_job_that_was_killed_goes_on_over_holders_and_leaves_nothing_in_memory(
    held: HeldJob,
) -> None:
    """One of its groups may be starting."""
    job = held
    sources = [found for name in SOURCES if (found := job.find_source(name)) is not None]
    assert sources
    relays = {name: job.process_of(name) for name in RELAYS}
    job.kill()
    job.wait_for_session_alone(within_s=20)
    assert not any(found.alive() for found in sources)
    assert all(found.alive() for found in relays.values()), "they are the session's"
    assert job.session is not None
    relay_memory = job.session.memory()
    assert relay_memory is not None and (relay_memory / "relay-0").is_dir()
    last = len(job.audit().history) + 3
    resumed_s = time.monotonic()
    steps = ("--training.steps", str(last), "--recovery.auto_continue_train")
    job.start(*KEYS[2:], *steps)
    assert job.end(timeout_s=120) == ExitCode.DONE, job.story()
    assert {e.data["transport"] for e in job.published(resumed_s)} == {"nixl"}
    assert {name: job.process_of(name) for name in RELAYS} == relays
    used = [e.data["bytes_from"] for e in job.since(resumed_s, Kind.FETCH)]
    assert {name for each in used for name in each} & set(SOURCES)
    assert job.left() == []
    assert not run_memory(MEMORY, sources_run_id(job.folder)).exists()
    assert not relay_memory.exists()
    versions = [e.version for e in job.published()]
    assert versions == sorted(versions)
