"""Who a fault hits: found at the instant of the injection, by pid and start time, the way any
observer would find it. Nothing is unregistered."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from torchtitan_rl_ft.chaos.plan import SOURCE_OF
from torchtitan_rl_ft.host import process
from torchtitan_rl_ft.observability.events import Kind
from torchtitan_rl_ft.run_folder import ProcessId, RunFolder

WORKER_TITLES = {"scheduler": "sglang::scheduler", "detokenizer": "sglang::detokenizer"}
"""What SGLang's own processes call themselves."""

HOLDER = "torchtitan_rl_ft.weights.holder"
"""The program of a trainer rank's source; its last argument says whose it is."""

Status = Callable[[], Mapping[str, Any] | None]
"""The answer of serving's /v1/status; None when it gives none."""


@dataclass(frozen=True)
class Victim:
    """A living process. `whole_tree`: what stands for all below it. `listed`: the state in which
    serving lists the engine."""

    name: str
    id: ProcessId
    whole_tree: bool
    listed: str | None = None


class Targets:
    """Resolves the names of a plan. `names`: what a job has of what is
    numbered."""

    def __init__(self, folder: RunFolder, names: Sequence[str], status: Status, seed: int) -> None:
        self._folder, self._names = folder, list(names)
        self._status, self._seed = status, seed
        self._spawned: dict[str, ProcessId] = {}

    def see(self, line: Mapping[str, Any]) -> None:
        """The next line of events.jsonl: processes are known by the events of their starts."""
        data = line.get("data", {})
        if line.get("kind") == Kind.SPAWN and "pid" in data and "start_time" in data:
            name = str(data.get("subject", line.get("name")))
            found = ProcessId(int(data["pid"]), float(data["start_time"]))
            if line.get("phase") == "promoted":  # a standby is a group from now on
                self._spawned = {k: v for k, v in self._spawned.items() if v != found}
            self._spawned[name] = found

    def resolve(self, target: str, key: str) -> Victim | None:
        """The process that `target` means now; None when there is none. What is left open is
        drawn from the seed and `key`, so equal plans hit equal names."""
        if target.startswith(SOURCE_OF):
            trainer = self.resolve(target.removeprefix(SOURCE_OF), key)
            return self._source(trainer) if trainer is not None else None
        if not target.startswith("any "):
            return self._named(target)
        order = [n for n in self._names if n.startswith(target.removeprefix("any ") + "-")]
        random.Random(f"{self._seed} {key}").shuffle(order)
        found = (self._named(name) for name in order)
        return next((victim for victim in found if victim is not None), None)

    def _named(self, name: str) -> Victim | None:
        base, _, part = name.partition(".")
        if base.startswith("engine-"):
            found, listed = self._engine(base)
        else:
            found, listed = self._role(base), None
        if found is None:
            return None
        if part in WORKER_TITLES:
            worker = titled(process.descendants(found), WORKER_TITLES[part])
            return Victim(name, worker, False, listed) if worker is not None else None
        whole_tree = not part and base.startswith(("engine-", "trainer-", "standby-"))
        return Victim(name, found, whole_tree, listed)

    @staticmethod
    def _source(trainer: Victim) -> Victim | None:
        """Of a rank, the first one where none is named."""
        rank = trainer.name if "." in trainer.name else f"{trainer.name}.0"
        found = source(process.descendants(trainer.id), rank)
        return Victim(f"{SOURCE_OF}{trainer.name}", found, False) if found is not None else None

    def _engine(self, name: str) -> tuple[ProcessId | None, str | None]:
        """From serving, which knows engines of earlier jobs too; else from the events."""
        for engine in (self._status() or {}).get("engines", []):
            if engine.get("name", f"engine-{engine['slot']}") == name and engine.get("pid"):
                found = ProcessId(engine["pid"], engine["start_time"])
                if found.alive():
                    return found, engine["state"]
        return self._living(self._spawned.get(name)), None

    def _role(self, name: str) -> ProcessId | None:
        found = self._living(self._spawned.get(name))
        address = self._folder.role(name)
        if found is None and address is not None and address.host == socket.gethostname():
            found = self._living(ProcessId(address.pid, address.start_time))
        return found

    @staticmethod
    def _living(found: ProcessId | None) -> ProcessId | None:
        return found if found is not None and found.alive() else None


def titled(processes: Iterable[ProcessId], title: str) -> ProcessId | None:
    for found in sorted(processes, key=lambda p: p.pid):
        if " ".join(command_of(found)).startswith(title):
            return found
    return None


def source(processes: Iterable[ProcessId], rank: str) -> ProcessId | None:
    """That of a trainer's rank, like `trainer-1.0`."""
    for found in sorted(processes, key=lambda p: p.pid):
        command = command_of(found)
        if HOLDER in command and _name_of_holder(command[-1]) == rank:
            return found
    return None


def command_of(found: ProcessId) -> list[str]:
    """The words that it was started with; none when it is gone."""
    try:
        return psutil.Process(found.pid).cmdline()
    except psutil.NoSuchProcess:
        return []


def _name_of_holder(settings: str) -> str | None:
    try:
        return json.loads(settings).get("name")
    except ValueError:
        return None
