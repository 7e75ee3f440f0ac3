"""Keeps the roles of a run up: starts them, notices exits at once, restarts by role, ends all.

What an exit means is decided in `lifecycle.py`; this file carries decisions out.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.footprint import Footprint
from torchtitan_rl_ft.host.log_tail import last_lines
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.roles.cleanup import Cleanup
from torchtitan_rl_ft.roles.exits import GracefulExit
from torchtitan_rl_ft.roles.lifecycle import (
    COMPLETE,
    Action,
    Duty,
    RestartLimits,
    Verdict,
    after_exit,
)
from torchtitan_rl_ft.roles.outcome import Kept, Nothing, Outcome, with_leftovers
from torchtitan_rl_ft.roles.role_spec import RoleSpec
from torchtitan_rl_ft.roles.standby import Standby, Standbys
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, ProcessId, RunFolder

TERM_GRACE_SHARE = 0.5
"""Share of the clean-up budget that roles get between SIGTERM and SIGKILL."""

EXIT_PHASES = {
    Action.FINISHED: "finished",
    Action.DONE: "finished",
    Action.STOPPED: "stopped",
    Action.RESTART: "fault",
    Action.FAIL: "fault",
    Action.EXPELLED: "fault",
    Action.ABANDON: "fault",
}
"""`phase` of the EXIT event by what was decided."""


class RoleKeeper:
    """Keeps `specs` running until the driver is done, a role cannot be kept, or a signal comes."""

    def __init__(
        self,
        folder: RunFolder,
        specs: Sequence[RoleSpec],
        events: EventSink,
        *,
        env: Mapping[str, str],
        limits: RestartLimits,
        cleanup_timeout_s: float,
        worker_end_timeout_s: float,
        session: Kept | None = None,
        standbys: Standbys | None = None,
        look_over_interval_s: float = 5.0,
        min_workers: int = 1,
        graceful: GracefulExit | None = None,
    ) -> None:
        """`worker_end_timeout_s`: how long the run may go on once all workers are finished.
        `look_over_interval_s`: how often its processes are looked over (what they hold, adopted
        zombies). `graceful`: what SIGTERM means; without it that is the end at once.
        `min_workers`: with fewer left, after one was expelled, the run ends."""
        self._folder, self._specs, self._events = folder, specs, events
        self._env, self._limits = env, limits
        self._cleanup_timeout_s = cleanup_timeout_s
        self._worker_end_timeout_s = worker_end_timeout_s
        self._look_over_interval_s = look_over_interval_s
        self._min_workers = min_workers
        self._session: Kept = session or Nothing()
        self._standbys = standbys or Standbys(folder, events)
        self._children: dict[str, process.Child | process.Adopted] = {}
        self._trees: dict[str, set[ProcessId]] = {}  # what each role was last seen to have started
        self._finished: set[str] = set()  # ended with code 0, for good
        self._gone: set[str] = set()  # ended for good, whatever the code
        self._footprint = Footprint()
        self._stopping = False
        self._hurry = asyncio.Event()
        self._graceful = graceful
        self._outcome: asyncio.Future[Outcome]

    async def run(self) -> Outcome:
        """Start everything, wait for the end, stop everything. Never raises for a role's fault."""
        loop = asyncio.get_running_loop()
        self._outcome = loop.create_future()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            graceful = self._graceful is not None and signum != signal.SIGHUP
            if graceful or signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, background jobs
                loop.add_signal_handler(signum, self._on_signal, signum)
        tasks = [
            asyncio.create_task(
                self._keep_standby(spec) if spec.duty is Duty.STANDBY else self._keep(spec)
            )
            for spec in self._specs
        ]
        tasks.append(asyncio.create_task(self._look_over()))
        for task in tasks:
            task.add_done_callback(self._on_task_end)
        try:
            outcome = await self._outcome
            if outcome.exit_code in COMPLETE:
                outcome = await self._let_workers_finish(outcome)
        except asyncio.CancelledError:
            outcome = Outcome(ExitCode.FAILED, "the supervisor was cancelled")
            await self._stop_all(tasks, outcome)
            raise
        return await self._stop_all(tasks, outcome)

    # Keeping roles up -------------------------------------------------------------------

    async def _keep(self, spec: RoleSpec) -> None:
        restarts_s: list[float] = []
        if self._outcome.done():
            return
        started = self._spawn(spec) if spec.adopt is None else self._adopt(spec, *spec.adopt)
        while started is not None:
            attempt, child = started
            verdict = await self._ended(spec, attempt, child, restarts_s)
            if verdict.action is not Action.RESTART:
                return
            started = await self._next_start(spec, attempt, verdict)

    async def _keep_standby(self, spec: RoleSpec) -> None:
        restarts_s: list[float] = []
        await self._standbys.under_way()
        while not self._outcome.done():
            attempt, child = self._spawn(spec)
            standby = self._standbys.started(spec.name, attempt, child)
            gone = asyncio.create_task(child.wait())
            await asyncio.wait({gone, standby.promoted}, return_when=asyncio.FIRST_COMPLETED)
            if standby.promoted.done():  # the keeper of its group waits for its end
                gone.cancel()
                await self._standbys.under_way(standby.promoted.result())
                continue
            self._standbys.ended(standby)
            verdict = await self._ended(spec, attempt, child, restarts_s)
            if verdict.action is not Action.RESTART:
                return
            await self._pause(spec, attempt, verdict)

    async def _ended(
        self,
        spec: RoleSpec,
        attempt: int,
        child: process.Child | process.Adopted,
        restarts_s: list[float],
    ) -> Verdict:
        """What the end of a role means, once it has come, recorded and carried out but for a
        restart, which is counted in `restarts_s`."""
        returncode = await child.wait()
        now_s = time.monotonic()
        verdict = after_exit(
            spec.duty,
            returncode,
            ending=self._outcome.done() or self._leaving(spec),
            now_s=now_s,
            restarts_s=restarts_s,
            limits=self._limits,
        )
        self._record_exit(spec, attempt, child, returncode, verdict)
        if not spec.outlives_parent:
            # What the dead process started must not live beside its successor.
            await self._end_orphans(spec.name, child)
        if verdict.action is Action.RESTART:
            restarts_s.append(now_s)
        else:
            self._carry_out(spec, child, returncode, verdict)
        return verdict

    async def _next_start(
        self, spec: RoleSpec, attempt: int, verdict: Verdict
    ) -> tuple[int, process.Child] | None:
        """A standby in the place of a lost group, else a new process. None: the run is ending."""
        if spec.duty is Duty.WORKER:
            promoted = await self._standbys.promote(spec.name, verdict.reason)
            if promoted is not None:
                return self._hand_over(spec, *promoted)
        await self._pause(spec, attempt, verdict)
        return None if self._outcome.done() else self._spawn(spec)

    def _hand_over(
        self, spec: RoleSpec, attempt: int, standby: Standby
    ) -> tuple[int, process.Child]:
        """The standby's process is the role's from now on."""
        del self._children[standby.name]
        self._children[spec.name] = standby.child
        self._trees[spec.name] = self._trees.pop(standby.name, set())
        self._emit_spawn(spec, attempt, standby.child, phase="promoted")
        return attempt, standby.child

    async def _pause(self, spec: RoleSpec, attempt: int, verdict: Verdict) -> None:
        self._events.emit(
            Kind.RESTART,
            phase=verdict.rung,
            cause=verdict.reason,
            subject=spec.name,
            attempt=attempt + 1,
            delay_s=verdict.delay_s,
        )
        await asyncio.sleep(verdict.delay_s)

    def _spawn(self, spec: RoleSpec) -> tuple[int, process.Child]:
        attempt = self._folder.next_attempt(spec.name)
        log = self._folder.log_file(spec.name, attempt)
        env = {**self._env, **spec.env, ATTEMPT_ENV: str(attempt)}
        child = process.spawn(spec.argv, log=log, env=env, outlives_parent=spec.outlives_parent)
        self._children[spec.name] = child
        self._emit_spawn(spec, attempt, child)
        return attempt, child

    def _adopt(self, spec: RoleSpec, target: ProcessId, log: Path) -> tuple[int, process.Adopted]:
        attempt = self._folder.next_attempt(spec.name) - 1
        child = self._children[spec.name] = process.Adopted(target, log)
        self._emit_spawn(spec, attempt, child, phase="adopted")
        return attempt, child

    def _emit_spawn(
        self,
        spec: RoleSpec,
        attempt: int,
        child: process.Child | process.Adopted,
        phase: str | None = None,
    ) -> None:
        self._events.emit(
            Kind.SPAWN,
            phase=phase,
            subject=spec.name,
            attempt=attempt,
            pid=child.pid,
            start_time=child.id.start_time,
            log=str(child.log),
        )

    def _record_exit(
        self,
        spec: RoleSpec,
        attempt: int,
        child: process.Child | process.Adopted,
        returncode: int | None,
        verdict: Verdict,
    ) -> None:
        phase = EXIT_PHASES[verdict.action]
        self._events.emit(
            Kind.EXIT,
            phase=phase,
            cause=process.describe(returncode),
            subject=spec.name,
            attempt=attempt,
            pid=child.pid,
            returncode=returncode,
            signal=-returncode if returncode is not None and returncode < 0 else None,
            uptime_s=round(time.monotonic() - child.started_mono_s, 3),
            log=str(child.log),
            last_lines=last_lines(child.log) if phase == "fault" else [],
        )

    def _carry_out(
        self,
        spec: RoleSpec,
        child: process.Child | process.Adopted,
        returncode: int | None,
        verdict: Verdict,
    ) -> None:
        self._gone.add(spec.name)
        if returncode in COMPLETE:
            self._finished.add(spec.name)
        workers = {s.name for s in self._specs if s.duty is Duty.WORKER}
        too_few = len(workers - self._gone) < self._min_workers
        if verdict.action is Action.DONE:
            self._end(Outcome(verdict.exit_code, verdict.reason))
        elif verdict.action is Action.ABANDON:
            cause = f"given up: {process.describe(returncode)} ({verdict.reason})"
            self._events.emit(Kind.WARN, cause=cause, subject=spec.name)
        elif verdict.action is Action.FAIL or (verdict.action is Action.EXPELLED and too_few):
            self._events.emit(
                Kind.ESCALATE, phase=verdict.rung, cause=verdict.reason, subject=spec.name
            )
            cause = (
                f"{spec.name}: {process.describe(returncode)} ({verdict.reason}); log: {child.log}"
            )
            self._end(Outcome(verdict.exit_code, cause, last_lines(child.log)))

    async def _end_orphans(self, name: str, child: process.Child | process.Adopted) -> None:
        """End what a role that has ended by itself left running."""
        left = {p for p in self._trees.pop(name, set()) if p.alive()}
        left.update(process.session_members(child.pid))
        await process.kill_until_gone(left, time.monotonic() + self._cleanup_timeout_s)

    async def _look_over(self) -> None:
        all_finished_s: float | None = None
        while True:
            for name, child in self._children.items():
                if child.id.alive():
                    self._trees[name] = set(process.descendants(child.id))
            self._footprint.observe({*process.descendants(), *self._session.processes()})
            process.reap_adopted(c.pid for c in self._children.values())
            workers = {s.name for s in self._specs if s.duty is Duty.WORKER}
            if workers and workers <= self._finished:
                now_s = time.monotonic()
                all_finished_s = all_finished_s or now_s
                if now_s - all_finished_s > self._worker_end_timeout_s:
                    raise TimeoutError(
                        f"all trainers have finished but the run did not end within "
                        f"{self._worker_end_timeout_s:g} s"
                    )
            await asyncio.sleep(self._look_over_interval_s)

    # Ending -----------------------------------------------------------------------------

    def _end(self, outcome: Outcome) -> None:
        if not self._outcome.done():
            self._outcome.set_result(outcome)

    def _leaving(self, spec: RoleSpec) -> bool:
        """The run comes to a step boundary: a group that has ended need not come back for it."""
        asked = self._graceful is not None and self._graceful.asked
        return asked and spec.duty is Duty.WORKER

    def _on_signal(self, signum: signal.Signals) -> None:
        if signum == signal.SIGTERM and self._graceful is not None and not self._outcome.done():
            self._graceful.on_sigterm(self._give_up)
            return
        if self._outcome.done():
            self._hurry.set()  # a second signal: no more grace
        self._end(Outcome(ExitCode.INTERRUPTED, f"stopped by {signum.name}"))

    def _give_up(self, why: str) -> None:
        """No step boundary was reached. What is in the journal and the newest checkpoint is
        enough to go on from, so the run is to be started again all the same."""
        self._hurry.set()
        self._end(Outcome(ExitCode.REQUEUE, f"{why}: goes on from the newest checkpoint"))

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """An error of the supervisor itself (a full disk, no process to be had) ends the run."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._end(Outcome(ExitCode.FAILED, f"supervisor: {type(error).__name__}: {error}"))

    async def _let_workers_finish(self, outcome: Outcome) -> Outcome:
        """After the driver's end: the workers end by themselves. One that was being restarted
        then cannot, and need not, as long as another has."""
        workers = [s.name for s in self._specs if s.duty is Duty.WORKER]
        deadline = time.monotonic() + self._cleanup_timeout_s
        while not set(workers) <= self._gone:
            if time.monotonic() >= deadline or self._hurry.is_set():
                break
            await asyncio.sleep(0.05)
        late = [name for name in workers if name not in self._finished]
        # A run that was stopped has told itself what was saved.
        if len(late) < len(workers) or not workers or outcome.exit_code == ExitCode.REQUEUE:
            if late:
                self._events.emit(Kind.WARN, cause=f"had not finished at the run's end: {late}")
            return outcome
        logs = ", ".join(str(self._children[n].log) for n in late)
        cause = f"the run is done, but no trainer ended with exit code 0; logs: {logs}"
        return Outcome(ExitCode.FAILED, cause, last_lines(self._children[late[0]].log))

    async def _stop_all(self, tasks: Sequence[asyncio.Task[None]], outcome: Outcome) -> Outcome:
        """SIGTERM to the roles, then SIGKILL to whatever is left of their trees, all within the
        clean-up budget; what is to be kept is let go instead. Returns the outcome with what is
        still there."""
        kept = self._session.may_be_kept(outcome.exit_code)
        ending = {s.name for s in self._specs if not (kept and s.outlives_parent)}
        children = [c for name, c in self._children.items() if name in ending]
        everything = self._present()
        self._footprint.observe(everything)
        # With a graceful exit SIGTERM asks a role for one, and SIGINT is the end at once.
        stop_signal = signal.SIGTERM if self._graceful is None else signal.SIGINT
        if self._graceful is not None:
            await self._graceful.close()

        async def stop_roles(limit_s: float) -> None:
            for child in children:
                process.kill(child.id, stop_signal)
            grace_s = min(limit_s, TERM_GRACE_SHARE * self._cleanup_timeout_s)
            await self._wait_for_roles(children, time.monotonic() + 0.95 * grace_s)

        async def kill_the_rest(limit_s: float) -> None:
            deadline = time.monotonic() + 0.95 * limit_s
            known = everything
            # Orphans are adopted by this process, so that nothing below it escapes.
            while left := self._but_for_kept({*known, *process.descendants()}, kept):
                self._footprint.observe(left)
                known = set(await process.kill_until_gone(left, deadline))
                if known:
                    return  # told below

        async def settle(_: float) -> None:
            await self._settle(tasks)

        cleanup = Cleanup(self._cleanup_timeout_s, steps=4)
        await cleanup.step("stop the roles", stop_roles)
        await cleanup.step("kill what is left", kill_the_rest)
        if kept:
            await cleanup.step("release the session", self._session.release)
        else:
            await cleanup.step("end the session", self._session.dispose)
        await cleanup.step("record the ends", settle)
        if kept:
            self._footprint.forget(self._session.processes())
        self._footprint.remove_shared_memory()
        process.reap_adopted(c.pid for c in self._children.values())
        for name in ending:
            self._folder.unregister(name)
        return with_leftovers(outcome, cleanup, self._footprint.leftovers(), kept)

    def _present(self) -> set[ProcessId]:
        return {*process.descendants(), *self._session.processes()}

    def _but_for_kept(self, found: set[ProcessId], kept: bool) -> set[ProcessId]:
        found = {p for p in found if p.alive()}
        return found - self._session.processes() if kept else found

    async def _wait_for_roles(
        self, children: Sequence[process.Child | process.Adopted], deadline_mono_s: float
    ) -> None:
        while time.monotonic() < deadline_mono_s and not self._hurry.is_set():
            if not any(c.id.alive() for c in children):
                return
            await asyncio.sleep(0.02)

    async def _settle(self, tasks: Sequence[asyncio.Task[None]]) -> None:
        """Let the keepers record the exits; those in a pause before a restart are cancelled."""
        await asyncio.wait(tasks, timeout=0.2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
