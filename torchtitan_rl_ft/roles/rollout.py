"""The rollout role: prompts, rewards, the journal and its ledger, in one process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
from tokenizers import Tokenizer

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode, journaling
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.profile_steps import parse_steps
from torchtitan_rl_ft.config.windows import groups_per_batch
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.loop_beats import beating
from torchtitan_rl_ft.journal import service as ledger_service
from torchtitan_rl_ft.journal.checkpoints import checker, finder
from torchtitan_rl_ft.journal.dump_files import DumpInvalid, DumpWriteError
from torchtitan_rl_ft.journal.errors import JournalError
from torchtitan_rl_ft.journal.exits import REQUEUE
from torchtitan_rl_ft.journal.ledger import Ledger
from torchtitan_rl_ft.journal.store import Journal
from torchtitan_rl_ft.observability.ettr_metrics import EttrMetrics
from torchtitan_rl_ft.observability.events import EventLog, Kind
from torchtitan_rl_ft.observability.live_ettr import LiveEttr
from torchtitan_rl_ft.observability.otel import export_events
from torchtitan_rl_ft.roles.exits import exits_of, note_of
from torchtitan_rl_ft.roles.sinks import sinks_of
from torchtitan_rl_ft.rollout import plugins, schedule, service
from torchtitan_rl_ft.rollout.dump_writer import DumpSettings, DumpWriter
from torchtitan_rl_ft.rollout.dumps import ModelIdentity
from torchtitan_rl_ft.rollout.engine_check import EngineCheck
from torchtitan_rl_ft.rollout.engine_profiles import EngineProfiles
from torchtitan_rl_ft.rollout.generation import ServingClient
from torchtitan_rl_ft.rollout.group_rollout import GroupRollout, Sampling
from torchtitan_rl_ft.rollout.initial_policy import announce_initial_policy
from torchtitan_rl_ft.rollout.judging import Judge
from torchtitan_rl_ft.rollout.loop import LoopSettings, RolloutLoop
from torchtitan_rl_ft.rollout.partials import PartialKeeper
from torchtitan_rl_ft.rollout.policy_watch import PolicyWatch
from torchtitan_rl_ft.rollout.protocols import PluginContext
from torchtitan_rl_ft.rollout.replay import DumpReplay, DumpSource
from torchtitan_rl_ft.rollout.starvation import RolloutStalled, Starvation
from torchtitan_rl_ft.rpc.server import make_app, start
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, RunFolder
from torchtitan_rl_ft.session_folder import Owner

if TYPE_CHECKING:
    from torchtitan_rl_ft.config.resolve import Resolved

NAME = "rollout"
logger = logging.getLogger(__name__)
_LINGER_POLL_S = 0.1


def main(resolved: Resolved) -> int:
    """Serve until the run is over; the exit code says how it went.

    Raises ConfigError (model directory without tokenizer, plug-in that cannot be loaded, a dump
    that cannot be trained on).
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    attempt = int(os.environ.get(ATTEMPT_ENV, "1"))
    folder = resolved.run_folder
    events = EventLog(folder.events, run=folder.path.name, role=NAME, name=NAME, attempt=attempt)
    export_events(events, resolved.sections.otel, folder.token(), metrics=folder.metrics)
    sinks = sinks_of(resolved, events)
    try:
        return asyncio.run(_interruptible(resolved, folder, events))
    except DumpInvalid as e:
        raise ConfigError(str(e)) from e
    except (JournalError, RolloutStalled, DumpWriteError, OSError) as e:
        events.emit(Kind.FAULT, cause=str(e), subject=NAME)
        print(f"torchtitan: error: {NAME}: {e}", flush=True)
        return ExitCode.FAILED
    finally:
        sinks.close()
        events.close()


async def _interruptible(resolved: Resolved, folder: RunFolder, events: EventLog) -> int:
    """SIGTERM and SIGINT end the role at once; what is accepted is in the journal."""
    task = asyncio.ensure_future(_run(resolved, folder, events))
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        # Under a scheduler's exit policy it is to be started again, and goes on.
        again = resolved.sections.recovery.exit_signal_handler and ATTEMPT_ENV not in os.environ
        return ExitCode.REQUEUE if again else ExitCode.INTERRUPTED


async def _run(resolved: Resolved, folder: RunFolder, events: EventLog) -> int:
    sections = resolved.sections
    mode = debug_mode(sections.rollout)
    tokenizer = load_tokenizer(model_directory(resolved))
    token = folder.token()
    async with contextlib.AsyncExitStack() as stack:
        parts = None
        if mode is not DebugMode.TRAIN_ONLY:
            parts = _Parts(resolved, tokenizer, events)
            limit_s = sections.rollout.cleanup_timeout
            stack.push_async_callback(_close_judge, parts.judge, limit_s, events)
        ledger = _ledger(resolved, folder, stack.enter_context(_journal(resolved, events)), events)
        if sections.recovery.exit_signal_handler and ATTEMPT_ENV in os.environ:
            # The signal is to the whole job: its ledger is needed until the end.
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGTERM, ledger.ask_exit, "SIGTERM to the rollout role"
            )
        # One connection per request in flight; serving is one hop away on this host.
        session = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        client = ServingClient(
            session, lambda: _url(folder, "serving"), token, on_awaited=ledger.publish_awaited
        )
        driver: RolloutLoop | DumpReplay
        if parts is None:
            source = dump_source(resolved)
            source.check(model_identity(resolved, tokenizer))
            driver = DumpReplay(ledger, source, events)
        else:
            driver = parts.loop(ledger, client)
        app = make_app(token, [*ledger_service.routes(ledger), *service.routes(driver)])
        url, runner = await start(app)
        stack.push_async_callback(runner.cleanup)
        folder.register(NAME, url)
        stack.callback(folder.unregister, NAME)
        events.emit(Kind.READY, url=url)
        await stack.enter_async_context(beating(folder.phases, NAME))
        if mode is DebugMode.ROLLOUT_ONLY:
            await announce_initial_policy(
                client, model_directory(resolved), folder.weights, _serving_limit_s(resolved)
            )
        profiles = _engine_profiles(resolved, client, ledger, events)
        if profiles is not None:
            profiles.begin(ledger.changed)
            stack.callback(profiles.cancel)
        await driver.run()
        if profiles is not None:
            await profiles.finish(sections.rollout.cleanup_timeout)
        await _linger(ledger, sections.recovery.batch_wait_timeout_s)
        code = _exit_code(ledger)
        if code == ExitCode.REQUEUE and not ledger.tip_saved():
            step = ledger.journal.tip.step
            events.emit(
                Kind.WARN, cause=f"step {step} was not saved: an earlier one is gone on from"
            )
    if mode is not DebugMode.NONE and code == ExitCode.DONE:
        folder.remove_scratch()
    return code


async def _close_judge(judge: Judge, limit_s: float, events: EventLog) -> None:
    """What the user's code fails to let go does not undo a run."""
    try:
        async with asyncio.timeout(limit_s):
            await judge.close()
    except Exception as e:  # user code: told, and skips nothing of what is left to close
        logger.exception("close() of the reward failed")
        cause = f"close() of rl.reward failed: {type(e).__name__}: {e}"
        events.emit(Kind.WARN, cause=cause, subject=NAME)


def _journal(resolved: Resolved, events: EventLog) -> Journal:
    """The run's, or in a debug mode a scratch one that this job alone knows."""
    rollout, folder = resolved.sections.rollout, resolved.run_folder
    if debug_mode(rollout) is DebugMode.NONE:
        return Journal.open(folder.journal, events=events, durable=rollout.journal)
    if ATTEMPT_ENV not in os.environ:  # by hand: nobody has tidied up
        folder.remove_scratch()
    return Journal.open(folder.scratch_journal, events=events)


def _ledger(resolved: Resolved, folder: RunFolder, journal: Journal, events: EventLog) -> Ledger:
    sections = resolved.sections
    return Ledger(
        journal,
        events=events,
        metrics_path=folder.metrics,
        why_incomplete=checker(folder.path),
        find_checkpoints=finder(folder.path / str(resolved.get("checkpoint.folder"))),
        keep_checkpoints=int(resolved.get("checkpoint.keep_latest_k")),
        last_step=int(resolved.get("training.steps")),
        max_numeric_refusals=sections.recovery.max_numeric_refusals,
        publishes=debug_mode(sections.rollout) is not DebugMode.TRAIN_ONLY,
        exits=exits_of(resolved),
        of_run=_ettr_metrics(resolved),
    )


def _ettr_metrics(resolved: Resolved) -> EttrMetrics:
    section = resolved.sections.observability
    window_s, every_s = section.ettr_window_s, section.ettr_sample_s
    live = LiveEttr(resolved.run_folder.events, window_s=window_s, every_s=every_s)
    return EttrMetrics(live, every_s)


class _Parts:
    """What generates, judges and dumps. Raises ConfigError when a plug-in cannot be loaded."""

    def __init__(self, resolved: Resolved, tokenizer: Tokenizer, events: EventLog) -> None:
        rl, rollout = resolved.sections.rl, resolved.sections.rollout
        self._resolved, self._tokenizer, self._events = resolved, tokenizer, events
        context = PluginContext(rl.seed, tokenizer, model_directory(resolved))
        self._source = plugins.load_data_source(
            rl.data_source, context, journaling=journaling(rollout)
        )
        self.judge = Judge(
            plugins.load_reward(rl.reward, context),
            plugins.load_filter(rl.filter, context),
            timeout_s=rollout.request_timeout_s,
        )

    def loop(self, ledger: Ledger, client: ServingClient) -> RolloutLoop:
        """Raises ConfigError when the journal is of another data source."""
        resolved, events = self._resolved, self._events
        starvation = _starvation(resolved, events)
        rollout = GroupRollout(
            client,
            self._tokenizer,
            self.judge,
            _sampling(resolved),
            on_unavailable=starvation.unavailable,
            on_available=starvation.available,
            on_failed=starvation.failed,
            on_discarded=lambda name, cause, tokens: events.emit(
                Kind.PARTIAL, phase="discard", cause=cause, subject=name, tokens=tokens
            ),
        )
        interval_tokens = resolved.sections.recovery.partial_interval_tokens
        check = EngineCheck(
            client,
            events,
            resolved.sections.rollout.health_check_timeout,
            on_done=lambda: loop.wake(),
            colocated=resolved.sections.rollout.placement == "colocated",
        )
        watch = PolicyWatch(client, on_change=lambda: loop.wake())
        dumps = None
        if (settings := dump_settings(resolved, self._tokenizer)) is not None:
            dumps = DumpWriter(
                ledger.journal, self._tokenizer, settings, events, on_written=lambda: loop.wake()
            )
        try:
            loop = RolloutLoop(
                ledger,
                self._source,
                rollout,
                watch,
                starvation,
                loop_settings(resolved),
                events,
                engine_check=check,
                dumps=dumps,
                partials=PartialKeeper(ledger.journal, events, interval_tokens),
                drain_note=note_of(resolved.run_folder, Owner.from_environment(), "drain.json"),
            )
        except ValueError as e:
            spec = resolved.sections.rl.data_source
            raise ConfigError(f"rl.data_source = {spec!r}: {e}") from e
        return loop


async def _linger(ledger: Ledger, timeout_s: float) -> None:
    """Stay until every trainer has been told to stop and has ended: the last checkpoint is
    reported here. A trainer that falls silent counts as ended."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end and any(m["alive"] for m in ledger.status()["members"]):
        await asyncio.sleep(_LINGER_POLL_S)


def _exit_code(ledger: Ledger) -> int:
    outcome = ledger.outcome
    assert outcome is not None
    if outcome.kind == "failed":
        print(f"torchtitan: error: {NAME}: {outcome.reason}", flush=True)
        return ExitCode.FAILED
    return ExitCode.REQUEUE if outcome.kind == REQUEUE else ExitCode.DONE


# Parts from the configuration ---------------------------------------------------------------


def model_directory(resolved: Resolved) -> Path:
    """The HF directory of the initial model."""
    assets = resolved.sections.model.hf_assets_path
    return Path(assets) if assets else resolved.run_folder.model


def load_tokenizer(model_path: Path) -> Tokenizer:
    """Raises ConfigError."""
    file = model_path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(
            f"the model directory {model_path} has no tokenizer.json: put the model's tokenizer "
            "there (Hugging Face's fast format), or set model.hf_assets_path to a directory that "
            "has one"
        )
    try:
        return Tokenizer.from_file(str(file))
    except Exception as e:  # the library raises plain Exception
        raise ConfigError(f"{file} is not a tokenizer: {e}") from e


def loop_settings(resolved: Resolved) -> LoopSettings:
    rl, rollout = resolved.sections.rl, resolved.sections.rollout
    return LoopSettings(
        rules=schedule.Rules(
            mode=rl.mode,
            start_fraction=rl.start_fraction,
            max_policy_age=rl.max_policy_age,
            groups_per_step=groups_per_batch(rl, resolved.sections.fault_tolerance),
            total_steps=int(resolved.get("training.steps")),
        ),
        advantage_norm=rl.advantage_norm,
        loss_norm=rl.loss_norm,
        newest_version_only=rl.mask_off_policy_prefix,
        max_group_crashes=rl.max_prompt_failures,
        max_concurrent_groups=rollout.max_concurrent_groups,
        max_prompt_tokens=rollout.max_prompt_tokens,
        eval_prompts=rl.eval_prompts,
        eval_path=resolved.run_folder.path / "eval.json",
        drain_timeout_s=rollout.request_timeout_s,
        final_policy_timeout_s=resolved.sections.recovery.batch_wait_timeout_s,
        trainers=debug_mode(rollout) is not DebugMode.ROLLOUT_ONLY,
    )


def model_identity(resolved: Resolved, tokenizer: Tokenizer) -> ModelIdentity:
    """Raises ConfigError."""
    path = model_directory(resolved)
    try:
        return ModelIdentity.of(path, tokenizer)
    except (OSError, ValueError, KeyError) as e:
        raise ConfigError(f"{path / 'config.json'} is no model's: {type(e).__name__}: {e}") from e


def dump_settings(resolved: Resolved, tokenizer: Tokenizer) -> DumpSettings | None:
    """None: nothing is dumped. Raises ConfigError."""
    rollout = resolved.sections.rollout
    if not rollout.save_debug_rollout_data:
        return None
    return DumpSettings(
        template=rollout.save_debug_rollout_data,
        run_folder=resolved.run_folder.path,
        model=model_identity(resolved, tokenizer),
        run_seed=resolved.sections.rl.seed,
        required=debug_mode(rollout) is DebugMode.ROLLOUT_ONLY,
    )


def dump_source(resolved: Resolved) -> DumpSource:
    rl, rollout = resolved.sections.rl, resolved.sections.rollout
    return DumpSource(
        template=rollout.load_debug_rollout_data,
        run_folder=resolved.run_folder.path,
        total_steps=int(resolved.get("training.steps")),
        share=rollout.load_debug_rollout_data_subsample,
        seed=rl.seed,
        loss_norm=rl.loss_norm,
        seq_len=int(resolved.get("training.seq_len")),
    )


def _sampling(resolved: Resolved) -> Sampling:
    rl, rollout = resolved.sections.rl, resolved.sections.rollout
    return Sampling(
        samples=rl.samples_per_prompt,
        params={
            "temperature": rollout.temperature,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "max_new_tokens": rollout.max_response_tokens,
            "stop_token_ids": list(rollout.stop_token_ids),
        },
        run_seed=rl.seed,
        timeout_s=rollout.request_timeout_s,
        max_failures=rl.max_prompt_failures,
        partial_interval_tokens=resolved.sections.recovery.partial_interval_tokens,
        trace=resolved.sections.observability.trace_samples,
    )


def _engine_profiles(
    resolved: Resolved, client: ServingClient, ledger: Ledger, events: EventLog
) -> EngineProfiles | None:
    observing = resolved.sections.observability
    if not observing.profile_engines:
        return None
    steps = parse_steps(observing.profile_steps)
    folder = resolved.run_folder.profiles / f"engines_{steps[0]}-{steps[-1]}"
    journal = ledger.journal
    return EngineProfiles(client, steps, folder, lambda: journal.tip.step + 1, events)


def _starvation(resolved: Resolved, events: EventLog) -> Starvation:
    return Starvation(
        events,
        unavailable_limit_s=_serving_limit_s(resolved),
        groups_per_step=groups_per_batch(resolved.sections.rl, resolved.sections.fault_tolerance),
        mono_s=time.monotonic,
        warn_silent_s=resolved.sections.rl.warn_silent_s,
        max_silent_s=resolved.sections.rl.max_silent_s,
        max_dropped_batches=resolved.sections.rl.max_dropped_batches,
        max_flat_batches=resolved.sections.rl.max_flat_batches,
    )


def _serving_limit_s(resolved: Resolved) -> float:
    """Engines may have to start anew: serving is given the time for that."""
    return max(
        resolved.sections.recovery.batch_wait_timeout_s,
        resolved.sections.rollout.engine_start_timeout_s,
    )


def _url(folder: RunFolder, name: str) -> str | None:
    role = folder.role(name)
    return role.url if role is not None else None
