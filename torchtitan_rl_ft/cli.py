"""The `torchtitan` command. Nothing here imports torch; roles are imported when they run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import textwrap
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

from torchtitan_rl_ft.config import checks
from torchtitan_rl_ft.config.command_line import Override, split_overrides
from torchtitan_rl_ft.config.errors import ConfigError, near_miss
from torchtitan_rl_ft.config.help_texts import help_texts
from torchtitan_rl_ft.config.resolve import Resolved, resolve_overrides
from torchtitan_rl_ft.config.schema import load_schema
from torchtitan_rl_ft.config.sections import JobSection
from torchtitan_rl_ft.config.session_identity import identify
from torchtitan_rl_ft.config.toml_file import shipped
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.unread_output import while_read
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, RUN_ENV, RunFolder
from torchtitan_rl_ft.session_folder import SessionUnreadable

if TYPE_CHECKING:
    from torchtitan_rl_ft.roles.status import Target

ROLES = ("lighthouse", "serving", "rollout", "trainer", "inspector", "chaos")

DESCRIPTION = "RL post-training on TorchTitan that does not stop when machines do."

EPILOG = """\
exit codes: 0 done; 1 failed, a restart may help; 2 wrong configuration; 3 stopped on numeric
grounds; 4 wrong results; 75 saved, start again to go on; 130 interrupted. 2, 3 and 4 are not worth
a restart here.
"""

RUN_DESCRIPTION = """\
Run a job: lighthouse, serving with its engines, rollout and trainers, until it is done.
With --role, run one role of a job in this process.

Every key is set by --section.key VALUE (or =VALUE; a flag by --section.key or --section.no-key),
which goes over FILE, which goes over the registry function job.module:job.config, which goes over
the defaults. `torchtitan help SECTION` explains the keys of a section.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code (see ExitCode)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        overrides, rest = split_overrides(load_schema(), arguments)
        args = _parser().parse_args(rest)
        return args.command(args, overrides)
    except ConfigError as e:
        for problem in e.problems:
            _say(f"error: {problem}")
        return ExitCode.CONFIG
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchtitan",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    sections = textwrap.fill("sections: " + ", ".join(load_schema().sections), 96)
    files = "configs shipped with the package: " + ", ".join(shipped())
    common = {
        "epilog": f"{sections}\n{files}",
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    file_help = "TOML file: a path, or the name of a shipped one (same as --job.config_file)"

    run = commands.add_parser("run", help="run a job", description=RUN_DESCRIPTION, **common)
    run.add_argument("file", nargs="?", metavar="FILE", help=file_help)
    run.add_argument("--role", choices=ROLES, help="run only this role, in this process")
    run.add_argument(
        "--run-folder",
        metavar="DIR",
        help="take the configuration of the job that runs in DIR (its config.resolved.json)",
    )
    run.add_argument(
        "--keep-serving",
        action="store_true",
        help="keep serving and its engines after Ctrl-C too (rollout.keep_serving)",
    )
    run.set_defaults(command=_run)

    check = commands.add_parser(
        "check",
        help="check a configuration without starting anything",
        description="Print every value with its origin, then check them: rules between keys, "
        "TorchTitan's config, and the model on the meta device.",
        **common,
    )
    check.add_argument("file", nargs="?", metavar="FILE", help=file_help)
    check.add_argument("--quick", action="store_true", help="only what needs no torch")
    check.set_defaults(command=_check)

    _add_session_commands(commands, common)

    report = commands.add_parser(
        "report",
        help="tell what a run came to, prove its accounts, make a trace of it",
        description="Tell what the run in RUN came to so far: running, ended or crashed. With "
        "--ledger, prove from its journal that each sample was trained exactly once in the history "
        "that leads to the current parameters; the exit code is 1 when it was not.",
        **common,
    )
    report.add_argument(
        "run", nargs="?", metavar="RUN", help="a run folder; without it as for `status`"
    )
    what = report.add_mutually_exclusive_group()
    what.add_argument("--ledger", action="store_true", help="the accounts of the journal")
    report.add_argument("--json", action="store_true", help="everything, as JSON")
    what.add_argument(
        "--trace",
        nargs="?",
        const="",
        metavar="FILE",
        help="write a trace for ui.perfetto.dev (compressed when FILE ends in .gz); without FILE "
        "RUN/trace.json.gz",
    )
    report.set_defaults(command=_report)

    _add_chaos_command(commands, common)

    doctor = commands.add_parser(
        "doctor",
        help="tell what works on this machine, and how to mend what does not",
        description="Tell what works on this machine: libraries, transports of weights, networks, "
        "ports, memory, permissions. The exit code is 1 when something has to be mended.",
        **common,
    )
    doctor.add_argument("file", nargs="?", metavar="FILE", help=file_help)
    doctor.add_argument("--json", action="store_true", help="everything, as JSON")
    doctor.set_defaults(command=_doctor)

    helping = commands.add_parser("help", help="explain the keys of a section")
    helping.add_argument("section", nargs="?", metavar="SECTION")
    helping.set_defaults(command=_help)
    return parser


def _add_session_commands(commands: Any, common: dict[str, Any]) -> None:
    target_help = (
        "a run folder, or the id of a session; without it the run folder of --job.config_file, "
        "else the default one"
    )
    status = commands.add_parser(
        "status",
        help="tell how a job and its serving session are",
        description="Tell how a job and its serving session are. Without TARGET and without a run "
        "folder at the default place: all sessions of this user on this machine.",
        **common,
    )
    status.add_argument("target", nargs="?", metavar="TARGET", help=target_help)
    status.add_argument("--json", action="store_true", help="everything, as JSON")
    status.set_defaults(command=_status)

    stop = commands.add_parser(
        "stop",
        help="end a job and its serving session",
        description="End a running job as Ctrl-C does, then what is left of its serving session.",
        **common,
    )
    stop.add_argument("target", nargs="?", metavar="TARGET", help=target_help)
    stop.set_defaults(command=_stop)


def _add_chaos_command(commands: Any, common: dict[str, Any]) -> None:
    chaos = commands.add_parser(
        "chaos",
        help="inject faults into a running job, or record those of a run",
        description="Inject each LINE into the job that runs in RUN, now or at the moment that it "
        "names (docs/faults.md), tell whom it hit, and wait until the last one is over. Ctrl-C "
        'lifts what is held. Like: torchtitan chaos RUN "kill trainer-1" "stop rollout for 3 s"',
        **common,
    )
    chaos.add_argument("run", metavar="RUN", help="a run folder; with --record also events.jsonl")
    chaos.add_argument("lines", nargs="+", metavar="LINE", help="a fault; with --record: FILE")
    chaos.add_argument(
        "--record",
        action="store_true",
        help="write the faults that RUN has had to FILE, for chaos.replay",
    )
    chaos.set_defaults(command=_chaos)


# Commands -----------------------------------------------------------------------------------


def _run(args: argparse.Namespace, overrides: list[Override]) -> int:
    if args.keep_serving:
        overrides = [*overrides, Override("rollout.keep_serving", True)]
    resolved = _resolve(args.file, args.run_folder, overrides, needed="a job to run")
    _quick_checks(resolved, starting=True)
    try:
        if args.role is not None and ATTEMPT_ENV not in os.environ:
            from torchtitan_rl_ft.roles import job

            resolved = job.join(resolved)
        if args.role is None and resolved.sections.chaos.enable:
            from torchtitan_rl_ft.chaos import role as chaos

            resolved = chaos.made_ready(resolved)
    except OSError as e:
        _say(f"error: run folder {resolved.run_folder.path}: {e}")
        return ExitCode.FAILED
    return _role_main(args.role or "supervisor", resolved)


def role_module(role: str) -> str:
    """Where the `main` of a role is. Faults come from outside: no role knows of their injector."""
    return "torchtitan_rl_ft.chaos.role" if role == "chaos" else f"torchtitan_rl_ft.roles.{role}"


def _role_main(role: str, resolved: Resolved) -> int:
    return importlib.import_module(role_module(role)).main(resolved)


def _check(args: argparse.Namespace, overrides: list[Override]) -> int:
    from torchtitan_rl_ft.config import listing

    resolved = _resolve(args.file, None, overrides, needed="a job to check")
    with while_read():
        listing.show(resolved)
    session = identify(resolved)
    _say(f"serving session {session.id} ({session.rule})")
    _quick_checks(resolved, starting=False)
    if not args.quick:
        from torchtitan_rl_ft.config import deep_checks

        report = deep_checks.run(resolved)
        for warning in report.warnings:
            _say(f"warning: {warning}")
        if report.problems:
            raise ConfigError(report.problems)
        _say(report.summary)
    _say("the configuration is good")
    return ExitCode.DONE


def _status(args: argparse.Namespace, overrides: list[Override]) -> int:
    from torchtitan_rl_ft.roles import status

    with _session_errors(), while_read():
        status.main_status(_target(args.target, overrides), args.json)
    return ExitCode.DONE


def _stop(args: argparse.Namespace, overrides: list[Override]) -> int:
    from torchtitan_rl_ft.roles import status

    with _session_errors():
        target = _target(args.target, overrides)
        if target is None:
            raise ConfigError(
                "what to stop is named by a run folder or the id of a session: `torchtitan "
                "status` lists them"
            )
        return status.main_stop(target)


def _report(args: argparse.Namespace, overrides: list[Override]) -> int:
    from torchtitan_rl_ft.journal.errors import JournalError
    from torchtitan_rl_ft.roles import report

    if args.run is not None:
        folder = RunFolder(args.run)
    elif overrides:
        folder = resolve_overrides(overrides).run_folder
    else:
        folder = RunFolder(os.environ.get(RUN_ENV) or JobSection().dump_folder)
    if not folder.path.is_dir():
        raise ConfigError(f"{folder.path} is not a run folder: there is no such directory")
    if args.trace is not None:
        return report.main_trace(folder, args.trace, args.json)
    try:
        tell = report.main_ledger if args.ledger else report.main_summary
        return tell(folder, args.json)
    except JournalError as e:
        _say(f"error: {e}")
        return ExitCode.FAILED


def _chaos(args: argparse.Namespace, overrides: list[Override]) -> int:
    from torchtitan_rl_ft.chaos import command

    if overrides:
        raise ConfigError("torchtitan chaos takes the keys of the job in RUN: name none")
    if args.record and len(args.lines) != 1:
        raise ConfigError("--record takes one file: torchtitan chaos --record RUN FILE")
    try:
        if args.record:
            return command.main_record(args.run, args.lines[0])
        return command.main_inject(args.run, args.lines)
    except (OSError, ValueError) as e:
        _say(f"error: {args.run}: {e}")
        return ExitCode.FAILED


def _doctor(args: argparse.Namespace, overrides: list[Override]) -> int:
    from torchtitan_rl_ft.roles import doctor

    if args.file is not None:
        overrides = [Override("job.config_file", args.file), *overrides]
    resolved = resolve_overrides(overrides)
    if problems := checks.check_holders(resolved):
        raise ConfigError(problems)
    with while_read():
        return doctor.main(resolved, args.json)


@contextlib.contextmanager
def _session_errors() -> Generator[None]:
    """Raises ConfigError instead of what says that a session's files cannot be read."""
    try:
        yield
    except SessionUnreadable as e:
        raise ConfigError(str(e)) from None


def _target(name: str | None, overrides: list[Override]) -> Target | None:
    """What `status` and `stop` are about; None when nothing is named and the default run folder
    holds no job."""
    from torchtitan_rl_ft.roles.status import Target

    if name is not None:
        return Target.of(name)
    if overrides:
        return Target.of_job(resolve_overrides(overrides))
    default = RunFolder(os.environ.get(RUN_ENV) or JobSection().dump_folder)
    return Target.of(str(default.path)) if default.resolved_config.exists() else None


def _help(args: argparse.Namespace, overrides: list[Override]) -> int:
    with while_read():
        _explain(args.section)
    return ExitCode.DONE


def _explain(name: str | None) -> None:
    sections = load_schema().sections
    if name is None:
        for each in sections.values():
            keys = ", ".join(each.keys)
            print(textwrap.fill(f"[{each.name}] {keys}", 96, subsequent_indent="    "))
        return
    section = sections.get(name.strip("[]").replace("-", "_"))
    if section is None:
        raise ConfigError(
            f"unknown section [{name}]{near_miss(name, sections)}; `torchtitan help` lists them"
        )
    texts = help_texts(section)
    for key in section.keys.values():
        print(f"{key.path} = {key.default!r}  ({key.type})")
        if text := texts.get(key.name):
            print(textwrap.fill(text, 96, initial_indent="    ", subsequent_indent="    "))


# Parts --------------------------------------------------------------------------------------


def _resolve(
    file: str | None, run_folder: str | None, overrides: list[Override], needed: str
) -> Resolved:
    """From the run folder when one is named, else from the file."""
    given = {o.path: o.value for o in overrides}
    named = given.get("job.config_file")
    if file is not None:
        if named not in (None, file):
            raise ConfigError(f"two config files: {file} and --job.config_file {named}")
        overrides = [Override("job.config_file", file), *overrides]
        named = file
    if run_folder is None and named is None:
        run_folder = os.environ.get(RUN_ENV)
    if run_folder is not None:
        if named is not None or "job.dump_folder" in given:
            raise ConfigError("--run-folder brings its own configuration: name no other")
        return Resolved.read(run_folder).with_overrides(overrides)
    if named is None and "job.module" not in given:
        raise ConfigError(
            f"{needed} is named by a file: torchtitan run --job.config_file FILE "
            f"(shipped with the package: {', '.join(shipped())})"
        )
    return resolve_overrides(overrides)


def _quick_checks(resolved: Resolved, *, starting: bool) -> None:
    """Print notes and warnings, but not in a role of a job that has said them. Raises
    ConfigError."""
    report = checks.check(resolved, starting=starting)
    if ATTEMPT_ENV not in os.environ:
        for line in [*resolved.notes, *(f"warning: {w}" for w in report.warnings)]:
            _say(line)
    problems = [*report.problems, *_chaos_problems(resolved)]
    if problems:
        raise ConfigError(problems)


def _chaos_problems(resolved: Resolved) -> list[str]:
    chaos = resolved.sections.chaos
    if not (chaos.faults or chaos.mtbf_faults or chaos.replay):
        return []
    from torchtitan_rl_ft.chaos import job_plan

    return job_plan.problems(resolved)


def _say(line: str) -> None:
    print(f"torchtitan: {line}", file=sys.stderr, flush=True)
