"""NIXL over UCX, as much of it as holders use.

The library is imported here alone, late, after its environment is set, and only in processes that
may be lost: it can end the process that it is in. Agents run without a progress thread, which would
keep a core busy; whoever waits polls.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from importlib import metadata
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host.ports import free_of
from torchtitan_rl_ft.weights.pieces import Range

logger = logging.getLogger(__name__)

PACKAGES = {"nixl-cu13": "nixl_cu13", "nixl-cu12": "nixl_cu12"}
"""Distributions that have the library, and what they are imported as. (The package `nixl` only
chooses between them, by way of torch.)"""

BACKEND = "UCX"
MEMORY = "DRAM"
DONE, UNDER_WAY = "DONE", "PROC"

PROTOCOLS = "put/offload/*,put/am/bcopy,am/egr/single/bcopy*,am/egr/multi/bcopy,reconfig"
"""What of UCX's protocols holders use: writes, and small messages. For every connection UCX
tries all that it has, and looks at the network devices once for each: this makes it three times as
fast to connect (2 ms, not 9)."""

DRAIN_S = 0.05
"""Ten times what UCX needs to end its connections to a process that died."""

PORTS_LEFT = 4
"""Ports that are left for agents which other processes make at the same moment."""

MAKING = "making a NIXL agent"

_serial = itertools.count()


class NixlUnavailable(Exception):
    """The library is absent, or does not work here; the message says what to do."""


class NixlError(Exception):
    """The library reported an error: of a transfer, or of what it was given."""


def ucx_environment(weights: WeightsSection) -> dict[str, str]:
    """What UCX and NIXL read, once, when they are imported: the devices and ports that they may
    use, and no chatter."""
    env = {
        "NIXL_LOG_LEVEL": "WARN",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_PROTOS": PROTOCOLS,
    }
    if weights.ucx_devices != "all":
        env["UCX_NET_DEVICES"] = weights.ucx_devices
        if ":" not in weights.ucx_devices:  # Ethernet alone: InfiniBand devices are like mlx5_0:1
            env["UCX_MODULES"] = "^ib"
    if weights.ucx_tls:
        env["UCX_TLS"] = weights.ucx_tls
    if weights.ucx_port_range:
        env["UCX_TCP_PORT_RANGE"] = weights.ucx_port_range
    return env


def nixl_version() -> str:
    """As "nixl-cu13 1.5.1". Raises NixlUnavailable."""
    return f"{_distribution()[0]} {_distribution()[1]}"


def _distribution() -> tuple[str, str]:
    """Raises NixlUnavailable."""
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            return name, metadata.version(name)
    raise NixlUnavailable(
        "weights over UCX need NIXL, which is not installed: pip install 'torchtitan_rl_ft[ucx]', "
        'or set rollout.weight_transport = "disk"'
    )


def load(weights: WeightsSection, folder: Path | None = None) -> Any:
    """Import the library into this process, which must be one that may be lost. `folder`: where UCX
    makes its segments of shared memory, nameless at once; a process that is killed in between
    leaves one.

    Raises NixlUnavailable."""
    name, version = _distribution()
    os.environ.update(ucx_environment(weights))
    if folder is not None:
        os.environ["UCX_POSIX_DIR"] = str(folder)
    try:
        return importlib.import_module(f"{PACKAGES[name]}._api")
    except Exception as e:  # whatever a broken shared library raises
        raise NixlUnavailable(
            f"{name} {version} is installed but does not work: {type(e).__name__}: {e}"
        ) from e


@contextlib.contextmanager
def _told(doing: str) -> Iterator[None]:
    """The library's exceptions have a common base in none of its versions. Raises NixlError."""
    try:
        yield
    except Exception as e:
        raise NixlError(f"{doing}: {type(e).__name__}: {e}") from e


def make(nixl: Any, owner: str, weights: WeightsSection) -> Agent:
    """An agent of `owner`'s. Raises NixlError. Of one port that is taken the library says nothing
    but "Device is busy", in its log; of several that are it tries one after the other, for ever."""
    ports = weights.ucx_ports
    needed = min(PORTS_LEFT, len(ports) // 2)
    if (free := free_of(ports, enough=needed)) < needed:
        raise NixlError(f"{MAKING}: {_taken(weights, free)}")
    try:
        return Agent(nixl, owner)
    except NixlError as e:
        if not ports or free_of(ports, enough=1):
            raise
        raise NixlError(f"{e}: {_taken(weights, 0)}") from e


def _taken(weights: WeightsSection, free: int) -> str:
    ports = f"all ports but {free}" if free else "all ports"
    return f"{ports} of weights.ucx_port_range = {weights.ucx_port_range!r} are taken"


class AgentAhead:
    """Agents, one of them made in time: that takes longer than a small push."""

    def __init__(self, make: Callable[[], Agent], maker: Executor) -> None:
        self._make, self._maker = make, maker
        self._ahead: Future[Agent] | None = None
        self._lock = threading.Lock()

    def prepare(self) -> None:
        """Make the next one, beside other work."""
        with self._lock:
            if self._ahead is None:
                self._ahead = self._maker.submit(self._make)

    @property
    def is_ready(self) -> bool:
        """Whether the next one is there."""
        with self._lock:
            return self._ahead is not None and self._ahead.done()

    def take(self) -> Agent:
        """Raises NixlError."""
        with self._lock:
            ahead, self._ahead = self._ahead, None
        return ahead.result() if ahead is not None else self._make()


class Agent:
    """One NIXL agent with a name that no other ever has. Usable from several threads. Raises
    NixlError, throughout."""

    def __init__(self, nixl: Any, owner: str) -> None:
        self.name = f"{owner}-{os.getpid()}-{next(_serial)}-{secrets.token_hex(4)}"
        config = nixl.nixl_agent_config(
            enable_prog_thread=False,
            backends=[BACKEND],
            sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
        )
        with _told(MAKING):
            self._agent = nixl.nixl_agent(self.name, config)
        if BACKEND not in self._agent.backends:
            raise NixlError(f"NIXL has no {BACKEND} plugin")

    def register(self, address: int, ranges: Iterable[Range]) -> Any:
        """Let peers, or transfers, use `ranges`, counted from `address`."""
        with _told("registering memory"):
            return self._agent.register_memory(
                [(address + start, end - start, 0, "") for start, end in ranges], MEMORY
            )

    def deregister(self, registered: Any) -> None:
        with _told("deregistering memory"):
            self._agent.deregister_memory(registered)

    def metadata(self) -> bytes:
        """What a peer needs to write into what is registered now."""
        with _told("metadata"):
            return self._agent.get_agent_metadata()

    def add_peer(self, peer_metadata: bytes) -> str:
        with _told("reading the receiver's metadata"):
            name = self._agent.add_remote_agent(peer_metadata)
        return name.decode() if isinstance(name, bytes) else name

    def remove_peer(self, name: str) -> None:
        with _told("disconnecting from the receiver"):
            self._agent.remove_remote_agent(name)

    def write(self, local: int, remote: int, nbytes: int, peer: str, note: bytes) -> Any:
        """Begin to write; `note` is given to the peer once all is there. The handle must be
        released."""
        with _told("preparing a transfer"):
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs([(local, nbytes, 0)], MEMORY),
                self._agent.get_xfer_descs([(remote, nbytes, 0)], MEMORY),
                peer,
                note,
            )
        try:
            with _told("beginning a transfer"):
                self._agent.transfer(handle)
        except NixlError:
            self.release(handle)
            raise
        return handle

    def is_done(self, handle: Any) -> bool:
        """Also makes progress."""
        with _told("transfer"):
            state = self._agent.check_xfer_state(handle)
        if state not in (DONE, UNDER_WAY):
            raise NixlError(f"transfer: {state}")
        return state == DONE

    def release(self, handle: Any) -> bool:
        """False when it cannot be: the transfer goes on, and only dropping the agent ends it."""
        try:
            self._agent.release_xfer_handle(handle)
        except Exception as e:
            logger.warning("a transfer cannot be released: %s", e)
            return False
        return True

    def notes(self) -> list[bytes]:
        """What has come from peers since the last call, in order. Also makes progress."""
        with _told("notifications"):
            return [note for notes in self._agent.get_new_notifs().values() for note in notes]

    def drain(self) -> None:
        """After a push that failed, before `drop`: have the library end its connections, for which
        it needs calls. Of an agent whose peer died between two pieces UCX would end the process
        (its assertion ucs_arbiter_group_is_empty), whenever that was tried."""
        end_s = time.monotonic() + DRAIN_S
        while time.monotonic() < end_s:
            with contextlib.suppress(NixlError):  # it has failed already
                self.notes()
            time.sleep(DRAIN_S / 50)

    def drop(self) -> None:
        """End the agent: peers' transfers into what it registered come to nothing."""
        del self._agent
