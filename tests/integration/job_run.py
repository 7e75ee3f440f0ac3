"""Real jobs of the debug configuration, started, watched, disturbed and ended by a test."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.footprint import SHM, Footprint
from torchtitan_rl_ft.host.log_tail import last_lines
from torchtitan_rl_ft.journal.audit import Audit, audit
from torchtitan_rl_ft.journal.errors import JournalError
from torchtitan_rl_ft.observability.events import Event, Kind, read_events
from torchtitan_rl_ft.observability.jsonl import read_jsonl
from torchtitan_rl_ft.roles import status
from torchtitan_rl_ft.roles.session import living_processes
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder
from torchtitan_rl_ft.session_folder import SessionFolder, SessionRecord, SessionUnreadable
from torchtitan_rl_ft.weights.holder.leftovers import OWNER_FILE
from torchtitan_rl_ft.weights.holder.settings import user_memory

COMMAND = (sys.executable, "-m", "torchtitan_rl_ft")
CONFIG = "rl_ft_debug.toml"
SUPERVISOR = "supervisor"
WATCH_INTERVAL_S = 0.5


class Job:
    """One run folder and the processes that a test started on it. A context manager: whatever
    it started has ended at its end, also when the test failed.

    All that these processes and their descendants hold is watched from a thread, so that
    `left()` can tell what they left behind, also after a SIGKILL.
    """

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.state = path.parent / "state"  # where the run's token is, outside the run folder
        self.env = {k: v for k, v in os.environ.items() if not k.startswith("TORCHTITAN_RL_FT_")}
        self.env |= {"XDG_STATE_HOME": str(self.state), "OMP_NUM_THREADS": "1"}
        self.footprint = Footprint(before=frozenset(SHM.glob("*")))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._output = path.parent / "output"
        self._over = threading.Event()
        self._looking = threading.Lock()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Job:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()
        self._observe()
        for started in self.processes.values():
            if started.poll() is None:
                started.kill()
            started.wait()
        for member in self.footprint.processes:
            process.kill(member)
        self.footprint.remove_shared_memory()

    # Start and end ----------------------------------------------------------------------

    def import_from(self, folder: Path) -> None:
        """What the job's processes are started with may import from it."""
        paths = [str(folder), *filter(None, [self.env.get("PYTHONPATH")])]
        self.env["PYTHONPATH"] = os.pathsep.join(paths)

    def start(self, *overrides: str) -> Job:
        """`torchtitan run` of the debug job."""
        keys = ["--job.dump_folder", str(self.folder.path), *overrides]
        self.spawn(SUPERVISOR, *COMMAND, "run", "--job.config_file", CONFIG, *keys)
        return self

    def start_role(self, role: str, *overrides: str, name: str | None = None) -> None:
        """`torchtitan run --role`, as a scheduler would start it."""
        keys = ["--job.dump_folder", str(self.folder.path), *overrides]
        command = [*COMMAND, "run", "--role", role, "--job.config_file", CONFIG, *keys]
        self.spawn(name or role, *command)

    def spawn(self, name: str, *command: str, **env: str) -> subprocess.Popen[bytes]:
        """Any process that belongs to this job; its output goes to files."""
        self._output.mkdir(exist_ok=True)
        with (
            open(self._output / f"{name}.out", "wb") as out,
            open(self._output / f"{name}.err", "wb") as err,
        ):
            self.processes[name] = subprocess.Popen(
                command,
                env={**self.env, **env},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                cwd=self.folder.path.parent,
            )
        return self.processes[name]

    def end(self, name: str = SUPERVISOR, timeout_s: float = 60.0) -> int:
        """Wait for the exit code of what was started as `name`."""
        try:
            return self.processes[name].wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{name} has not ended in {timeout_s} s\n{self.story()}") from None

    def interrupt(self, name: str = SUPERVISOR) -> None:
        """What Ctrl-C does: the roles are in sessions of their own."""
        self.processes[name].send_signal(signal.SIGINT)

    def kill(self, name: str = SUPERVISOR) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def out(self, name: str = SUPERVISOR) -> str:
        return (self._output / f"{name}.out").read_text()

    def err(self, name: str = SUPERVISOR) -> str:
        return (self._output / f"{name}.err").read_text()

    def error_lines(self, name: str = SUPERVISOR) -> list[str]:
        return [x for x in self.err(name).splitlines() if x.startswith("torchtitan: error:")]

    # What the job has done --------------------------------------------------------------

    def events(self, kind: Kind | None = None, **data: Any) -> list[Event]:
        """Events so far, of one kind, with these values among their data."""
        if not self.folder.events.exists():
            return []
        found = [e for e in read_events(self.folder.events) if kind is None or e.kind is kind]
        return [e for e in found if data.items() <= e.data.items()]

    def metrics(self) -> list[dict[str, Any]]:
        return read_jsonl(self.folder.metrics)

    def step(self) -> int:
        """The last committed step."""
        rows = self.metrics()
        return rows[-1]["step"] if rows else 0

    def audit(self) -> Audit:
        return audit(self.folder.journal)

    def process_of(self, name: str) -> ProcessId:
        """The newest process of a role or an engine, by the event of its start."""
        spawned = self.events(Kind.SPAWN, subject=name)[-1].data
        return ProcessId(spawned["pid"], spawned["start_time"])

    def attempts(self, name: str) -> int:
        return len(self.events(Kind.SPAWN, subject=name))

    # Waiting ----------------------------------------------------------------------------

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> None:
        """Until `condition`, while what was started lives."""
        end = time.monotonic() + timeout_s
        while not condition():
            ended = {n: c for n, p in self.processes.items() if (c := p.poll()) is not None}
            assert not any(ended.values()), f"waiting for {what}: ended {ended}\n{self.story()}"
            assert time.monotonic() < end, f"waited {timeout_s} s for {what}\n{self.story()}"
            time.sleep(0.1)

    def wait_step(self, step: int, timeout_s: float = 90.0) -> None:
        self.wait_for(lambda: self.step() >= step, f"step {step}", timeout_s)

    def wait_event(self, kind: Kind, n: int = 1, timeout_s: float = 60.0, **data: Any) -> None:
        what = f"{n} {kind} events {data or ''}"
        self.wait_for(lambda: len(self.events(kind, **data)) >= n, what, timeout_s)

    # The session ------------------------------------------------------------------------

    @property
    def session(self) -> SessionFolder | None:
        """The folder of the job's serving session; None when there is none."""
        found = list((self.state / "torchtitan_rl_ft" / "sessions").glob("*/session.json"))
        return SessionFolder.at(found[0].parent) if found else None

    def session_record(self) -> SessionRecord:
        assert self.session is not None, self.story()
        record = self.session.read()
        assert record is not None
        return record

    def session_processes(self) -> set[ProcessId]:
        """Serving, engines and warden, and all below them."""
        return living_processes(self.session) if self.session is not None else set()

    def generate_status(self, timeout_s: float = 1.0) -> int:
        """The HTTP status of one small request for samples."""
        body = {
            "request_id": secrets.token_hex(4),
            "input_ids": [3, 4],
            "n": 1,
            "sampling": {"max_new_tokens": 2},
            "seeds": None,
            "timeout_s": timeout_s,
        }
        assert self.session is not None, self.story()
        answer = httpx.post(
            f"{self.session_record().serving.url}/v1/generate",
            json=body,
            headers={"Authorization": f"Bearer {self.session.token()}"},
            timeout=timeout_s + 20,
            trust_env=False,
        )
        return answer.status_code

    def engine_statuses(self) -> list[int]:
        """The HTTP status of one small request to each engine itself, past serving."""
        assert self.session is not None, self.story()
        engines = json.loads(self.session.engines.read_bytes()).values()
        body = {"input_ids": [3, 4], "sampling_params": {"max_new_tokens": 2}}
        return [
            httpx.post(e["url"] + "/generate", json=body, timeout=20, trust_env=False).status_code
            for e in engines
        ]

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """`torchtitan WORDS` with the state folder of this job."""
        return subprocess.run(
            [*COMMAND, *words], env=self.env, capture_output=True, text=True, timeout=60
        )

    def wait_for_session_state(self, state: str, within_s: float = 10.0) -> None:
        """As `torchtitan status` calls it."""
        end = time.monotonic() + within_s
        while (found := self.session_state()) != state:
            assert time.monotonic() < end, f"session is {found}, not {state}\n{self.story()}"
            time.sleep(0.1)

    def session_state(self) -> str:
        assert self.session is not None, self.story()
        record = self.session_record()
        return status.state_of(record, answers=bool(record.serving.alive()))

    def wait_for_session_alone(self, within_s: float) -> None:
        """Until nothing of the job lives but its session."""
        end = time.monotonic() + within_s
        while others := set(self.alive()) - self.session_processes():
            assert time.monotonic() < end, f"alive after {within_s} s: {others}\n{self.story()}"
            time.sleep(0.1)

    # What is left -----------------------------------------------------------------------

    def wait_for_none_alive(self, within_s: float) -> None:
        end = time.monotonic() + within_s
        while alive := self.alive():
            assert time.monotonic() < end, f"alive after {within_s} s: {alive}\n{self.story()}"
            time.sleep(0.1)

    def alive(self) -> list[ProcessId]:
        """Processes of the job that were seen and still live."""
        with self._looking:
            return [p for p in self.footprint.processes if p.alive()]

    def left(self, within_s: float = 0.0) -> list[str]:
        """Processes, ports, shared memory and policies in memory of the job that are still
        there."""
        end = time.monotonic() + within_s
        while True:
            with self._looking:
                left = self.footprint.leftovers() + self._policies_in_memory()
            if not left or time.monotonic() >= end:
                return left
            time.sleep(0.1)

    def _policies_in_memory(self) -> list[str]:
        """Folders of holders that belong to processes of the job."""
        found = []
        for file in user_memory(WeightsSection().memory_folder).glob(f"*/*/{OWNER_FILE}"):
            with contextlib.suppress(OSError, ValueError):  # of another run, made or removed now
                if ProcessId(**json.loads(file.read_bytes())) in self.footprint.processes:
                    found.append(f"policies {file.parent}")
        return found

    def _watch(self) -> None:
        while not self._over.wait(WATCH_INTERVAL_S):
            self._observe()

    def _observe(self) -> None:
        found: set[ProcessId] = set()
        for started in list(self.processes.values()):
            with contextlib.suppress(ProcessLookupError):
                root = ProcessId.of(started.pid)
                found |= {root, *process.descendants(root)}
        with contextlib.suppress(SessionUnreadable):
            found |= self.session_processes()
        with self._looking:
            self.footprint.observe(found)

    def story(self) -> str:
        """What a failed test should show: output, last events, last lines of the logs."""
        parts = [f"--- {n}\n{self.out(n)[-1500:]}{self.err(n)[-1500:]}" for n in self.processes]
        parts += [f"{e.name} {e.kind} {e.phase or ''} {e.cause or ''}" for e in self.events()[-15:]]
        for log in sorted(self.folder.path.glob("logs/*/attempt_*.log")):
            parts.append(f"--- {log.relative_to(self.folder.path)}")
            parts += last_lines(log, 6)
        try:
            parts.append(f"audit: {self.audit().problems or 'clean'}")
        except JournalError as e:
            parts.append(f"audit: {e}")
        return "\n".join(parts)
