"""How a published policy reaches the node of an engine."""

from torchtitan_rl_ft.weights.transports.base import WeightTransport
from torchtitan_rl_ft.weights.transports.disk import DiskTransport


class TransportUnknown(Exception):
    """This installation has no transport of that name."""


def make_transport(name: str) -> WeightTransport:
    """The transport that `rollout.weight_transport` names. Raises TransportUnknown."""
    if name in ("auto", DiskTransport.name):
        return DiskTransport()
    raise TransportUnknown(
        f'rollout.weight_transport = {name!r} is not available here: use "disk" or "auto"'
    )
