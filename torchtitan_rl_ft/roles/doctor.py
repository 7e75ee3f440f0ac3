"""`torchtitan doctor`: what of this package works on this machine, and what to do where it does
not. Starts nothing but the two processes of a trial push."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import psutil

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.host.ports import free_of
from torchtitan_rl_ft.serving.launch import has_accelerator
from torchtitan_rl_ft.weights.holder.agent import NixlUnavailable, nixl_version
from torchtitan_rl_ft.weights.transports.choice import TransportUnavailable, choose
from torchtitan_rl_ft.weights.transports.facts import (
    address_problem,
    gather,
    port_problem,
    room,
)
from torchtitan_rl_ft.weights.transports.pages import has_huge_pages, mount_of
from torchtitan_rl_ft.weights.transports.probe import Probe, probe

PACKAGE = "torchtitan_rl_ft"
YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
INFINIBAND = Path("/sys/class/infiniband")
IN_MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs"})

SHOWN = ("torch", "torchtitan", "torchft", "sglang")
_NEEDED = ("torch", "torchtitan")
_PINNED = re.compile(r"([A-Za-z0-9_.-]+)==([^\s;]+)")


@dataclass(frozen=True)
class Finding:
    """`ok`: None where it is no fault, and to be known. `mend`: what to do."""

    name: str
    ok: bool | None
    text: str
    mend: str = ""

    def line(self) -> str:
        mark = {True: "ok", False: "FAULT", None: "note"}[self.ok]
        return f"{mark:<7}{self.name:<12}{self.text}" + (f": {self.mend}" if self.mend else "")


def main(resolved: Resolved, as_json: bool) -> int:
    """Tell all findings; FAILED when one is a fault."""
    findings = list(examine(resolved))
    good = all(f.ok is not False for f in findings)
    if as_json:
        print(json.dumps({"ok": good, "findings": [asdict(f) for f in findings]}, indent=1))
    else:
        print("\n".join(f.line() for f in findings))
    return ExitCode.DONE if good else ExitCode.FAILED


def examine(resolved: Resolved) -> Iterator[Finding]:
    weights = resolved.sections.weights
    yield from libraries()
    accelerator = "an accelerator" if has_accelerator() else "no accelerator: engines on the CPU"
    yield Finding("devices", None, accelerator)
    tried = probe(weights)
    yield from transports(resolved, tried)
    yield address(weights)
    yield network(weights)
    yield ports(weights, resolved.sections.fault_tolerance.ranks_per_group)
    yield memory(weights)
    yield pages(weights)
    yield copies_between_processes(weights, tried)


# Parts ------------------------------------------------------------------------------------------


def libraries() -> Iterator[Finding]:
    """Versions that are there, against those that this package was made for."""
    wanted = {}
    for line in metadata.requires(PACKAGE) or ():
        if (found := _PINNED.match(line)) is not None:
            wanted[found[1]] = found[2]
    for name in SHOWN:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            needed = name in _NEEDED
            yield Finding(name, False if needed else None, "not installed", _install(name))
            continue
        pinned = wanted.get(name)
        fits = pinned is None or version.partition("+")[0] == pinned
        yield Finding(name, fits, version, "" if fits else f"made for {pinned}: {_install(name)}")


def _install(name: str) -> str:
    return "pip install " + (PACKAGE if name in _NEEDED else f"'{PACKAGE}[{name}]'")


def transports(resolved: Resolved, tried: Probe) -> Iterator[Finding]:
    yield Finding("disk", True, "works where trainers and engines share a file system")
    try:
        versions = f"{nixl_version()}, UCX {tried.ucx or 'unknown'}"
    except NixlUnavailable:
        versions = "not installed"
    wanted = resolved.sections.rollout.weight_transport
    if tried.problem is None:
        text = f"{versions}: a push between two processes came through ({tried.seconds:.1f} s)"
        yield Finding("nixl", True, text)
    else:
        fault = False if wanted == "nixl" else None
        yield Finding("nixl", fault, f"{versions}: not usable", tried.problem)
    yield _chosen(resolved, tried)


def _chosen(resolved: Resolved, tried: Probe) -> Finding:
    where = resolved.where("rollout.weight_transport")
    try:
        facts = gather(resolved, tried)
        choice = choose(resolved.sections.rollout.weight_transport, facts)
    except TransportUnavailable as e:
        return Finding("transport", False, where, str(e))
    reason = "see nixl" if choice.reason == tried.problem else choice.reason
    return Finding("transport", True, f"{where} is {choice.transport}: {reason}")


def address(weights: WeightsSection) -> Finding:
    host = weights.host
    if (problem := address_problem(host)) is not None:
        return Finding("address", False, problem, "set weights.host")
    told = f"holders answer at {host} (weights.host)"
    if socket.gethostbyname(host).startswith("127."):
        return Finding("address", True, told)
    return Finding("address", None, f"{told}, to all who reach it and have the run's token")


def network(weights: WeightsSection) -> Finding:
    there = psutil.net_if_stats()
    infiniband = sorted(p.name for p in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
    listed = f"this machine has {', '.join([*sorted(there), *infiniband])}"
    pinned = weights.ucx_devices
    if pinned == "all":
        mend = "UCX has no authentication: pin weights.ucx_devices to a network of yours"
        return Finding("network", None, f"not pinned, {listed}", mend)
    names = {name.partition(":")[0] for name in pinned.split(",")}
    if absent := sorted(names - {*there, *infiniband}):
        mend = "set weights.ucx_devices"
        return Finding("network", False, f"there is no {', '.join(absent)}, {listed}", mend)
    return Finding("network", True, f"pinned to {pinned} (weights.ucx_devices), {listed}")


def ports(weights: WeightsSection, ranks: int) -> Finding:
    text = weights.ucx_port_range
    if not text:
        mend = "set weights.ucx_port_range where a firewall is between holders"
        return Finding("ports", None, "not pinned", mend)
    if (problem := port_problem(weights, ranks)) is not None:
        return Finding("ports", False, problem)
    free = free_of(weights.ucx_ports)
    return Finding("ports", True, f"pinned to {text} (weights.ucx_port_range), {free} of them free")


def memory(weights: WeightsSection) -> Finding:
    folder = Path(weights.memory_folder)
    if not folder.is_dir():
        return Finding("memory", False, f"there is no {folder}", "set weights.memory_folder")
    kind, size = mount_of(folder).kind, psutil.disk_usage(str(folder)).total
    free = room(str(folder))
    told = f"{folder} ({kind}): {free / 1e9:.1f} of {size / 1e9:.1f} GB free"
    if kind not in IN_MEMORY:
        mend = "no file system in memory: weights go over a disk (weights.memory_folder)"
        return Finding("memory", None, told, mend)
    return Finding("memory", True, told)


def pages(weights: WeightsSection) -> Finding:
    folder = Path(weights.memory_folder)
    if not folder.is_dir() or (mount := mount_of(folder)).kind != "tmpfs":
        return Finding("pages", None, f"{folder} is no tmpfs")
    if has_huge_pages(mount):
        return Finding("pages", True, f"{folder} has huge pages")
    return Finding(
        "pages",
        None,
        f"{folder} has small pages: one host's processes copy slower than they could",
        "as root: mkdir -p /mnt/weights && mount -t tmpfs -o huge=within_size,mode=1777 tmpfs "
        '/mnt/weights, and weights.memory_folder = "/mnt/weights"',
    )


def copies_between_processes(weights: WeightsSection, tried: Probe) -> Finding:
    """UCX's fast way on one host is process_vm_writev (CMA), for which the kernel asks for the
    permission to trace the other process (ptrace(2), PTRACE_MODE_ATTACH_REALCREDS)."""
    try:
        scope = int(YAMA.read_text())
    except (OSError, ValueError):
        scope = 0
    told = "the kernel's Yama restricts nothing" if scope == 0 else f"{YAMA} is {scope}"
    if scope == 0:
        return Finding("ptrace", True, f"copies between processes are allowed: {told}")
    if tried.problem is None:
        return Finding("ptrace", None, f"{told}, and a push came through all the same")
    return Finding(
        "ptrace",
        None,
        f"{told}: copies between processes of one host may be refused",
        f'sysctl kernel.yama.ptrace_scope=0, or weights.ucx_tls = "tcp" (is {weights.ucx_tls!r})',
    )
