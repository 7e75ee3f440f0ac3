"""What `torchtitan status` tells of a job and its session, and what `torchtitan stop` does."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.session_identity import identify
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.json_text import text_of
from torchtitan_rl_ft.observability.live_ettr import LiveEttr, Measured, measured_json
from torchtitan_rl_ft.observability.metric_rows import read_metrics
from torchtitan_rl_ft.observability.run_state import RunState
from torchtitan_rl_ft.observability.status_text import member_text, run_rows
from torchtitan_rl_ft.roles.following import follower_of
from torchtitan_rl_ft.roles.report import SUPERVISOR
from torchtitan_rl_ft.roles.session import client_of, end_session
from torchtitan_rl_ft.rpc.client import RoleRefused, RoleUnreachable
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder
from torchtitan_rl_ft.serving.engine_records import EngineRecords
from torchtitan_rl_ft.session_folder import (
    HostProcess,
    SessionFolder,
    SessionRecord,
    SessionUnreadable,
    boot_s,
)

ANSWER_TIMEOUT_S = 5.0
CLEANUP_TIMEOUT_S = 60.0
"""Of a session whose job's configuration is not known."""
HURRY_S = 10.0

INSPECTOR = "inspector"


@dataclass(frozen=True)
class Target:
    """What was named: a session, a run folder, or both."""

    session: SessionFolder
    run_folder: RunFolder | None
    rule: str
    cleanup_timeout_s: float
    end_signal: signal.Signals = signal.SIGTERM
    """What ends the job at once."""
    note: str | None = None
    """What to know of its configuration."""

    @classmethod
    def of(cls, name: str) -> Target:
        """From a run folder or the id of a session. Raises ConfigError."""
        session = SessionFolder(name)
        is_session = "/" not in name and session.path.is_dir()
        # A directory may happen to have a session's name.
        if RunFolder(name).resolved_config.exists() or (Path(name).is_dir() and not is_session):
            return cls.of_job(Resolved.read(name, only_to_look=True))
        if not is_session:
            known = ", ".join(s.id for s in SessionFolder.all()) or "none"
            raise ConfigError(
                f"{name} is neither a run folder nor a session of this machine (sessions: {known})"
            )
        record = session.read()
        if record is None or not record.run_folder:
            return cls(session, None, record.rule if record is not None else "", CLEANUP_TIMEOUT_S)
        folder = RunFolder(record.run_folder)
        if not folder.resolved_config.exists():
            return cls(session, folder, record.rule, CLEANUP_TIMEOUT_S)
        job = Resolved.read(folder.path, only_to_look=True)
        return cls(session, folder, record.rule, *_end_of(job), job.version_note)

    @classmethod
    def of_job(cls, job: Resolved) -> Target:
        identity = identify(job)
        session = SessionFolder(identity.id)
        return cls(session, job.run_folder, identity.rule, *_end_of(job), job.version_note)


def _end_of(job: Resolved) -> tuple[float, signal.Signals]:
    """How long a job may take to end, and the signal that makes it. SIGTERM where it can be: shells
    start what they run in the background with SIGINT ignored."""
    graceful = job.sections.recovery.exit_signal_handler  # that job heeds SIGINT in any case
    end_signal = signal.SIGINT if graceful else signal.SIGTERM
    return job.sections.rollout.cleanup_timeout, end_signal


# Status ---------------------------------------------------------------------------------------


def status(target: Target, run: Run | None = None) -> dict[str, Any]:
    """Everything that can be told, fit for JSON. `run`: of the target's folder. Raises
    SessionUnreadable."""
    record = target.session.read()
    folder = folder_of(target)
    return {
        "session": target.session.id,
        "rule": target.rule,
        "run_folder": str(folder.path) if folder is not None else None,
        "roles": _roles(folder) if folder is not None else [],
        "last_step": _last_step(folder) if folder is not None else None,
        "note": target.note,
        "run": None if run is None else run.to_json(),
        **(_session(target.session, record) if record is not None else {"state": "none"}),
    }


def folder_of(target: Target) -> RunFolder | None:
    """The run folder of the session's owner, else the one that was named. Raises
    SessionUnreadable."""
    record = target.session.read()
    if record is not None and record.owner is not None:
        return RunFolder(record.owner.run_folder)
    return target.run_folder


@dataclass(frozen=True)
class Run:
    """What the files of a run tell."""

    state: RunState
    measured: Measured
    now_mono_s: float  # of a run that goes on; else its last moment

    @classmethod
    def of(cls, folder: RunFolder | None) -> Run | None:
        """None for a folder whose configuration cannot be read."""
        if folder is None or not folder.events.exists():
            return None
        try:
            resolved = Resolved.read(folder.path, only_to_look=True)
        except ConfigError:
            return None
        follower, section = follower_of(resolved), resolved.sections.observability
        follower.poll()
        live = LiveEttr(
            folder.events, window_s=section.ettr_window_s, every_s=section.ettr_sample_s
        )
        supervisor = folder.role(SUPERVISOR)
        goes_on = supervisor is not None and supervisor.alive()
        now_s = time.monotonic() if goes_on else follower.state.last_mono_s
        return cls(follower.state, live.measure_all(), now_s)

    def to_json(self) -> dict[str, Any]:
        return self.state.to_json(self.now_mono_s) | {"measured": measured_json(self.measured)}

    def member(self, name: str) -> str:
        """What a role does; of a group its first rank tells."""
        group, _, rank = name.partition(".")
        found = self.state.members.roles.get(group) if rank in ("", "0") else None
        return "" if found is None else f"  {member_text(found, self.now_mono_s)}"


def _session(folder: SessionFolder, record: SessionRecord) -> dict[str, Any]:
    answer = _ask(folder, record)
    owner, left_s = record.owner, None
    if owner is None and record.unowned_since_boot_s is not None:
        left_s = round(record.unowned_since_boot_s + record.retain_ttl_s - boot_s(), 1)
    return {
        "state": state_of(record, answers=answer is not None),
        "owner": None if owner is None else {"attempt": owner.attempt, **_process(owner)},
        "serving": {**_process(record.serving), "url": record.serving.url},
        "admission": None if answer is None else answer.get("admission"),
        "version": None if answer is None else answer.get("version"),
        "gateway": None if answer is None else answer.get("gateway"),
        "transport": None if answer is None else answer.get("transport"),
        "relays": [] if answer is None else answer.get("relays", []),
        "trainers": [{"name": t.name, **_process(t)} for t in record.trainers],
        "retain_ttl_s": record.retain_ttl_s,
        "ttl_left_s": left_s,
        "engines": _recorded(folder) if answer is None else answer.get("engines", []),
    }


def state_of(record: SessionRecord, *, answers: bool) -> str:
    """In one word."""
    if record.serving.alive() is False:
        return "serving has died"
    if not answers:
        return "serving does not answer"
    if record.by_hand:
        return "by hand"
    if record.owner is None:
        return "kept"
    return {True: "owned", False: "owner has died", None: "owned on another host"}[
        record.owner.alive()
    ]


def _process(of: HostProcess) -> dict[str, Any]:
    return {"pid": of.pid, "host": of.host, "alive": of.alive()}


def _ask(folder: SessionFolder, record: SessionRecord) -> dict[str, Any] | None:
    """The answer of the serving role; None when it gives none."""
    if not record.serving.alive():
        return None
    client = client_of(folder, record.serving)
    try:
        return client.get("/v1/status", deadline_s=ANSWER_TIMEOUT_S)
    except (RoleUnreachable, RoleRefused):
        return None
    finally:
        client.close()


def _recorded(folder: SessionFolder) -> list[dict[str, Any]]:
    return [
        {
            "slot": r.slot,
            "state": "alive" if r.alive else "dead",
            "pid": r.main.pid,
            "start_time": r.main.start_time,
            "url": r.url,
        }
        for r in EngineRecords(folder.engines).read()
    ]


def _roles(folder: RunFolder) -> list[dict[str, Any]]:
    return [
        {"name": r.name, "pid": r.pid, "alive": r.alive(), "attempt": r.attempt, "url": r.url}
        for r in folder.roles()
    ]


def _last_step(folder: RunFolder) -> int | None:
    last = deque(read_metrics(folder.metrics), maxlen=1)
    return last[0]["step"] if last else None


def show(found: dict[str, Any], run: Run | None = None) -> list[str]:
    """`status` as lines for people."""
    lines = [
        _line("session", f"{found['session']} ({found['rule']})"),
        _line("run folder", found["run_folder"] or "unknown"),
        _line("last step", "none" if found["last_step"] is None else found["last_step"]),
        _line("state", "no session" if found["state"] == "none" else found["state"]),
    ]
    if run is not None:
        rows = run_rows(run.state, run.measured, run.now_mono_s)
        lines += [_line(label, text) for label, text in rows]
    if "serving" in found:
        lines += _session_lines(found)
    doing = run.member if run is not None else lambda name: ""
    lines += [
        _line(
            "role",
            f"{r['name']}  process {r['pid']}, start {r['attempt']}{_dead(r)}{doing(r['name'])}"
            f"{_at(r)}",
        )
        for r in found["roles"]
    ]
    lines += [
        _line("role", f"{t['name']}  process {t['pid']}{_dead(t)}{doing(t['name'])}")
        for t in found.get("trainers", [])
    ]
    if found["note"] is not None:
        lines.append(_line("note", found["note"]))
    return lines


def _at(role: dict[str, Any]) -> str:
    """The address of what is there to be asked by people."""
    return f"  {role['url']}" if role["name"] in (INSPECTOR, SUPERVISOR) else ""


def _session_lines(found: dict[str, Any]) -> list[str]:
    owner, serving = found["owner"], found["serving"]
    lines = [
        _line("owner", "none" if owner is None else f"process {owner['pid']}{_dead(owner)}"),
        _line(
            "serving", f"process {serving['pid']}, {serving['url'] or 'starting'}{_dead(serving)}"
        ),
    ]
    if (admission := found["admission"]) is not None:
        lines.append(
            _line("admission", admission if admission == "open" else f"closed: {admission}")
        )
    if found["ttl_left_s"] is not None:
        lines.append(_line("ends in", f"{max(0.0, found['ttl_left_s']):.0f} s"))
    if (gateway := found["gateway"]) is not None:
        told = f"process {gateway['pid']}" if gateway["pid"] is not None else "down"
        lines.append(_line("gateway", f"{told}, engines listed {len(gateway['listed'])}"))
    if found["transport"] is not None:
        lines.append(_line("transport", found["transport"]))
    lines += [_line("relay", _relay_text(relay)) for relay in found["relays"]]
    several = len({e.get("group") for e in found["engines"]}) > 1
    for e in found["engines"]:
        told = [f"engine-{e['slot']}", e.get("group") if several else None]
        told += [e.get("duty"), e["state"]]
        told += [f"version {e['version']}" if e.get("version") is not None else None]
        told += [f"process {e['pid']}" if e["pid"] is not None else None]
        told += [f"restarts {e['restarts']}" if e.get("restarts") else None, e.get("reason")]
        lines.append(_line("engine", "  ".join(str(t) for t in told if t)))
    return lines


def _relay_text(relay: dict[str, Any]) -> str:
    told = [relay["name"]]
    told.append("down" if relay["pid"] is None else f"process {relay['pid']}")
    held = ", ".join(map(str, relay["holds"]))
    told.append(f"holds step {held}" if held else "holds nothing")
    told.append(f"restarts {relay['restarts']}" if relay["restarts"] else "")
    return "  ".join(t for t in [*told, relay["problem"]] if t)


def _line(name: str, text: Any) -> str:
    return f"{name:<11}{text}"


def _dead(of: dict[str, Any]) -> str:
    return {True: "", False: " (dead)", None: " (another host)"}[of["alive"]]


def list_sessions() -> list[dict[str, Any]]:
    """All sessions of this user on this machine; unreadable ones with the reason."""
    found = []
    for session in SessionFolder.all():
        try:
            found.append(status(Target.of(session.id)))
        except SessionUnreadable as e:
            found.append({"session": session.id, "state": f"unreadable: {e}"})
    return found


def main_status(target: Target | None, as_json: bool) -> None:
    """`torchtitan status`; None: all sessions. Raises SessionUnreadable."""
    if target is not None:
        run = Run.of(folder_of(target))
        found = status(target, run)
        print(text_of(found, indent=1) if as_json else "\n".join(show(found, run)))
        return
    sessions = list_sessions()
    if as_json:
        print(text_of(sessions, indent=1))
    elif not sessions:
        print("no serving session of this user on this machine")
    for each in [] if as_json else sessions:
        print(f"{each['session']:<32}{each['state']:<24}{each.get('run_folder') or ''}")


# Stop -----------------------------------------------------------------------------------------


def main_stop(target: Target) -> int:
    """`torchtitan stop`: end a running job as Ctrl-C does, then what is left of its session. Says
    what it did. Again: nothing to do. Raises SessionUnreadable."""
    held = target.session.read() is not None
    told, left = _stop_job(target)
    if told and held and target.session.read() is None:
        told.append(f"session {target.session.id}: ended by its job")
    ended = asyncio.run(end_session(target.session, target.cleanup_timeout_s))
    if ended.serving or ended.engines:
        serving = "its serving role and " if ended.serving else ""
        told.append(f"session {target.session.id}: ended {serving}{ended.engines} engines")
    left += ended.left
    if not told and not left:
        told.append(f"session {target.session.id}: nothing is running")
    for line in told:
        print(line)
    if left:
        print("still alive: " + ", ".join(f"process {p.pid}" for p in left))
        return ExitCode.FAILED
    return ExitCode.DONE


def _stop_job(target: Target) -> tuple[list[str], list[ProcessId]]:
    """What was done, in lines, and what is still alive."""
    supervisor = _supervisor(target)
    if supervisor is None:
        return [], []
    for signum, limit_s in (
        (target.end_signal, target.cleanup_timeout_s + HURRY_S),
        (target.end_signal, HURRY_S),  # no more grace
        (signal.SIGKILL, HURRY_S),
    ):
        process.kill(supervisor, signum)
        end = time.monotonic() + limit_s
        while time.monotonic() < end:
            if not supervisor.alive():
                return [f"ended the job (process {supervisor.pid})"], []
            time.sleep(0.05)
    return [], [supervisor]


def _supervisor(target: Target) -> ProcessId | None:
    """The living `torchtitan run`, by pid and start time. Raises SessionUnreadable for one of
    another host."""
    record = target.session.read()
    owner = record.owner if record is not None and not record.by_hand else None
    if owner is not None and owner.alive() is None:
        raise SessionUnreadable(f"session {target.session.id} belongs to {owner}: stop it there")
    if owner is not None and owner.alive():
        return owner.id
    role = target.run_folder.role(SUPERVISOR) if target.run_folder is not None else None
    if role is None:
        return None
    here = HostProcess(role.pid, role.start_time, role.host)
    return here.id if here.alive() else None
