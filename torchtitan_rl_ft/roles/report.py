"""What `torchtitan report` tells of a run, running or ended, from the files of its folder."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.debug_mode import DebugMode, debug_mode
from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.unread_output import while_read
from torchtitan_rl_ft.journal.ledger_report import LedgerReport
from torchtitan_rl_ft.observability.events import Event, Kind, read_events
from torchtitan_rl_ft.observability.json_text import text_of
from torchtitan_rl_ft.observability.metric_rows import read_metrics
from torchtitan_rl_ft.observability.summary import Summary, render, summarise
from torchtitan_rl_ft.observability.trace import write_trace
from torchtitan_rl_ft.run_folder import RunFolder

SUPERVISOR = "supervisor"
TRACE_FILE = "trace.json.gz"


def summary_of(resolved: Resolved, outcome: str | None = None) -> Summary:
    """What the run came to so far. `outcome`: None takes it from the run's own events."""
    folder = resolved.run_folder
    mode = debug_mode(resolved.sections.rollout)
    unread: list[int] = []
    lines = read_events(folder.events, lambda line: unread.append(len(line)))
    runs: list[Event] = []
    # Metrics of an earlier job of the folder say nothing of a job that trains nobody.
    trained = mode is not DebugMode.ROLLOUT_ONLY
    published = mode is not DebugMode.TRAIN_ONLY
    found = summarise(
        _noting(lines, runs) if folder.events.exists() else [],
        read_metrics(folder.metrics) if trained else [],
        outcome=outcome or "",
        total_steps=resolved.get("training.steps"),
        transport=resolved.sections.rollout.weight_transport if published else "",
        unread=unread,
    )
    return found if outcome is not None else replace(found, outcome=outcome_of(folder, runs))


def _noting(events: Iterable[Event], runs: list[Event]) -> Iterator[Event]:
    """The events, those of lives in `runs` too."""
    for event in events:
        if event.kind is Kind.RUN:
            runs.append(event)
        yield event


def outcome_of(folder: RunFolder, ends: list[Event]) -> str:
    """How the run ended, as the last of its RUN events says, or that it has not."""
    supervisor = folder.role(SUPERVISOR)
    if supervisor is not None and supervisor.alive():
        return "running"
    if ends and ends[-1].phase == "end":
        return f"{ends[-1].cause} (exit code {ends[-1].data.get('exit_code')})"
    return "ended without a word: its supervisor was killed" if ends else "never started"


def main_summary(folder: RunFolder, as_json: bool) -> int:
    """`torchtitan report RUN`. Raises ConfigError when RUN holds no job."""
    resolved = Resolved.read(folder.path, only_to_look=True)
    summary = summary_of(resolved)
    lines = render(summary, str(folder.path))
    if (note := resolved.version_note) is not None:
        lines.append(f"{'note':<11}{note}")
    _tell(as_json, _to_json(summary), lines)
    return ExitCode.DONE


def main_ledger(folder: RunFolder, as_json: bool) -> int:
    """`torchtitan report --ledger RUN`: FAILED when the accounts do not hold. Raises
    JournalError when there is no journal that can be read."""
    report = LedgerReport.of(folder.journal)
    _tell(as_json, report.to_json(), report.lines())
    return ExitCode.DONE if report.audit.ok else ExitCode.FAILED


def main_trace(folder: RunFolder, target: str, as_json: bool) -> int:
    """`torchtitan report --trace [FILE] RUN`. Raises ConfigError when there is nothing to read, or
    the file cannot be written."""
    path = Path(target) if target else folder.path / TRACE_FILE
    if path.is_dir():
        raise ConfigError(
            f"--trace {target}: it is a directory. Name a file, or put the run folder first: "
            f"torchtitan report {target} --trace"
        )
    if not folder.events.exists():
        raise ConfigError(f"{folder.path} has no {folder.events.name}: no job ran there")
    unread: list[int] = []
    events = read_events(folder.events, lambda line: unread.append(len(line)))
    try:
        rows = read_metrics(folder.metrics)
        found = write_trace(path, events, rows, {"run": folder.path.name})
    except OSError as e:
        raise ConfigError(f"the trace cannot be written to {path}: {e.strerror or e}") from e
    report = {"file": str(path), **asdict(found), "unread_lines": len(unread)}
    lines = [f"trace: {path}: {found.line()}; open it at https://ui.perfetto.dev"]
    if unread:
        lines.append(f"{len(unread)} lines of {folder.events.name} are torn or of another version")
    _tell(as_json, report, lines)
    return ExitCode.DONE


def _to_json(summary: Summary) -> dict[str, Any]:
    means = {"first_reward": summary.first_reward, "last_reward": summary.last_reward}
    if (saving := summary.saving) is not None:
        means |= {"mtbf_s": saving.mtbf_s, "save_interval_s": saving.interval_s}
    ettr = None if summary.ettr is None else summary.ettr.to_json()
    outages = [o.to_json() for o in summary.outages]
    return asdict(summary) | means | {"ettr": ettr, "outages": outages}


def _tell(as_json: bool, found: dict[str, Any], lines: list[str]) -> None:
    with while_read():
        print(text_of(found, indent=1) if as_json else "\n".join(lines))
