"""What a group tells of a heal: its phases, and a warning when the transfer was the slow part."""

from __future__ import annotations

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.replica.group import Heal

SLOW_S = 1.0
"""A transfer that is shorter is worth no warning, whatever its share."""


def tell_heal(heal: Heal, step: int, from_step: int, warn_share: float, events: EventSink) -> None:
    """`step`: commits that the group holds now; `from_step`: that it held before."""
    events.emit(
        Kind.HEAL,
        step=step,
        from_step=from_step,
        source=heal.source,
        bytes=heal.n_bytes,
        quorum_s=round(heal.quorum_s, 4),
        transfer_s=round(heal.transfer_s, 4),
        load_s=round(heal.load_s, 4),
    )
    if heal.transfer_s > SLOW_S and heal.transfer_share > warn_share:
        rate = heal.n_bytes / heal.transfer_s / 1e6
        events.emit(
            Kind.WARN,
            step=step,
            cause=f"slow heal: the transfer of {heal.n_bytes / 1e6:.1f} MB from {heal.source} took "
            f"{heal.transfer_s:.1f} s ({rate:.1f} MB/s), {heal.transfer_share:.0%} of the heal "
            f"(fault_tolerance.heal_warn_share = {warn_share:g})",
        )
