"""Real serving roles with relays, one after the other, and the source of a trainer beside them."""

from __future__ import annotations

import base64
import os
import signal
from pathlib import Path
from typing import Any

from conftest import TOKEN, ServingRole, end_sessions, start_serving
from policies import write_policy

from torchtitan_rl_ft.config.weights import WeightsSection
from torchtitan_rl_ft.rpc.client import RoleClient
from torchtitan_rl_ft.run_folder import ProcessId
from torchtitan_rl_ft.weights.holder import launch
from torchtitan_rl_ft.weights.holder.settings import HolderSettings
from torchtitan_rl_ft.weights.image import WEIGHTS_FILE, Image
from torchtitan_rl_ft.weights.manifest import read_manifest

LIMIT_S = 60.0


class RelayRun:
    """Over real NIXL. The source outlives the roles. `rollout` and `weights` are for all roles."""

    def __init__(self, folder: Path, **rollout: Any) -> None:
        self.folder, self.memory = folder, folder / "memory"
        self.memory.mkdir()
        self._rollout = rollout
        self._roles: list[ServingRole] = []
        self.weights: dict[str, Any] = {"memory_folder": str(self.memory), "piece_mb": 1}
        self._settings = HolderSettings(
            "trainer-0.0",
            "source",
            "sources",
            WeightsSection(**self.weights),
            ProcessId.current(),
            run_folder=str(folder),
        )
        log = folder / "source.log"
        self.source = launch.start(self._settings, token=TOKEN, log=log, env=dict(os.environ))

    def start(self, **rollout: Any) -> ServingRole:
        settings = {"weight_transport": "nixl", **self._rollout, **rollout}
        self._roles.append(start_serving(self.folder, weights=self.weights, **settings))
        return self._roles[-1]

    def publish(self, role: ServingRole, step: int, **policy: Any) -> dict[str, Any]:
        """Until all engines that live hold it."""
        return self.announce(role, self.offer(role, step, **policy), wait="all")

    def offer(self, role: ServingRole, step: int, **policy: Any) -> Path:
        """A policy that the source has from now on."""
        folder, _ = write_policy(self.folder / "trainer", role.model, step, **policy)
        self._offer(folder, image_of(folder))
        return folder

    def announce(self, role: ServingRole, folder: Path, wait: str) -> dict[str, Any]:
        manifest, image = read_manifest(folder), image_of(folder)
        body = {
            "step": manifest.step,
            "token": manifest.token,
            "layout_digest": image.layout_digest,
            "nbytes": image.nbytes,
            "wait": wait,
            "deadline_s": LIMIT_S,
        }
        return role.client.post("/v1/publish", body, deadline_s=LIMIT_S + 5)

    def _offer(self, folder: Path, image: Image) -> None:
        def url() -> str | None:
            found = launch.address(self._settings)
            return found.url if found is not None else None

        client = RoleClient("source", url, TOKEN)
        manifest = read_manifest(folder)
        key = {"step": manifest.step, "token": manifest.token}
        header = base64.b64encode(image.header).decode()
        asked = {**key, "header": header}
        file = client.post("/v1/reserve", asked, deadline_s=LIMIT_S)["file"]
        with open(file, "r+b") as f:
            f.write((folder / WEIGHTS_FILE).read_bytes())
        ranges = [[len(image.header), image.nbytes]]
        offer = {**key, "file": file, "ranges": ranges, "assets": str(folder)}
        client.post("/v1/offer", offer, deadline_s=LIMIT_S)
        client.close()

    def relay_memory(self) -> list[Path]:
        return [p for p in self.memory.glob("*/*/relay-0") if p.is_dir()]

    def close(self) -> None:
        for role in self._roles:
            if role.process.poll() is None:
                role.process.send_signal(signal.SIGTERM)
                role.process.wait(30)
            role.client.close()
        end_sessions(self.folder)
        self.source.send(signal.SIGKILL)


def image_of(folder: Path) -> Image:
    tensors = read_manifest(folder).tensors
    return Image({name: (t.dtype, t.shape) for name, t in tensors.items()})
