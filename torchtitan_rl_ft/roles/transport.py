"""The transport of a job's weights, written into its configuration when it starts: all roles read
the same there, whatever becomes of the machine meanwhile."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.session_identity import CHOSEN_KEY as KEY
from torchtitan_rl_ft.config.session_identity import identify
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.session_folder import SessionFolder, SessionUnreadable
from torchtitan_rl_ft.weights.transports.choice import (
    Choice,
    Facts,
    TransportUnavailable,
    choose,
)
from torchtitan_rl_ft.weights.transports.facts import observe


def with_transport(resolved: Resolved, look: Callable[[Resolved], Facts] = observe) -> Resolved:
    """`resolved` with the transport that the job uses, `auto` no more. The serving session that it
    will take over has one already.

    Raises ConfigError: `nixl` was asked for and cannot be.
    """
    wanted = resolved.get(KEY)
    if wanted == "disk":
        return resolved
    if wanted == "auto" and (known := _living(resolved)) is not None:
        return resolved.with_choice(KEY, known, "as the living serving session")
    try:
        found = choose(wanted, look(resolved))
    except TransportUnavailable as e:
        raise ConfigError(f"{resolved.where(KEY)}: {e}") from None
    if wanted == "auto":
        print(f"torchtitan: {told(found)}", file=sys.stderr, flush=True)
    return resolved.with_choice(KEY, found.transport, found.reason)


def as_written(resolved: Resolved, folder: RunFolder) -> Resolved:
    """`resolved` with the transport of the run in `folder`, where it leaves that open. Raises
    ConfigError."""
    if resolved.get(KEY) != "auto":
        return resolved
    first = Resolved.read(folder.path)
    return resolved.with_choice(KEY, first.get(KEY), f"in {folder.resolved_config}")


def told(found: Choice) -> str:
    return f"weights travel by {found.transport}: {found.reason}"


def _living(resolved: Resolved) -> Any:
    """What the session that the job finds was started with; None when there is none."""
    session = SessionFolder(identify(resolved).id)
    with contextlib.suppress(SessionUnreadable):
        record = session.read()
        if record is not None and session.living():
            return record.frozen.get(KEY)
    return None
