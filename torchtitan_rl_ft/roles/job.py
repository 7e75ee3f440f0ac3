"""A job made ready to run: its folder, its token, its model, and the roles it consists of."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace

from torchtitan_rl_ft.config import start_state
from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.recovery import RecoverySection
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.sections import Sections
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.roles import transport
from torchtitan_rl_ft.roles.lifecycle import Duty
from torchtitan_rl_ft.roles.role_spec import RoleSpec
from torchtitan_rl_ft.roles.session import SERVING, Session
from torchtitan_rl_ft.run_folder import RUN_ENV, STANDBY_ENV, TOKEN_ENV, RunFolder
from torchtitan_rl_ft.session_folder import SessionUnreadable


@contextmanager
def exclusive(folder: RunFolder) -> Generator[None]:
    """Hold the run folder for one supervisor; the kernel lets go when the process dies.

    Raises ConfigError when another one holds it.
    """
    folder.path.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder.path / ".supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another `torchtitan run` is at work in {folder.path}: wait for its end, or set "
                "job.dump_folder to another folder"
            ) from None
        yield
    finally:
        os.close(fd)


def prepare(resolved: Resolved, session: Session) -> start_state.Start:
    """Make the run folder ready for its roles, and the session that an earlier job has left.
    Called with the folder held.

    Raises ConfigError (the state of folder or session does not allow a start), OSError.
    """
    folder = resolved.run_folder
    try:
        found = start_state.observe(resolved)
    except SessionUnreadable as e:
        raise ConfigError(str(e)) from None
    decision = start_state.decide(found, start_state.Wish.of(resolved))
    if decision.start is start_state.Start.REFUSE:
        raise ConfigError(decision.reason)
    if decision.start is start_state.Start.REATTACH:
        session.take_over()
        _refuse_stranger(folder, session)
    else:
        session.forget_dead()
    # All other roles are started anew. An address that stays, of another host or of the folder
    # that this one is a copy of, would be asked by those that start before its successor.
    for role in folder.roles():
        if role.name != SERVING or session.serving is None:
            folder.unregister(role.name)
    _make_model(resolved)
    folder.remove_scratch()
    _check_dumps(resolved)
    resolved.write(folder)
    return decision.start


def join(resolved: Resolved) -> Resolved:
    """Make the run folder ready for a role started by hand: what the first one makes, the token
    and the choice of the transport too, the others find. Returns the job with that. Raises
    ConfigError, OSError."""
    folder = resolved.run_folder
    if folder.resolved_config.exists():
        resolved = transport.as_written(resolved)
    else:
        resolved, _ = transport.decide(resolved, Session(resolved))
    folder.token(create=True)
    _make_model(resolved)
    _check_dumps(resolved)
    if not folder.resolved_config.exists():
        resolved.write(folder)
    return resolved


def _check_dumps(resolved: Resolved) -> None:
    """What train_only trains on is there, before anything is started. Raises ConfigError."""
    if debug_mode(resolved.sections.rollout) is not DebugMode.TRAIN_ONLY:
        return
    from torchtitan_rl_ft.journal.dump_files import DumpInvalid
    from torchtitan_rl_ft.roles import rollout  # here: no other start needs a tokenizer

    tokenizer = rollout.load_tokenizer(rollout.model_directory(resolved))
    try:
        rollout.dump_source(resolved).check(rollout.model_identity(resolved, tokenizer))
    except DumpInvalid as e:
        raise ConfigError(str(e)) from e


def _make_model(resolved: Resolved) -> None:
    model = resolved.sections.model
    if model.flavor == "tiny" and not model.hf_assets_path:
        try:
            make_tiny_model(resolved.run_folder.model, model.init_seed)
        except FileExistsError as e:  # of another seed
            raise ConfigError(str(e)) from None


def _refuse_stranger(folder: RunFolder, session: Session) -> None:
    """Raises ConfigError when the run folder names a living serving role that is not the
    session's."""
    serving = start_state.living_serving(folder)
    known = session.serving.pid if session.serving is not None else None
    if serving is not None and serving.pid != known:
        raise ConfigError(
            f"a serving role is alive in {folder.path}: end it first (process {serving.pid}), "
            "`torchtitan run` starts its own"
        )


def role_specs(sections: Sections, folder: RunFolder) -> list[RoleSpec]:
    """The roles that `torchtitan run` keeps up, each as its own command."""
    trainers = [
        _spec(folder, f"trainer-{g}", "trainer", Duty.WORKER, ["--fault_tolerance.replica_id", g])
        for g in range(sections.fault_tolerance.replica_groups)
    ]
    mode = debug_mode(sections.rollout)
    specs = [_spec(folder, "rollout", "rollout", Duty.DRIVER)]
    if mode is not DebugMode.TRAIN_ONLY:
        specs.insert(0, _spec(folder, "serving", "serving", Duty.SERVICE))
    if mode is not DebugMode.ROLLOUT_ONLY:
        specs += [*trainers, *_standby_specs(sections.recovery, folder)]
        if sections.fault_tolerance.enable:
            specs.insert(0, _spec(folder, "lighthouse", "lighthouse", Duty.SERVICE))
    if sections.recovery.run_workload_inspector_server:
        specs.append(_spec(folder, "inspector", "inspector", Duty.HELPER))
    if sections.chaos.enable:
        specs.append(_spec(folder, "chaos", "chaos", Duty.SERVICE))
    return specs


def _standby_specs(recovery: RecoverySection, folder: RunFolder) -> list[RoleSpec]:
    """Trainer processes that wait for the place of a lost group."""
    if recovery.standby == "none":
        return []
    spare = recovery.standby == "spare"
    form, count = ("built", recovery.standby_groups) if spare else ("imported", 1)
    return [
        replace(
            _spec(folder, f"standby-{n}", "trainer", Duty.STANDBY),
            env={STANDBY_ENV: f"standby-{n}:{form}"},
        )
        for n in range(count)
    ]


def _spec(
    folder: RunFolder, name: str, role: str, duty: Duty, overrides: list[str | int] | None = None
) -> RoleSpec:
    command = [sys.executable, "-m", "torchtitan_rl_ft", "run", "--role", role]
    command += ["--run-folder", str(folder.path), *map(str, overrides or [])]
    return RoleSpec(name, duty, tuple(command))


def role_env(
    folder: RunFolder, base: dict[str, str], session: Session | None = None
) -> dict[str, str]:
    """Environment of every role. The token travels here and in no file of the run folder; a
    serving role that was taken over brings its own."""
    token = session.token() if session is not None else None
    if token is not None:
        folder.set_token(token)  # for roles that are started by hand
    env = {**base, RUN_ENV: str(folder.path), TOKEN_ENV: token or folder.token(create=True)}
    if session is not None:
        env |= session.owner.environment()
    env["PYTHONUNBUFFERED"] = "1"  # the last lines before a SIGKILL are in the log
    env.setdefault("PYTHONFAULTHANDLER", "1")
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun: the roles share the cores
    return env
