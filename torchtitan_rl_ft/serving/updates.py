"""Brings one engine to the version that is required, and says so only when it is proved."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.serving.engine import Engine
from torchtitan_rl_ft.serving.engine_client import EngineRefused, EngineTimeout, EngineUnreachable
from torchtitan_rl_ft.serving.engine_records import Memory
from torchtitan_rl_ft.serving.samples import AnswerInvalid
from torchtitan_rl_ft.serving.shared import Shared, Target
from torchtitan_rl_ft.serving.states import EngineState
from torchtitan_rl_ft.weights.installer import Installed, InstallFailed
from torchtitan_rl_ft.weights.manifest import WeightsInvalid
from torchtitan_rl_ft.weights.proof import Proof
from torchtitan_rl_ft.weights.transports.base import (
    ReleaseSuperseded,
    TransportFailed,
    WeightsLost,
)

INSTALL_TRIES = 2
"""Failures in a row that mean that the engine has to go."""

INSTALL_RETRY_DELAY_S = 0.2

SUPERSEDED_RECHECK_S = 2.0
"""How long the target that supersedes a release is waited for before that is tried again. It is no
failure of the engine: where trainers are faster than a relay, each target may be superseded."""

DAMAGED_RECHECK_S = 30.0
"""How often a release that is damaged is looked at again, until there is another."""

ENGINE_ERRORS = (InstallFailed, EngineRefused, EngineUnreachable, AnswerInvalid, TransportFailed)


class Retire(Exception):
    """This engine has to go; the message says why."""


async def update(engine: Engine, target: Target, shared: Shared) -> None:
    """Have `engine` serve `target`, or leave it STALE when another target was set meanwhile.
    Raises Retire when it cannot be brought there. A damaged release is no engine's fault: they
    wait for another one."""
    frozen = not engine.plan.takes_versions
    if engine.client.released:
        # Durable first: a serving role that dies meanwhile leaves it to be tried, not awaited.
        await asyncio.to_thread(shared.records.put, engine.record(Memory.HELD))
    if engine.state is not EngineState.STALE:
        wanted = "its checkpoint" if frozen else f"version {target.release.version}"
        engine.move(EngineState.STALE, f"{wanted} is required")
    if frozen:
        await _show(engine, target, shared)
        return
    try:
        await _prove_or_install(engine, target, shared)
    except WeightsInvalid as e:
        _tell_damage(engine, target, shared, e)
        await shared.changes.wait_until(
            lambda: shared.target_for(engine.plan) is not target, DAMAGED_RECHECK_S
        )


def _tell_damage(engine: Engine, target: Target, shared: Shared, error: WeightsInvalid) -> None:
    """Once for each engine: it looks again and again."""
    version = target.release.version
    if engine.damage_told != version:
        engine.damage_told = version
        lost = isinstance(error, WeightsLost)
        cause = f"version {version} is {'lost' if lost else 'damaged'}: {error}"
        shared.events.emit(Kind.FAULT, cause=cause, version=version, subject=engine.name)
    shared.damaged = version
    shared.changes.notify()


async def _prove_or_install(engine: Engine, target: Target, shared: Shared) -> None:
    """Raises Retire, WeightsInvalid."""
    release, installer = target.release, shared.installers[engine.slot]
    proof = target.proof if engine.same_layout else Proof(target.proof.model_digest, None)
    if engine.unproved:
        engine.unproved = False
        work = installer.prove(engine.client, release, proof)
        if (problem := await _attempt(engine, target, shared, work)) is None:
            return
        if isinstance(problem, EngineTimeout):  # an install would wait for as long, in vain
            raise Retire(f"the adopted engine cannot show what it holds: {problem}")
        cause = f"the adopted engine has to install version {release.version}: {problem}"
        shared.events.emit(Kind.WARN, cause=cause, subject=engine.name)
    while True:
        digest_before, engine.digest = engine.digest, None
        work = installer.install(engine.client, release, proof, digest_before)
        if (problem := await _attempt(engine, target, shared, work)) is None:
            return
        if isinstance(problem, ReleaseSuperseded):  # the newer one is about to be the target
            await shared.changes.wait_until(
                lambda: shared.target_for(engine.plan) is not target, SUPERSEDED_RECHECK_S
            )
            return
        engine.install_failures += 1
        reason = f"version {release.version} not installed: {problem}"
        shared.events.emit(
            Kind.FAULT,
            cause=reason,
            version=release.version,
            subject=engine.name,
            attempt=engine.install_failures,
        )
        # Counted over versions: when they come faster than an install may take, each failure finds
        # another version required, and a hanging engine would never be given up. One that has
        # hung for the whole limit is not waited for again.
        if engine.install_failures >= INSTALL_TRIES or isinstance(problem, EngineTimeout):
            raise Retire(reason)
        if shared.target_for(engine.plan) is not target:
            return  # superseded meanwhile
        await asyncio.sleep(INSTALL_RETRY_DELAY_S)


async def _show(engine: Engine, target: Target, shared: Shared) -> None:
    """Have an engine of a frozen group show that it holds its own checkpoint. Raises Retire: its
    successor loads it anew."""
    engine.unproved = False
    async with quiet(engine, shared.rollout.install_timeout_s):
        engine.move(EngineState.INSTALLING, "shows what it has loaded")
        try:
            await shared.installers[engine.slot].prove_own(engine.client, target.proof)
        except ENGINE_ERRORS as e:
            raise Retire(f"does not hold the checkpoint in {target.release.path}: {e}") from e
        engine.version, engine.digest = target.release.version, target.proof.model_digest
        reason = f"holds its own checkpoint, proved by checksum ({target.proof.kind})"
        engine.move(EngineState.SERVING, reason)


async def _attempt(
    engine: Engine, target: Target, shared: Shared, work: Coroutine[Any, Any, Installed]
) -> Exception | None:
    """Why the engine does not serve `target` after `work`, or None. Raises Retire,
    WeightsInvalid."""
    version = target.release.version
    with contextlib.closing(work):
        async with quiet(engine, shared.rollout.install_timeout_s):
            engine.move(EngineState.INSTALLING, f"takes version {version}")
            try:
                took = await work
            except (*ENGINE_ERRORS, WeightsInvalid) as e:
                engine.version = None
                engine.move(EngineState.STALE, f"version {version} not installed: {e}")
                if isinstance(e, WeightsInvalid):
                    raise
                return e
            _announce(engine, target, took, shared)
            return None


@contextlib.asynccontextmanager
async def quiet(engine: Engine, limit_s: float) -> AsyncIterator[None]:
    """No probe beside an install. Raises Retire when a probe holds on for too long."""
    try:
        async with asyncio.timeout(limit_s):
            await engine.quiet.acquire()
    except TimeoutError:
        raise Retire(f"a probe did not end within {limit_s:g} s (install_timeout_s)") from None
    try:
        yield
    finally:
        engine.quiet.release()


def _announce(engine: Engine, target: Target, took: Installed, shared: Shared) -> None:
    release = target.release
    if shared.damaged == release.version:
        shared.damaged = None  # repaired in place
    engine.version, engine.digest = release.version, target.proof.model_digest
    engine.install_failures = 0
    shared.events.emit(
        Kind.INSTALL,
        version=release.version,
        step=release.step,
        slot=engine.slot,
        subject=engine.name,
        proof=target.proof.kind if engine.same_layout else "witness",
        transport=release.transport,
        load_ms=round(took.load_s * 1000, 1),
        prove_ms=round(took.prove_s * 1000, 1),
        paused_ms=round(took.paused_s * 1000, 1),
    )
    engine.move(EngineState.SERVING, f"holds version {release.version}, proved by checksum")
