"""The status page over HTTP: who is answered, with what, and what an error of it costs."""

from __future__ import annotations

import asyncio
import json
import re
import socket

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from config_jobs import GOOD, job
from prometheus_client.parser import text_string_to_metric_families

from torchtitan_rl_ft.observability.events import EventList, EventLog, Kind
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.roles import status_page
from torchtitan_rl_ft.roles.following import follower_of
from torchtitan_rl_ft.roles.status_page import is_loopback, page, page_of, served
from torchtitan_rl_ft.rpc import limited_runner

ROUTES = ("/", "/api/status", "/api/events", "/metrics", "/health")
NASTY = "<img src=x onerror=\"document.title='owned'\"></script><b>&amp;"


@pytest.fixture
def resolved(tmp_path):
    made = job(tmp_path, GOOD, "--job.dump_folder", str(tmp_path / "run"))
    made.run_folder.path.mkdir()
    return made


@pytest.fixture
def log(resolved):
    made = EventLog(resolved.run_folder.events, run="r", role="supervisor", name="supervisor")
    made.emit(Kind.RUN, phase="start")
    yield made
    made.close()


@pytest.fixture
async def client(resolved, log, told):
    async with TestClient(TestServer(page_of(resolved, follower_of(resolved), told).app())) as made:
        yield made


@pytest.fixture
def told():
    return EventList()


async def test_every_route_answers(client):
    for route in ROUTES:
        async with client.get(route) as answer:
            assert answer.status == 200, route
            assert answer.headers["Cache-Control"] == "no-store"
            assert answer.headers["X-Frame-Options"] == "DENY"
            assert "Access-Control-Allow-Origin" not in answer.headers


@pytest.mark.scenario("S-2")
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:81", True),
        ("localhost", True),
        ("LOCALHOST:9000", True),
        ("[::1]:81", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example:81", False),
        ("localhost@evil.example", False),
        ("10.0.0.7:81", False),
        ("[::1", False),
        ("", False),
    ],
)
async def test_a_name_that_somebody_has_bound_to_loopback_is_refused(client, host, allowed):
    assert is_loopback(host) is allowed
    for route in ROUTES:
        async with client.get(route, headers={"Host": host}) as answer:
            assert answer.status == (200 if allowed else 403)
            assert allowed or len(await answer.read()) < 100


@pytest.mark.row("K2")
@pytest.mark.scenario("S-2")
async def test_it_can_only_be_looked_at(client):
    """Nor is anything of another role behind it: torchft's page can kill."""
    for route in (*ROUTES, "/replica/trainer-0/kill", "/status", "/v1/status"):
        for method in ("POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"):
            async with client.request(method, route) as answer:
                assert answer.status in (404, 405), (method, route)
    for path in ("/replica/trainer-0/kill", "/status", "/events.jsonl", "/../config.resolved.json"):
        async with client.get(path) as answer:
            assert answer.status == 404


@pytest.mark.scenario("S-2")
async def test_it_tells_neither_the_token_nor_what_is_in_files(client, resolved, log):
    token = resolved.run_folder.token(create=True)
    log.emit(
        Kind.EXIT, phase="fault", cause="exit code 1", subject="a", last_lines=["IN A LOG"], t=token
    )
    for route in ROUTES:
        async with client.get(route) as answer:
            text = await answer.text()
            assert token not in text and "IN A LOG" not in text


async def test_texts_of_a_run_are_never_markup(client, log):
    """They travel as JSON, and the page makes text nodes of them."""
    log.emit(Kind.WARN, cause=NASTY)
    async with client.get("/api/events?after=0") as answer:
        assert answer.content_type == "application/json"
        assert (await answer.json())["events"][-1]["cause"] == NASTY
    text, policy = page()
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
        assert way not in text
    assert "'unsafe-inline'" not in policy and "default-src 'none'" in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)  # nothing from elsewhere
    assert not re.search(r"\son[a-z]+=|\sstyle=", text)  # the policy would refuse it


async def test_events_after_the_last_known_one(client, log):
    for n in range(3):
        log.emit(Kind.WARN, cause=f"w{n}")
    async with client.get("/api/events?after=2") as answer:
        found = await answer.json()
    assert [e["cause"] for e in found["events"]] == ["w1", "w2"] and found["last"] == 4
    for wrong in ("-1", "x", "", "1" * 16, "²"):
        async with client.get("/api/events", params={"after": wrong}) as answer:
            assert answer.status == 400


async def test_health_is_503_with_the_reason(client, log):
    async with client.get("/health") as answer:
        assert answer.status == 200 and (await answer.json())["state"] == "starting"
    log.emit(Kind.RUN, phase="end", cause="too hot")
    async with client.get("/health") as answer:
        assert answer.status == 503
        assert (await answer.json())["reason"] == "the job has ended: too hot"


async def test_an_error_of_the_page_is_one_warning(client, told, monkeypatch):
    monkeypatch.setattr(RunFollower, "poll", lambda self: 1 / 0)
    for route in ROUTES[1:]:
        async with client.get(route) as answer:
            assert answer.status == 500 and "ZeroDivisionError" not in await answer.text()
    (event,) = told.events
    assert event["kind"] == Kind.WARN and "ZeroDivisionError" in event["cause"]


# Prometheus -----------------------------------------------------------------------------------


async def metrics(client):
    async with client.get("/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        text = await answer.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_metrics_of_a_run(client, log, resolved):
    log.emit(Kind.SPAWN, subject="trainer-0", pid=1)
    log.emit(Kind.RESTART, subject="trainer-0", cause="killed")
    log.emit(Kind.SPAWN, subject="engine-0", pid=2)
    log.emit(Kind.TRANSITION, subject="engine-0", old="installing", new="serving", version=4)
    log.emit(Kind.DROP, cause='odd "reason"\\: 5', group=1)
    log.emit(Kind.COMMIT, step=3)
    row = {"step": 3, "reward/mean": 0.5, "time/step_s": 1.5, "ettr/strict": 0.1, "name": "x"}
    resolved.run_folder.metrics.write_text(json.dumps(row) + "\n")
    found = await metrics(client)
    assert found[("rl_ft_step",)] == 3 and found[("rl_ft_reward_mean",)] == 0.5
    assert found[("rl_ft_time_step_seconds",)] == 1.5 and found[("rl_ft_healthy",)] == 1
    assert found[("rl_ft_engines", "serving")] == 1 and found[("rl_ft_engines", "suspect")] == 0
    assert found[("rl_ft_restarts_total", "trainer")] == 1
    assert found[("rl_ft_restarts_total", "engine")] == 0
    assert found[("rl_ft_groups_dropped_total", 'odd "reason"\\')] == 1
    assert found[("rl_ft_role_up", "trainer-0")] == 1 and found[("rl_ft_commits_total",)] == 1
    assert found[("rl_ft_run_info", "run")] == 1
    assert not [name for name in found if not name[0].startswith("rl_ft_")]
    assert len([name for name in found if name[0] == "rl_ft_ettr_strict"]) == 1


async def test_metrics_of_a_run_that_has_done_nothing(client):
    found = await metrics(client)
    assert found[("rl_ft_step",)] == 0 and ("rl_ft_ettr_strict",) not in found


# The supervisor's side ------------------------------------------------------------------------


async def test_a_page_at_its_port_and_in_the_registry(resolved, told):
    follower, folder = follower_of(resolved), resolved.run_folder
    folder.register("supervisor", "")
    async with served(resolved, follower, told) as url:
        assert folder.role("supervisor").url == url
        assert url.startswith("http://127.0.0.1:") and told.events == []
        port = int(url.rpartition(":")[2])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)


async def test_a_port_in_use_is_one_warning_and_another_one(tmp_path, told):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        made = job(tmp_path, GOOD, "--observability.status_port", str(port))
        async with served(made, follower_of(made), told) as url:
            assert url is not None and not url.endswith(f":{port}")
    (event,) = told.events
    assert event["kind"] == Kind.WARN
    assert f"port {port} of loopback" in event["cause"] and url in event["cause"]


async def test_those_who_leave_connections_open_take_a_bounded_number(resolved, told, monkeypatch):
    """Each is a file of the supervisor, which has processes to start."""
    monkeypatch.setattr(limited_runner, "MOST_CONNECTIONS", 8)
    monkeypatch.setattr(limited_runner, "KEEPALIVE_S", 0.3)
    async with served(resolved, follower_of(resolved), told) as url:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        idle = [await asyncio.open_connection(*address) for _ in range(40)]
        closed = [asyncio.ensure_future(reader.read()) for reader, _ in idle]
        async with asyncio.timeout(30):
            while sum(c.done() for c in closed) < 32:
                await asyncio.sleep(0.01)
        kept = [w for c, (_, w) in zip(closed, idle, strict=True) if not c.done()]
        assert len(kept) == 8
        for writer in kept:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(30):  # answered, and closed once nothing more is asked
            answers = await asyncio.gather(*closed, return_exceptions=True)
        told_so = [a for a in answers if isinstance(a, bytes) and a]
        assert len(told_so) == 8 and all(b"200 OK" in answer for answer in told_so)
        for _, writer in idle:
            writer.close()
        async with aiohttp.ClientSession() as http, http.get(f"{url}/health") as answer:
            assert answer.status == 200
    assert told.events == []


async def test_a_page_that_cannot_be_served_ends_nothing(resolved, told, monkeypatch):
    async def broken(*_, **__):
        raise OSError("no socket")

    monkeypatch.setattr(status_page.server, "start", broken)
    async with served(resolved, follower_of(resolved), told) as url:
        assert url is None
    (event,) = told.events
    assert event["kind"] == Kind.WARN and "no socket" in event["cause"]


async def test_no_page_when_it_is_not_wanted(tmp_path, told):
    made = job(tmp_path, GOOD, "--observability.no-status_page")
    async with served(made, follower_of(made), told) as url:
        assert url is None and told.events == []
