"""`[weights]`: how policies travel from trainers to engines over UCX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True, slots=True)
class WeightsSection:
    holders: int = 1
    """Processes beside the engines that hold policy versions in memory and hand them on. One per
    node is right; more on one node are for tests and benchmarks. Engine n takes its weights from
    number n mod holders."""

    host: str = "127.0.0.1"
    """Address of this machine on which holders answer other holders' requests (HTTP)."""

    ucx_devices: str = "lo"
    """Network devices that UCX may use (UCX_NET_DEVICES), like "eth0" or "mlx5_0:1". UCX has no
    authentication: name none that strangers reach. "all": any."""

    ucx_tls: str = ""
    """Transports that UCX may use (UCX_TLS), like "tcp". Empty: its own choice, which on one host
    copies between processes without a network."""

    ucx_port_range: str = "46000-46999"
    """TCP ports on which UCX listens (UCX_TCP_PORT_RANGE). Empty: any."""

    memory_folder: str = "/dev/shm"
    """A file system in memory (tmpfs) in which versions are held: two for each holder. With huge
    pages it is faster (`torchtitan doctor` says whether it has them, and how to)."""

    piece_mb: int = 32
    """What is pushed and checked at a time; pieces that came whole stay when a later one fails."""

    stall_timeout_s: float = 5.0
    """Longest wait for the next piece of a push before another holder is asked."""

    fetch_timeout_s: float = 60.0
    """Longest time in which a holder gets one version, from whomever."""

    @property
    def ucx_ports(self) -> range:
        """The numbers of `ucx_port_range`; none when it is empty."""
        first, _, last = self.ucx_port_range.partition("-")
        return range(int(first), int(last) + 1) if first else range(0)
