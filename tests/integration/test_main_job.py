"""One run of the debug job with every part real; what it did and what it left, looked at from
all sides."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
from collections import Counter, defaultdict
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, patch

import httpx
import numpy as np
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from grafana_dashboard import metric_names, queries
from job_run import COMMAND, CONFIG, Job
from prometheus_client.parser import text_string_to_metric_families
from trace_events import check, load

from torchtitan_rl_ft.config.resolve import Resolved, resolve
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.journal.drop_kinds import KINDS, PREFIX
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.roles import rollout, serving
from torchtitan_rl_ft.rollout.dumps import load_dump
from torchtitan_rl_ft.rpc import server as rpc_server
from torchtitan_rl_ft.run_folder import TOKEN_ENV
from torchtitan_rl_ft.serving.service import ServingService
from torchtitan_rl_ft.trainer.train_dumps import load_train_dump

pytestmark = pytest.mark.timeout(180)

FAKES = Path(__file__).parents[1] / "fakes"
STEPS = 8
GROUPS_PER_STEP = 4  # as in rl_ft_debug.toml
SAMPLES_PER_PROMPT = 4
DUMPS = (
    *("--rollout.save_debug_rollout_data", "rollouts/{rollout_id}.safetensors"),
    *("--rollout.save_debug_train_data", "trained/{rollout_id}.safetensors"),
)
ENGINES = ("engine-0", "engine-1")
RELAY = "relay-0"
ROLES = ("lighthouse", "serving", "rollout", "trainer-0", "trainer-1")
METRICS = (
    "step",
    "loss",
    "grad_norm",
    "reward/mean",
    "reward/std",
    "policy_version",
    "policy_age/mean",
    "participants",
    "tokens",
    "time/step_s",
    "time/wait_batch_s",
    "logprob_diff/mean",
    "policy_age/max",
    "buffer/accepted_groups",
    "buffer/sealed_batches",
    "rollout/blocked_s",
    "groups/failures",
    "dropped_groups",
    *(PREFIX + kind for kind in KINDS),
)


@dataclass(frozen=True)
class Listener:
    process: str  # the role or engine whose tree it is in
    ip: str
    port: int


@dataclass(frozen=True)
class Live:
    """What could only be seen while the job ran."""

    token: str
    listeners: list[Listener]
    command_lines: list[str]
    urls: dict[str, str]
    statuses: dict[tuple[str, str, str], tuple[int, int]]
    """(role, method, path) -> status without a token, and with a wrong one."""
    second_job: subprocess.CompletedProcess[str]
    """Another `torchtitan run` on the same folder."""
    page: dict[str, httpx.Response]
    """What the status page answers, by path."""
    status: str
    """`torchtitan status`."""


@dataclass(frozen=True)
class Done:
    job: Job
    exit_code: int
    live: Live


@pytest.fixture(scope="session")
def routes(tmp_path_factory) -> dict[str, list[tuple[str, str]]]:
    """(method, path) of every route, from the applications that the roles build."""
    apps = asyncio.run(role_apps(tmp_path_factory.mktemp("apps")))
    return {name: routes_of(app) for name, app in apps.items()}


@pytest.fixture(scope="session")
def done(tmp_path_factory, routes) -> Iterator[Done]:
    path = tmp_path_factory.mktemp("main-job") / "run"
    with Job(path) as job:
        held = path.with_name("held")  # so that the job still runs when all has been looked at
        job.env["HELD_REWARDS"] = str(held)
        job.import_from(FAKES)
        job.start("--training.steps", str(STEPS), "--rl.reward", "held_reward:reward", *DUMPS)
        job.wait_step(2)
        held.touch()
        for engine in ENGINES:  # the first steps need only one of them
            job.wait_event(Kind.TRANSITION, subject=engine, new="serving")
        live = look(job, routes)
        assert job.process_of("trainer-0").alive(), "the job was over before all was seen"
        held.unlink()
        yield Done(job, job.end(), live)


def look(job: Job, routes: dict[str, list[tuple[str, str]]]) -> Live:
    (token_file,) = job.state.rglob("*.token")
    urls = {r.name: r.url for r in job.folder.roles() if r.url}
    page = {
        path: httpx.get(urls["supervisor"] + path, trust_env=False, timeout=30)
        for path in ("/", "/api/status", "/api/events?after=0", "/metrics", "/health")
    }
    told = job.command("status", str(job.folder.path)).stdout
    trees = {
        name: {root.pid, *(p.pid for p in process.descendants(root))}
        for name in (*ENGINES, RELAY, *ROLES)
        if (root := job.process_of(name))
    }
    # An engine or a relay is a descendant of serving too: the first name counts.
    owner = {pid: name for name, pids in reversed(trees.items()) for pid in pids}
    return Live(
        token=token_file.read_text(),
        listeners=[
            Listener(owner[c.pid], c.laddr.ip, c.laddr.port)
            for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.pid in owner
        ],
        command_lines=[" ".join(psutil.Process(pid).cmdline()) for pid in owner],
        urls=urls,
        statuses={
            (role, method, path): (
                httpx.request(method, urls[role] + path, trust_env=False).status_code,
                httpx.request(
                    method, urls[role] + path, headers=bearer("wrong"), trust_env=False
                ).status_code,
            )
            for role, role_routes in routes.items()
            for method, path in role_routes
        },
        second_job=subprocess.run(
            [*COMMAND, "run", CONFIG, "--job.dump_folder", str(job.folder.path)],
            env=job.env,
            capture_output=True,
            text=True,
        ),
        page=page,
        status=told,
    )


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


# The end ------------------------------------------------------------------------------------


def test_ends_with_code_0_and_a_summary(done):
    assert done.exit_code == ExitCode.DONE, done.job.story()
    text = done.job.out()
    assert "outcome    complete (exit code 0)" in text
    assert f"steps      {STEPS} of {STEPS}" in text
    assert "faults     none" in text
    assert done.job.error_lines() == []


def test_nothing_is_left_behind(done):
    assert len(done.job.footprint.processes) >= len(ENGINES) + len(ROLES) + 1
    assert done.job.left() == []
    assert done.job.folder.roles() == []
    assert not list(done.job.state.rglob("*.token"))
    for url in map(httpx.URL, done.live.urls.values()):
        with pytest.raises(httpx.ConnectError):
            httpx.get(url, trust_env=False)


def test_run_folder_is_complete(done):
    folder = done.job.folder
    for name in ("eval.json", "reward.png", "journal/journal.sqlite"):
        assert (folder.path / name).stat().st_size > 0, name
    resolved = Resolved.read(folder.path)
    assert resolved.get("training.steps") == STEPS
    assert "command line" in resolved.origins["training.steps"]
    for name in (*ROLES, *ENGINES, "supervisor"):
        assert folder.log_file(name, 1).exists(), name
        assert not folder.log_file(name, 2).exists(), name
    assert list((folder.path / "checkpoint").glob(f"step-{STEPS}-*/commit.json"))


def test_a_second_job_on_the_folder_was_refused(done):
    second = done.live.second_job
    assert second.returncode == ExitCode.CONFIG
    assert second.stderr.splitlines()[-1].startswith("torchtitan: error: another `torchtitan run`")
    assert str(done.job.folder.path) in second.stderr and second.stdout == ""


# What it did --------------------------------------------------------------------------------


def test_events_tell_a_run_without_faults(done):
    events = done.job.events()
    lines = done.job.folder.events.read_bytes().splitlines()
    assert len(events) == len(lines)  # none is torn
    assert {e.kind for e in events} >= {
        Kind.RUN,
        Kind.SPAWN,
        Kind.READY,
        Kind.EXIT,
        Kind.TRANSITION,
        Kind.SEAL,
        Kind.COMMIT,
        Kind.PUBLISH,
        Kind.FETCH,
        Kind.INSTALL,
        Kind.CHECKPOINT,
        Kind.EVAL,
    }
    assert not [e for e in events if e.kind in (Kind.FAULT, Kind.RESTART, Kind.REFUSE, Kind.HEAL)]
    assert [e.phase for e in events if e.kind is Kind.RUN] == ["start", "end"]


def test_metrics_have_a_line_per_step_with_every_key(done):
    rows = done.job.metrics()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        for key in METRICS:
            assert isinstance(row.get(key), int | float) and math.isfinite(row[key]), (key, row)
        assert row["participants"] == 2
        assert row["dropped_groups"] == 0
    for row in rows[1:]:  # of the initial policy nobody has trained
        assert 0 < row["weights/push_s"] < 30 and 0 <= row["weights/pull_s"] < 30


@pytest.mark.row("K3")
def test_groups_that_were_admitted_are_trained_or_dropped(done):
    rows, counts = done.job.metrics(), done.job.audit().counts
    assert sum(row["groups"] + row["dropped_groups"] for row in rows) == sum(counts.values())


def test_the_trace_shows_what_each_sample_went_through(done, tmp_path):
    file = tmp_path / "trace.json.gz"
    command = [*COMMAND, "report", str(done.job.folder.path), "--trace", str(file)]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == ExitCode.DONE, told.stderr
    samples = STEPS * GROUPS_PER_STEP * SAMPLES_PER_PROMPT
    assert f"{STEPS} steps, {samples} samples" in told.stdout
    assert check(file)["f"] == STEPS * GROUPS_PER_STEP  # arrows group -> batch -> step
    spans: dict[str, dict[str, float]] = defaultdict(dict)
    for e in load(file)["traceEvents"]:
        if e["ph"] in "be":
            spans[e["id"]][e["ph"] + e["name"]] = e["ts"]
    assert len(spans) == samples
    for found in spans.values():
        names = {n[1:] for n in found}
        assert names - set(ENGINES) - {"prefill", "decode", "generate"} == {
            *("sample", "reward", "buffer", "sealed", "train")
        }
        (engine,) = names & set(ENGINES)
        assert found["bsample"] <= found[f"b{engine}"] <= found[f"e{engine}"] <= found["breward"]
        assert found["ereward"] <= found["bbuffer"] <= found["btrain"] <= found["esample"]
    tracks = {
        e["args"]["name"] for e in load(file)["traceEvents"] if e.get("name") == "process_name"
    }
    assert tracks >= {"job", "faults", "samples", *ROLES, *ENGINES}


@pytest.mark.scenario("O-2")
def test_logs_have_no_line_for_each_request(done):
    for name in ROLES:
        log = done.job.folder.log_file(name, 1).read_text()
        assert "HTTP Request" not in log and '"POST /' not in log, name


def test_history_is_every_step_once(done):
    found = done.job.audit()
    assert found.problems == []
    assert [c.step for c in found.history] == list(range(1, STEPS + 1))
    assert [c.batch_id for c in found.history] == list(range(1, STEPS + 1))
    assert found.superseded == 0 and not any(c.adopted for c in found.history)


def test_every_sample_is_trained_once(done):
    found = done.job.audit()
    assert {k: n for k, n in found.counts.items() if n} == {"trained": STEPS * GROUPS_PER_STEP}
    assert [c.samples for c in found.history] == [GROUPS_PER_STEP * SAMPLES_PER_PROMPT] * STEPS
    assert [c.tokens for c in found.history] == [row["tokens"] for row in done.job.metrics()]


@pytest.mark.row("G11")
def test_the_report_proves_the_run_and_shows_both_groups_shares(done):
    run = str(done.job.folder.path)
    told = {}
    for how in ((), ("--ledger",)):
        found = subprocess.run([*COMMAND, "report", run, *how], capture_output=True, text=True)
        assert found.returncode == ExitCode.DONE, found.stderr
        told[how] = found.stdout
    assert f"steps      {STEPS} of {STEPS}" in told[()]
    samples = STEPS * GROUPS_PER_STEP * SAMPLES_PER_PROMPT
    for group in ("trainer-0", "trainer-1"):
        (line,) = [x for x in told[("--ledger",)].splitlines() if f"{group}: " in x]
        assert f" of {samples} samples (" in line and f"{STEPS} steps" in line
    assert "accounts   hold" in told[("--ledger",)]


@pytest.mark.row("K2")
def test_the_status_page_showed_the_job_while_it_ran(done):
    page = done.live.page
    assert {path: answer.status_code for path, answer in page.items()} == dict.fromkeys(page, 200)
    assert f"status page: {done.live.urls['supervisor']}/" in done.job.out()
    assert page["/health"].json()["ok"]
    found = page["/api/status"].json()
    roles = {r["name"]: r for r in found["roles"]}
    assert set(roles) == {"supervisor", RELAY, *ROLES}
    # Roles end once the last step is done, which may have come in between.
    going_on = [r for r in roles.values() if r["state"] == "up"]
    assert len(going_on) == len(roles) or found["step"] == STEPS
    for role in going_on:
        if role["name"] in (RELAY, *ROLES):
            assert role["pid"] == done.job.process_of(role["name"]).pid
    assert [e["name"] for e in found["engines"]] == list(ENGINES)
    assert 2 <= found["step"] <= STEPS == found["total_steps"] and found["faults"] == 0
    assert found["quorum"]["participants"] == len(found["quorum"]["members"]) == 2
    assert found["versions"]["published"] >= found["step"]
    assert [step for step, _ in found["curves"]["reward"]][:2] == [1, 2]
    assert found["measured"]["outages"] == [] and found["unreadable_lines"] == 0
    kinds = {e["kind"] for e in page["/api/events?after=0"].json()["events"]}
    assert kinds >= {"run", "spawn", "ready", "commit", "publish"}


@pytest.mark.row("K3")
def test_metrics_were_there_for_every_picture_of_the_dashboard(done):
    families = text_string_to_metric_families(done.live.page["/metrics"].text)
    samples = {s.name: s.value for family in families for s in family.samples}
    assert samples["rl_ft_engines_expected"] == 2 and samples["rl_ft_healthy"] == 1
    assert samples["rl_ft_commits_total"] == samples["rl_ft_step"] >= 2
    asked = {name for query in queries() for name in metric_names(query)}
    # Nothing was dropped; the look that ETTR and outages are of may have been before the commit.
    late = ("rl_ft_ettr", "rl_ft_lost", "rl_ft_outage", "rl_ft_groups_dropped")
    assert {name for name in asked if name not in samples and not name.startswith(late)} == set()


def test_status_told_of_the_run(done):
    lines = done.live.status.splitlines()
    told = {line[:11].strip(): line[11:] for line in lines}
    assert told["run"].startswith("training, step ")
    assert "groups 2/2" in told["run"] or f"step {STEPS} of" in told["run"]
    assert told["quorum"].startswith("1 at step ") and "no restarts" in told["faults"]
    assert any(done.live.urls["supervisor"] in x for x in lines if x.startswith("role"))


def test_engine_and_trainer_agree_on_log_probs(done):
    """On policy: age 0, and the engine's log-probs are those that the trainer computes."""
    for row in done.job.metrics():
        assert row["policy_age/mean"] == 0 and row["policy_age/max"] == 0
        assert 0 <= row["logprob_diff/mean"] < 1e-3
        assert row["ratio/clipped"] == 0


@pytest.mark.row("D8")
def test_samples_carry_the_version_that_made_them(done):
    with Journal.open(done.job.folder.journal, events=EventList()) as journal:
        for row in done.job.metrics():
            assert row["min_version"] == row["max_version"] == row["policy_version"]
            if row["step"] <= journal.freed_through:
                continue
            batch = journal.batch(row["batch"])
            sampled = batch.arrays["loss_mask"].astype(bool)
            assert set(batch.arrays["versions"][sampled].tolist()) == {row["policy_version"]}
            assert set(batch.arrays["versions"][~sampled].tolist()) <= {-1}
        assert journal.freed_through < STEPS


@pytest.mark.row("D1")
def test_engines_prove_every_version_before_they_serve_it(done):
    published = [e.version for e in done.job.events(Kind.PUBLISH) if e.role == "serving"]
    assert published == list(range(1, STEPS + 2))  # the initial weights too
    held: dict[str, list[int]] = defaultdict(list)
    for event in done.job.events():
        engine = event.data.get("subject")
        if event.kind is Kind.INSTALL:
            assert event.data["proof"] == "exact"
            held[engine].append(event.version)
        elif event.kind is Kind.TRANSITION and event.data["new"] == "serving":
            assert held[engine] and held[engine][-1] == event.version
    assert set(held) == set(ENGINES)
    assert set().union(*held.values()) == set(published)
    for versions in held.values():
        assert versions == sorted(set(versions))


@pytest.mark.row("J3")
def test_dumps_are_bitwise_what_was_live(done):
    seals = {e.step: e.data["digest"] for e in done.job.events(Kind.SEAL)}
    with Journal.open(done.job.folder.journal, events=EventList()) as journal:
        freed = journal.freed_through
        live = {
            s: journal.batch_bytes(journal.plan[s].batch_id) for s in range(freed + 1, STEPS + 1)
        }
    assert live
    for step in range(1, STEPS + 1):
        dump = load_dump(done.job.folder.path / "rollouts" / f"{step}.safetensors")
        assert dump.digest == seals[step]
        assert live.get(step, dump.batch.to_bytes()) == dump.batch.to_bytes()


@pytest.mark.row("J3")
def test_every_train_record_has_its_rollout_twin(done):
    """Two groups and two engines took part; the policy of the trainer is the engines'."""
    for step in range(1, STEPS + 1):
        twin = load_dump(done.job.folder.path / "rollouts" / f"{step}.safetensors")
        record = load_train_dump(done.job.folder.path / "trained" / f"{step}.safetensors")
        assert record.batch_digest == twin.digest
        assert record.arrays["index"].tolist() == [s.index for s in twin.samples()]
        trained = twin.batch.arrays["loss_mask"] > 0
        gap = record.arrays["policy_logprobs"] - twin.batch.arrays["logprobs"]
        assert np.abs(gap[trained]).max() < 1e-3
        assert np.abs(record.arrays["ratio"][trained] - 1).max() < 1e-3


# Who may ask --------------------------------------------------------------------------------


@pytest.mark.scenario("S-2")
def test_token_is_in_no_output(done):
    token = done.live.token.encode()
    assert len(token) >= 24
    files = [f for f in done.job.folder.path.rglob("*") if f.is_file()]
    assert len(files) > 20
    assert [f for f in files if token in f.read_bytes()] == []
    assert done.live.token not in done.job.out() + done.job.err()
    assert not [line for line in done.live.command_lines if done.live.token in line]
    assert not [p for p, answer in done.live.page.items() if done.live.token in answer.text]
    assert done.live.token not in done.live.status


@pytest.mark.scenario("S-2")
def test_every_route_of_the_living_roles_needs_the_token(done):
    assert done.live.statuses
    assert {k: s for k, s in done.live.statuses.items() if s != (401, 401)} == {}


@pytest.mark.scenario("S-2")
def test_listeners_are_on_loopback(done):
    """But for what binds all interfaces by itself (README, known limits): torchft's manager, and
    the store that torch.distributed opens in each trainer and each engine."""
    listeners = done.live.listeners
    for name in ("serving", "rollout"):
        # One listener each, the registered one: no second server without our middleware.
        assert [listener.port for listener in listeners if listener.process == name] == [
            httpx.URL(done.live.urls[name]).port
        ]
    assert {listener.process for listener in listeners} >= {*ENGINES, RELAY, *ROLES}
    open_to_all = Counter(x.process for x in listeners if x.ip not in ("127.0.0.1", "::1"))
    assert open_to_all == {"trainer-0": 2, "trainer-1": 2, "engine-0": 1, "engine-1": 1}


@pytest.mark.scenario("S-2")
async def test_every_route_that_a_role_builds_needs_the_token(tmp_path):
    found = 0
    for app in (await role_apps(tmp_path)).values():
        async with TestClient(TestServer(app)) as client:
            for method, path in routes_of(app):
                for headers in ({}, bearer("wrong"), {"Authorization": "Basic dDp0"}):
                    async with client.request(method, path, headers=headers) as answer:
                        assert answer.status == 401, (method, path)
                found += 1
    assert found >= 17


async def role_apps(folder: Path) -> dict[str, web.Application]:
    """The applications of the roles that serve HTTP, as they are about to serve them."""
    resolved = resolve(["--job.config_file", CONFIG, "--job.dump_folder", str(folder / "run")])
    run = resolved.run_folder
    make_tiny_model(run.model, 0)
    events = EventList()
    launcher = serving.SGLangLauncher(resolved.sections.rollout, run.model, run, on_cpu=True)
    serve = serving._serve(resolved, launcher, events)
    roll_out = rollout._run(resolved, run, events)
    with (
        patch.dict(os.environ, {TOKEN_ENV: "token", "XDG_STATE_HOME": str(folder / "state")}),
        patch.object(serving, "guard", AsyncMock()),  # no warden
        patch.object(rpc_server, "start", caught),
        patch.object(rollout, "start", caught),
        patch.object(ServingService, "open", AsyncMock()),  # no engines
    ):
        return {"serving": await app_of(serve), "rollout": await app_of(roll_out)}


class Caught(Exception):
    """Where a role would begin to serve."""

    def __init__(self, app: web.Application) -> None:
        super().__init__()
        self.app = app


async def caught(app: web.Application, **_: Any) -> None:
    raise Caught(app)


async def app_of(role: Coroutine[Any, Any, int]) -> web.Application:
    with pytest.raises(Caught) as at_start:
        await role
    return at_start.value.app


def routes_of(app: web.Application) -> list[tuple[str, str]]:
    return [
        (route.method, route.resource.canonical.replace("{batch_id}", "1"))
        for route in app.router.routes()
    ]
