"""The duty of announcing a new policy to serving."""

from __future__ import annotations

from pathlib import Path

import torch
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused, RoleUnreachable
from torchtitan_rl_ft.session_folder import Owner
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.weights.publisher import Published, publish

PUBLISH_DEADLINE_S = 60.0
LATE = 503
"""Serving's answer when it is still reading the weights at the deadline: to be asked again."""


class PolicyPublisher:
    """Writes the live parameters and hands them to serving; collective over the group."""

    def __init__(
        self,
        *,
        model_parts: list[torch.nn.Module],
        adapter: BaseStateDictAdapter,
        assets: Path,
        folder: Path,
        serving: RoleClient,
        link: GroupLink,
        buffer_bytes: int,
    ) -> None:
        self._model = ModelWrapper(model_parts)
        self._adapter = adapter
        self._assets, self._folder = assets, folder
        self._serving = serving
        self._link = link
        self._buffer_bytes = buffer_bytes
        owner = Owner.from_environment()
        # Serving refuses the policies of a job that is not its owner any more.
        self._job = {"attempt": owner.attempt} if owner is not None else {}

    def publish(self, step: int, token: str) -> int:
        """Returns the policy version that serving gave to (step, token).

        Does not wait for engines: the trainer's step never depends on their number. Raises
        NonFiniteWeights, OSError, RoleUnreachable, RoleRefused.
        """
        written = publish(
            self._adapter.to_hf(self._model.state_dict()),
            target=self._folder / f"step-{step}-{token[:8]}",
            assets=self._assets,
            step=step,
            token=token,
            writer=self._link.is_speaker,
            buffer_bytes=self._buffer_bytes,
        )
        return self._link.ask(lambda: self._announce(written, step, token))

    def _announce(self, written: Published | None, step: int, token: str) -> int:
        assert written is not None
        body = {
            "step": step,
            "token": token,
            "path": str(written.path),
            "manifest_digest": written.manifest_digest,
            "wait": "none",
            "deadline_s": PUBLISH_DEADLINE_S,
            **self._job,
        }
        try:
            answer = self._serving.post("/v1/publish", body, deadline_s=PUBLISH_DEADLINE_S)
        except RoleRefused as e:
            if e.status == LATE:
                raise RoleUnreachable(str(e)) from e
            raise
        return int(answer["version"])
