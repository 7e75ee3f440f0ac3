"""How policies travel: the transport, and [weights]. Whether NIXL works here is tried by the job as
it starts (weights/transports/facts.py), and by `torchtitan doctor`."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchtitan_rl_ft.config.rules.job import Job
from torchtitan_rl_ft.host.ports import LAST_PORT

NIXL_MODULES = ("nixl_cu13", "nixl_cu12")
TRANSPORT = "rollout.weight_transport"

_PORTS = re.compile(r"(\d+)-(\d+)")
_NAMES = re.compile(r"[A-Za-z0-9_.:@-]+(,[A-Za-z0-9_.:@-]+)*")


def transport(job: Job) -> Iterator[str]:
    rollout = job.resolved.sections.rollout
    if rollout.weight_transport != "nixl":
        return
    if not any(job.machine.has_module(m) for m in NIXL_MODULES):
        yield job.broken(
            "NIXL is not installed: pip install 'torchtitan_rl_ft[ucx]', or use auto or disk",
            TRANSPORT,
        )
    if rollout.external_urls:
        yield job.broken(
            "engines that somebody else owns load from a file system that they share with "
            "trainers: use auto or disk",
            TRANSPORT,
            "rollout.external_urls",
        )


def holders(job: Job) -> Iterator[str]:
    section = job.resolved.sections.weights
    yield from job.positive("weights", "holders", "piece_mb", "stall_timeout_s", "fetch_timeout_s")
    if section.stall_timeout_s >= section.fetch_timeout_s > 0:
        yield job.broken(
            "no other holder would be asked: stall_timeout_s must be below fetch_timeout_s",
            "weights.stall_timeout_s",
            "weights.fetch_timeout_s",
        )
    if not section.host or ":" in section.host or section.host == "0.0.0.0":
        yield job.broken(
            "holders need a name or an IPv4 address of this machine under which others reach it",
            "weights.host",
        )
    if not section.memory_folder.startswith("/"):
        yield job.broken("memory_folder is an absolute path", "weights.memory_folder")
    if not section.ucx_devices or not _NAMES.fullmatch(section.ucx_devices):
        yield job.broken(
            'ucx_devices names network devices, like "lo" or "eth0,mlx5_0:1", or is "all"',
            "weights.ucx_devices",
        )
    if section.ucx_tls and not _NAMES.fullmatch(section.ucx_tls.removeprefix("^")):
        yield job.broken('ucx_tls names transports, like "tcp" or "tcp,cma"', "weights.ucx_tls")
    if section.ucx_port_range and not _is_port_range(section.ucx_port_range):
        yield job.broken(
            f"ucx_port_range is FIRST-LAST, ports from 1 to {LAST_PORT}, or empty",
            "weights.ucx_port_range",
        )


def _is_port_range(text: str) -> bool:
    found = _PORTS.fullmatch(text)
    return found is not None and 1 <= int(found[1]) <= int(found[2]) <= LAST_PORT
