"""What the engines of a pool have in common."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp

from torchtitan_rl_ft.config.sections import RolloutSection
from torchtitan_rl_ft.observability.events import EventSink
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.changes import Changes
from torchtitan_rl_ft.serving.engine_records import EngineRecords
from torchtitan_rl_ft.serving.launch import Launcher
from torchtitan_rl_ft.serving.prober import Prober
from torchtitan_rl_ft.weights.installer import Installer
from torchtitan_rl_ft.weights.proof import Proof
from torchtitan_rl_ft.weights.transports.base import Release


@dataclass(frozen=True)
class Target:
    """The version that every engine is to hold, and how it proves that it does."""

    release: Release
    proof: Proof


@dataclass
class Shared:
    """Parts that every slot and every life of a pool uses."""

    rollout: RolloutSection
    folder: RunFolder
    events: EventSink
    launcher: Launcher
    http: aiohttp.ClientSession
    installer: Installer
    prober: Prober
    records: EngineRecords
    changes: Changes
    target: Target | None = None
    clock: Callable[[], float] = time.monotonic
