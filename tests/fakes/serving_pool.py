"""The real serving service over fake engines, in this process."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from policies import token_of, write_policy

from torchtitan_rl_ft.config.sections import EngineGroup, RolloutSection
from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.host.ports import HOST, free_ports
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.rpc import server
from torchtitan_rl_ft.run_folder import TOKEN_ENV, ProcessId, RunFolder
from torchtitan_rl_ft.serving.gateway import GatewayProgram, smg_program
from torchtitan_rl_ft.serving.groups import SlotPlan, slot_plans
from torchtitan_rl_ft.serving.holder_routes import HolderRoutes
from torchtitan_rl_ft.serving.launch import (
    Launch,
    fingerprint,
    make_scratch,
    stream_arguments,
)
from torchtitan_rl_ft.serving.relays import RelaySetup
from torchtitan_rl_ft.serving.requests import GenerateRequest
from torchtitan_rl_ft.serving.routes import Routes
from torchtitan_rl_ft.serving.service import ServingService
from torchtitan_rl_ft.weights.engine_hashes import cpu_hash
from torchtitan_rl_ft.weights.holder.launch import Start
from torchtitan_rl_ft.weights.holder.settings import HolderSettings
from torchtitan_rl_ft.weights.proof import EngineLayout
from torchtitan_rl_ft.weights.transports.disk import DiskTransport

FAKE = Path(__file__).with_name("fake_sglang.py")
FAKE_HOLDER = Path(__file__).with_name("fake_holder.py")
TOKEN = "secret"


@dataclass
class FakeLauncher:
    """Starts fake engines. `faults[slot]` is a list: faults of the first start, the second, ..."""

    rollout: RolloutSection
    model: Path
    folder: RunFolder
    plans: list[SlotPlan]
    faults: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    is_seeded: bool = True

    def prepare(self, slot: int) -> Launch:
        start = self.starts[slot] = self.starts.get(slot, 0) + 1
        given = self.faults.get(slot, [])
        faults = given[min(start, len(given)) - 1] if given else {}
        group = self.plans[slot].group
        bootstrap, nodes_port, *ports = free_ports(2 + group.nodes_per_engine)
        prefill = group.role == "prefill"
        nodes = tuple(
            [
                *self._command(slot),
                f"--port={port}",
                f"--nnodes={group.nodes_per_engine}",
                f"--node-rank={node}",
                f"--dist-init-addr={HOST}:{nodes_port}",
                *([f"--disaggregation-bootstrap-port={bootstrap}"] if prefill else []),
            ]
            for node, port in enumerate(ports)
        )
        env = {**os.environ, "FAKE_SGLANG_FAULTS": json.dumps(faults)}
        scratch = make_scratch(self.folder, slot)
        url = f"http://{HOST}:{ports[0]}"
        return Launch(nodes, env, url, scratch, bootstrap if prefill else None)

    def fingerprint(self, slot: int) -> str:
        return fingerprint(self._command(slot))

    def layout(self, group: EngineGroup) -> EngineLayout:
        return EngineLayout("float32", 1, cpu_hash)

    def seeded(self, group: EngineGroup) -> bool:
        return self.is_seeded

    def model_path(self, group: EngineGroup) -> Path:
        return Path(group.model) if group.model else self.model

    def devices(self, slot: int) -> list[int]:
        return [self.plans[slot].first_device]

    def _command(self, slot: int) -> list[str]:
        group = self.plans[slot].group
        command = [sys.executable, str(FAKE), f"--model-path={self.model_path(group)}"]
        if group.role in ("prefill", "decode"):
            command.append(f"--disaggregation-mode={group.role}")
        if self.rollout.placement == "colocated":
            command.append("--enable-memory-saver")
            if group.role == "frozen":
                command.append("--enable-weights-cpu-backup")
        return [*command, *stream_arguments(self.rollout)]


@dataclass
class Pool:
    service: ServingService
    events: EventList
    folder: RunFolder
    model: Path
    http: aiohttp.ClientSession
    launcher: FakeLauncher
    url: str = ""
    """Where its routes are, when they are served."""

    async def publish(
        self, step: int, *, wait: str = "all", deadline_s: float = 20.0, **policy: Any
    ) -> tuple[int, list[int]]:
        """Publish once every slot has an engine that is up, or is given up."""
        await self.until(lambda: not {"starting", "retired"} & set(self.working_states()))
        return await self._published(step, wait, deadline_s, policy)

    async def publish_to_the_rest(self, step: int, **policy: Any) -> tuple[int, list[int]]:
        """Publish, whatever slots have no engine."""
        return await self._published(step, "all", 20.0, policy)

    async def _published(
        self, step: int, wait: str, deadline_s: float, policy: dict[str, Any]
    ) -> tuple[int, list[int]]:
        path, digest = write_policy(self.folder.weights, self.model, step, **policy)
        return await self.service.publish(
            step, policy.get("token") or token_of(step), path, digest, wait, deadline_s
        )

    async def generate(self, name: str = "r", **fields: Any) -> list[Any]:
        request = {
            "request_id": name,
            "input_ids": [3, 4, 5],
            "n": 2,
            "sampling": {"max_new_tokens": 8, "ignore_eos": True},
            "seeds": None,
            "timeout_s": 20.0,
            **fields,
        }
        return await self.service.generate(GenerateRequest(**request))

    async def fault(self, slot: int, **faults: Any) -> dict[str, Any]:
        engine = self.service.pool.slots[slot].engine
        assert engine is not None
        async with self.http.post(engine.client.url + "/fault", json=faults) as r:
            return await r.json()

    async def calls(self, slot: int) -> list[tuple[float, str]]:
        engine = self.service.pool.slots[slot].engine
        assert engine is not None
        async with self.http.get(engine.client.url + "/calls") as r:
            return [(at, path) for at, path in await r.json()]

    def states(self) -> list[str]:
        return [e["state"] for e in self.service.status()["engines"]]

    def working_states(self) -> list[str]:
        return [e["state"] for e in self.service.status()["engines"] if not e["given_up"]]

    def moves(self, slot: int) -> list[str]:
        """New states of a slot's engines, in order."""
        return self.moves_of(f"engine-{slot}")

    def moves_of(self, name: str) -> list[str]:
        return [
            e["new"]
            for e in self.events.events
            if e["kind"] == "transition" and e["subject"] == name
        ]

    def seen(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            e
            for e in self.events.events
            if e["kind"] == kind and all(e.get(k) == v for k, v in fields.items())
        ]

    async def until(self, predicate: Any, timeout_s: float = 15.0) -> float:
        """Seconds until `predicate()` holds."""
        start = time.monotonic()
        if not await self.service._changes.wait_until(predicate, timeout_s):
            raise AssertionError(f"not within {timeout_s} s: {self.service.status()}")
        return time.monotonic() - start


@asynccontextmanager
async def open_pool(
    run: Path,
    model: Path,
    *,
    faults: dict[int, list[dict[str, Any]]] | None = None,
    seeded: bool = True,
    gateway_program: GatewayProgram = smg_program,
    weights: dict[str, Any] | None = None,
    start_holder: Start | None = None,
    **rollout: Any,
) -> AsyncIterator[Pool]:
    """A service over `engines` fake engines, open. `weights`: [weights], with relays that are fakes
    unless `start_holder` starts others; its routes are served then."""
    folder = RunFolder(run)
    settings = RolloutSection(
        **{
            "engines": 2,
            "install_timeout_s": 5.0,
            "request_timeout_s": 10.0,
            "engine_start_timeout_s": 15.0,
            "cleanup_timeout": 5.0,
            "retain_ttl": 0.0,  # engines end with the process of the test
            **rollout,
        }
    )
    events = EventList()
    launcher = FakeLauncher(
        settings, model, folder, slot_plans(settings), faults or {}, is_seeded=seeded
    )
    relays = None if weights is None else relay_setup(run, weights, start_holder)
    async with aiohttp.ClientSession() as http:
        service = ServingService(
            settings,
            folder,
            events,
            launcher,
            http,
            DiskTransport(),
            relays=relays,
            gateway_program=gateway_program,
        )
        pool = Pool(service, events, folder, model, http, launcher)
        await service.open()
        try:
            if service.relays is None:
                yield pool
                return
            routes = [*Routes(service, lambda: None).table()]
            routes += HolderRoutes(service.relays.book).table()
            pool.url, runner = await server.start(server.make_app(TOKEN, routes), grace_s=0.1)
            try:
                service.open_relays(pool.url)
                yield pool
            finally:
                await service.close()
                await runner.cleanup()
        finally:
            await service.close()


def relay_setup(run: Path, weights: dict[str, Any], start: Start | None) -> RelaySetup:
    section = WeightsSection(**{"memory_folder": str(run / "memory"), **weights})
    Path(section.memory_folder).mkdir(exist_ok=True)
    start = start or start_fake_holder
    return RelaySetup(section, "session", TOKEN, ProcessId.current, start)


def start_fake_holder(
    settings: HolderSettings, *, token: str, log: Path, env: Mapping[str, str]
) -> process.Child:
    argv = [sys.executable, str(FAKE_HOLDER), settings.to_json()]
    return process.spawn(argv, log=log, env={**env, TOKEN_ENV: token})
