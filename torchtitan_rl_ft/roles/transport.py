"""The transport of a job's policies: decided before anything is started, for all roles alike."""

from __future__ import annotations

from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.roles.session import Session
from torchtitan_rl_ft.weights.holder.leftovers import remove_leftovers
from torchtitan_rl_ft.weights.holder.settings import user_memory
from torchtitan_rl_ft.weights.transports.choice import Choice, Facts, TransportUnavailable, choose
from torchtitan_rl_ft.weights.transports.facts import gather

KEY = "rollout.weight_transport"


def decide(resolved: Resolved, session: Session) -> tuple[Resolved, Choice]:
    """The job with the transport in use in place of "auto", and why it is that one. Raises
    ConfigError: "nixl" was asked for and cannot be."""
    wanted = resolved.sections.rollout.weight_transport
    in_use = session.transport_in_use() if wanted != "disk" else None
    if in_use == "disk":
        reason = f"serving of session {session.folder.id}, which goes on, has no relays"
        if wanted == "nixl":
            raise ConfigError(f"{resolved.where(KEY)}: {reason}: end it first, or use auto")
        choice = Choice("disk", reason)
    elif in_use == "nixl":  # its relays have the memory and the ports that a job needs free
        choice = Choice("nixl", f"serving of session {session.folder.id} goes on")
    else:
        if wanted != "disk":  # runs that were killed as a whole keep no memory from this one
            remove_leftovers(user_memory(resolved.sections.weights.memory_folder))
        try:
            choice = choose(wanted, gather(resolved) if wanted != "disk" else Facts(None))
        except TransportUnavailable as e:
            raise ConfigError(f"{resolved.where(KEY)}: {e}") from None
    return resolved.with_choice(KEY, choice.transport, choice.reason), choice


def as_written(resolved: Resolved) -> Resolved:
    """For a role that is started by hand: with what the first role of the run folder has found,
    where its own configuration leaves that open. Raises ConfigError."""
    folder = resolved.run_folder
    if resolved.get(KEY) != "auto":
        return resolved
    found = Resolved.read(folder.path, only_to_look=True).get(KEY)
    return resolved.with_choice(KEY, found, f"in {folder.resolved_config}")
