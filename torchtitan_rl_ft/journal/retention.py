"""Which checkpoint folders may be removed. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from torchtitan_rl_ft.journal.checkpoints import Found, folder_name
from torchtitan_rl_ft.journal.protocol import CheckpointRef, State


def superfluous(
    found: Sequence[Found],
    *,
    keep: int,
    on_chain: Callable[[State], bool],
    why_incomplete: Callable[[CheckpointRef], str | None],
    being_saved: Collection[State],
) -> list[str]:
    """Paths to remove so that the newest `keep` complete checkpoints of this history stay, and
    with them whatever is newer or still being written. 0: all stay.

    Nothing is removed before `keep` are complete. Then go: older ones, torn ones, and those of
    superseded histories, up to the newest that stays.
    """
    if not keep:
        return []
    writing = {folder_name(state.step, state.token) for state in being_saved}
    complete = sorted(
        (
            f
            for f in found
            if f.token is not None
            and on_chain(State(f.step, f.token))
            and why_incomplete(CheckpointRef(f.step, f.token, f.path)) is None
        ),
        key=lambda f: f.step,
    )
    if len(complete) < keep:
        return []
    stays, newest = {f.path for f in complete[-keep:]}, complete[-1].step
    return [
        f.path for f in found if f.step <= newest and f.path not in stays and f.name not in writing
    ]
