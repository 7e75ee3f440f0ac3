"""Gives one engine one version, and lets it go on only when it has proved that it holds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torchtitan_rl_ft.weights.proof import Checksums, Proof
from torchtitan_rl_ft.weights.transports.base import Release, WeightTransport

WEIGHTS = "weights"
"""SGLang's name of the memory that holds them."""


class InstallFailed(Exception):
    """The engine does not hold the version. It is paused and must not serve."""


class WeightTarget(Protocol):
    """What an engine offers for a change of weights; each call has its own limit. `released`:
    kinds of memory that it has given up."""

    released: set[str]

    async def resume_memory(self, kinds: Iterable[str], timeout_s: float) -> None: ...

    async def pause(self, mode: str, timeout_s: float) -> None: ...

    async def resume(self, timeout_s: float) -> None: ...

    async def abort_all(self, timeout_s: float) -> None: ...

    async def load(self, path: str, version: int, flush_cache: bool, timeout_s: float) -> None: ...

    async def flush(self, timeout_s: float) -> None: ...

    async def held_version(self, timeout_s: float) -> int | None: ...

    async def checksums(self, timeout_s: float) -> Checksums: ...


@dataclass(frozen=True)
class Installed:
    """How long the parts of an install took."""

    fetch_s: float
    load_s: float
    prove_s: float
    paused_s: float


class Installer:
    """`pause_mode` is SGLang's: retract, in_place or abort."""

    def __init__(
        self,
        transport: WeightTransport,
        pause_mode: str,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport, self._pause_mode = transport, pause_mode
        self._timeout_s, self._clock = timeout_s, clock

    @property
    def _flushes(self) -> bool:
        """What the prefix cache holds is of the old weights, and an engine has to confirm that it
        is gone. In place, running requests keep their cache, so it cannot be flushed; the engine
        then runs without a prefix cache (serving/launch.py)."""
        return self._pause_mode != "in_place"

    async def install(
        self, engine: WeightTarget, release: Release, proof: Proof, digest_before: str | None
    ) -> Installed:
        """Pause, load, prove, resume, all within the limit. Memory that the engine has given up
        comes back for it: that of the weights first, the rest once they are loaded.

        Raises InstallFailed, WeightsInvalid (the release is damaged, the engine is not at fault);
        whatever the engine or the transport raised goes through. The engine then stays paused,
        with unknown weights, unless it was not touched yet.
        """
        start = self._clock()

        def left_s() -> float:
            return max(0.001, start + self._timeout_s - self._clock())

        path: Path = await self._transport.fetch(release, left_s())
        fetched = self._clock()
        was_released = bool(engine.released)
        await engine.resume_memory((WEIGHTS,), left_s())
        await engine.pause(self._pause_mode, left_s())
        paused = self._clock()
        before = await engine.checksums(left_s()) if proof.kind == "witness" else []
        # Without memory for a cache there is none to flush yet.
        flushes = self._flushes and not was_released
        await engine.load(str(path), release.version, flushes, left_s())
        await engine.resume_memory(tuple(engine.released), left_s())
        if self._flushes:
            await engine.flush(left_s())
        loaded = self._clock()
        try:
            await _prove(engine, release.version, proof, before, digest_before, left_s)
        except InstallFailed:
            # Was it the engine, or what it was given?
            await self._transport.verify(release, left_s())
            raise
        proved = self._clock()
        await engine.resume(left_s())
        done = self._clock()
        return Installed(fetched - start, loaded - paused, proved - loaded, done - fetched)

    async def prove(self, engine: WeightTarget, release: Release, proof: Proof) -> Installed:
        """Have an engine of unknown past show that it holds `release` already, and resume: its
        caller may have died in the middle of an update. Requests of that caller are ended.

        Raises as `install`, also when nothing is known to compare its checksums with.
        """
        start = self._clock()

        def left_s() -> float:
            return max(0.001, start + self._timeout_s - self._clock())

        await engine.abort_all(left_s())
        # `abort` would wait for requests to end, which a paused engine cannot do.
        await engine.pause("retract", left_s())
        paused = self._clock()
        if not proof.settled:
            raise InstallFailed("no engine has shown yet what the release looks like")
        if self._flushes:
            await engine.flush(left_s())
        await _prove(engine, release.version, proof, [], None, left_s)
        proved = self._clock()
        await engine.resume(left_s())
        return Installed(0.0, 0.0, proved - paused, self._clock() - start)

    async def prove_own(self, engine: WeightTarget, proof: Proof) -> None:
        """Have an engine show that it holds the checkpoint that it was started from, and was
        never given another; memory that it has given up comes back first. It need not be paused:
        nothing changes. Raises as `install`."""
        start = self._clock()

        def left_s() -> float:
            return max(0.001, start + self._timeout_s - self._clock())

        await engine.resume_memory(tuple(engine.released), left_s())
        await _prove(engine, None, proof, [], None, left_s)


async def _prove(
    engine: WeightTarget,
    version: int | None,
    proof: Proof,
    before: Checksums,
    digest_before: str | None,
    left_s: Callable[[], float],
) -> None:
    """Raises InstallFailed."""
    held = await engine.held_version(left_s())
    if held != version:
        raise InstallFailed(f"the engine reports version {held}, not {version}")
    problem = proof.problem(await engine.checksums(left_s()), before, digest_before)
    if problem is not None:
        raise InstallFailed(problem)
