"""The status page in a real Chromium, and /metrics scraped by a real Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import browser
import httpx
import pytest
from grafana_dashboard import as_asked, queries
from told_run import MEMBERS, NASTY, STEPS, ToldRun

from torchtitan_rl_ft.observability.events import EventList, Kind
from torchtitan_rl_ft.observability.health import HealthLimits
from torchtitan_rl_ft.observability.live_ettr import LiveEttr
from torchtitan_rl_ft.observability.run_follower import RunFollower
from torchtitan_rl_ft.observability.run_state import RunState
from torchtitan_rl_ft.roles.status_page import StatusPage
from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.run_folder import RunFolder

pytestmark = pytest.mark.timeout(180)

needs_chromium = pytest.mark.skipif(
    browser.PROGRAM is None, reason="no chromium: apt-get install chromium"
)
needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus: apt-get install prometheus"
)


def reserved() -> socket.socket:
    """Holds a free port that a server may listen at: nobody else gets it, also while none does."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


class Served:
    """The page of a run, served from a thread as a supervisor serves it."""

    def __init__(self, path: Path) -> None:
        self.run = ToldRun(RunFolder(path))
        self.run.write()
        self.problems = EventList()
        self._held = reserved()
        self._port = self._held.getsockname()[1]
        self.start()

    def start(self) -> None:
        """At the same port as before."""
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self._held.close()

    async def _serve(self) -> None:
        folder = self.run.folder
        follower = RunFollower(folder, RunState(2 * STEPS, 2, 2))
        live = LiveEttr(folder.events, window_s=30.0, every_s=2.0)
        limits = HealthLimits(600.0, 600.0)
        page = StatusPage(follower, live, limits, self.problems, ettr_window_s=30.0)
        self.url, runner = await server.start(page.app(), port=self._port, grace_s=0.1)
        self._loop = asyncio.get_running_loop()
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("page") / "run-1")
    yield made
    made.stop()
    made.close()
    assert made.problems.events == []


@pytest.fixture(scope="module")
def devtools(tmp_path_factory) -> Iterator[str]:
    with browser.chromium(tmp_path_factory.mktemp("chromium") / "log") as address:
        yield address


SHOWN = "document.getElementById('health')?.textContent === 'ok'"


@needs_chromium
@pytest.mark.row("K2")
async def test_the_page_shows_the_run(served, devtools, tmp_path):
    async with browser.tab(devtools, served.url) as tab:
        await tab.wait(SHOWN)
        await tab.wait("document.querySelectorAll('#timeline rect').length >= 2")
        text = await tab.run("document.body.innerText")
        for part in (
            f"{STEPS} / {2 * STEPS}", "trainer-1", "engine-1", "Policy version", *MEMBERS,
            "too old 1", "serving", "killed by SIGKILL", "undisturbed step",
        ):  # fmt: skip
            assert part in text, part
        assert await tab.run("document.getElementById('ettr-at').textContent") == "since the start"
        assert await tab.run("document.querySelectorAll('#reward polyline').length") == 1
        assert await tab.run("document.querySelectorAll('#ettr polyline').length") == 4
        assert await tab.run("document.title") == f"step {STEPS}/{2 * STEPS} · run-1"
        assert "A LOG" not in text
        pids = "[...document.querySelectorAll('#engines tr')].map((r) => r.cells[4].textContent)"
        assert await tab.run(pids) == ["20", "31"]
        assert (await tab.picture(tmp_path / "wide.png")).startswith(b"\x89PNG")
        assert tab.problems == []


@needs_chromium
async def test_steps_without_incident_are_one_line_and_faults_stay_in_sight(served, devtools):
    async with browser.tab(devtools, served.url) as tab:
        await tab.wait(SHOWN)
        rows = "[...document.querySelectorAll('#events tr')].map((r) => r.innerText)"
        found = await tab.run(rows)
        steps = [r for r in found if "committed" in r]
        assert 0 < len(steps) < 6, found
        assert f"–{STEPS}" in steps[0] and "published" in steps[0] and "saved" in steps[0]
        assert any("exit fault" in r for r in found), found


@needs_chromium
async def test_causes_are_text(served, devtools):
    async with browser.tab(devtools, served.url) as tab:
        await tab.wait(SHOWN)
        found = await tab.run("document.getElementById('engines').innerText")
        assert NASTY in found
        for place in ("outages", "events"):
            assert NASTY in await tab.run(f"document.getElementById('{place}').innerText")
        assert await tab.run("document.querySelectorAll('main img, main script').length") == 0
        assert "owned" not in await tab.run("document.title")
        assert tab.problems == []


@needs_chromium
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_is_readable_on_a_phone_and_in_the_dark(served, devtools, scheme, tmp_path):
    async with browser.tab(devtools, served.url) as tab:
        await tab.look(400, 900, scheme)
        await tab.wait(SHOWN)
        assert await tab.run("document.documentElement.scrollWidth") <= 400
        beyond = """[...document.querySelectorAll("main *")].filter((e) =>
            e.getBoundingClientRect().right > innerWidth + 1 && e.textContent.trim()).length"""
        assert await tab.run(beyond) == 0
        shades = await tab.run(
            "((s) => [s.backgroundColor, s.color])(getComputedStyle(document.body))"
        )
        back, front = (sum(map(int, s[4:-1].split(","))) for s in shades)
        assert (back < front) == (scheme == "dark") and abs(back - front) > 400
        await tab.picture(tmp_path / f"{scheme}.png")


@needs_chromium
async def test_it_changes_in_place(served, devtools):
    async with browser.tab(devtools, served.url) as tab:
        await tab.wait(SHOWN)
        await tab.run("window.kept = [...document.querySelectorAll('#roles tr, #tiles div')]; 1")
        served.run.tell("trainer-0", Kind.PHASE, phase="checkpoint", step=STEPS + 1)
        served.run.tell("supervisor", Kind.WARN, cause="something new")
        await tab.wait("document.getElementById('events').innerText.includes('something new')")
        await tab.wait("document.getElementById('roles').innerText.includes('checkpoint')")
        assert await tab.run("window.kept.length > 20 && window.kept.every((e) => e.isConnected)")


@needs_chromium
async def test_it_says_when_the_supervisor_is_gone_and_is_back(served, devtools):
    async with browser.tab(devtools, served.url) as tab:
        await tab.wait(SHOWN)
        served.stop()
        try:
            await tab.wait("document.body.classList.contains('gone')")
            told = await tab.run("document.getElementById('notice').innerText")
            assert "The supervisor does not answer since" in told
            assert await tab.run("document.getElementById('health').textContent") == "gone"
            assert "trainer-1" in await tab.run("document.getElementById('roles').innerText")
        finally:
            served.start()
        await tab.wait(f"!document.body.classList.contains('gone') && {SHOWN}")
        assert await tab.run("document.getElementById('notice').textContent") == ""


# Prometheus -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory, served) -> Iterator[str]:
    """Started; its address."""
    folder = tmp_path_factory.mktemp("prometheus")
    target = served.url.removeprefix("http://")
    (folder / "prometheus.yml").write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        "scrape_configs: [{job_name: rl_ft, static_configs: [{targets: ['" + target + "']}]}]\n"
    )
    with reserved() as held, open(folder / "log", "wb") as log:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"]
        started = subprocess.Popen(
            [*command, f"--web.listen-address={address}"], stdout=log, stderr=log
        )
        try:
            wait_until_ready(f"http://{address}", started, folder / "log")
            yield f"http://{address}"
        finally:
            started.terminate()
            try:
                started.wait(30)
            except subprocess.TimeoutExpired:
                started.kill()
                started.wait()


def wait_until_ready(prometheus: str, started: subprocess.Popen[bytes], log: Path) -> None:
    """It listens before its storage is open, and answers 503 in plain text until then."""
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{prometheus}/-/ready", trust_env=False, timeout=30).is_success:
                return
        assert started.poll() is None and time.monotonic() < end, log.read_text()[-2000:]
        time.sleep(0.1)


def ask(prometheus: str, query: str) -> list[dict]:
    answer = httpx.get(
        f"{prometheus}/api/v1/query", params={"query": query}, trust_env=False, timeout=30
    )
    found = answer.json()
    assert found["status"] == "success", (query, found)
    return found["data"]["result"]


def wait_for(prometheus: str, query: str) -> list[dict]:
    end = time.monotonic() + 60
    while True:
        try:
            if found := ask(prometheus, query):
                return found
        except httpx.TransportError:
            pass
        assert time.monotonic() < end, query
        time.sleep(0.2)


@needs_prometheus
def test_prometheus_scrapes_the_run(served, prometheus):
    wait_for(prometheus, "up == 1")
    (step,) = wait_for(prometheus, "rl_ft_step")
    assert float(step["value"][1]) == STEPS
    (restarts,) = wait_for(prometheus, 'rl_ft_restarts_total{role="trainer"}')
    assert float(restarts["value"][1]) == 1
    (dropped,) = wait_for(prometheus, 'rl_ft_groups_dropped_total{reason="too old"}')
    assert float(dropped["value"][1]) == 1
    seconds = wait_for(prometheus, "sum by (role) (rl_ft_outage_seconds_total)")
    assert {s["metric"]["role"]: float(s["value"][1]) > 5 for s in seconds} == {
        "engine": True, "trainer": True
    }  # fmt: skip
    wait_for(prometheus, "count_over_time(rl_ft_step[1m]) > 2")  # rates need two
    asked = [as_asked(query) for query in queries() if not query.startswith("label_values(")]
    end = time.monotonic() + 60
    # After a scrape that has failed, on a busy machine, all answers are empty until the next one.
    while (answered := sum(bool(ask(prometheus, query)) for query in asked)) <= 25:
        assert time.monotonic() < end, answered
        time.sleep(0.5)


@needs_prometheus
def test_prometheus_finds_nothing_wrong_with_the_names(served):
    text = httpx.get(f"{served.url}/metrics", trust_env=False).content
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60
    )
    told = (done.stdout + done.stderr).decode().splitlines()
    # Keys of metrics.jsonl are what they are.
    assert [x for x in told if "no help text" in x or "error" in x.lower()] == []
