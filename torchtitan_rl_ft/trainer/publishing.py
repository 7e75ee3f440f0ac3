"""The duty of announcing a new policy to serving, over either transport."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torchtitan.components.checkpoint import ModelWrapper
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.rpc.client import RoleClient, RoleRefused, RoleUnreachable
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.session_folder import Owner
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.offers import Offers
from torchtitan_rl_ft.trainer.source import Source
from torchtitan_rl_ft.weights.holder.settings import Key
from torchtitan_rl_ft.weights.publisher import NonFiniteWeights, publish

PUBLISH_DEADLINE_S = 60.0
ANSWER_S = 5.0
"""Of it, for serving's answer to come: what serving waits for ends before the request does."""

LATE = 503
"""Serving's answer when it still lacks the weights at the deadline: to be asked again."""


class PolicyPublisher(Protocol):
    """Makes the live parameters a policy version; all ranks of the group call it alike."""

    every_group_offers: bool
    """Whether groups without the duty have something to do after a commit."""

    def offer(self, step: int, token: str) -> None:
        """Have what this group holds at (step, token) at hand for whoever wants it. What goes wrong
        is told and no more: other groups offer the same bytes."""
        ...

    def publish(self, step: int, token: str) -> int:
        """Returns the policy version that serving gave to (step, token).

        Does not wait for engines: the trainer's step never depends on their number. Raises
        NonFiniteWeights, OSError, RoleUnreachable (to be tried again), RoleRefused.
        """
        ...

    def close(self) -> None: ...


class LiveWeights:
    """The parameters of the model, by their Hugging Face names."""

    def __init__(self, model_parts: list[torch.nn.Module], adapter: BaseStateDictAdapter) -> None:
        self._model, self._adapter = ModelWrapper(model_parts), adapter

    def tensors(self) -> dict[str, torch.Tensor]:
        """Plain tensors or DTensors, not copies where the adapter makes none."""
        return self._adapter.to_hf(self._model.state_dict())


class Announcer:
    """Tells serving of a version, by the group's first rank."""

    def __init__(self, serving: RoleClient, link: GroupLink) -> None:
        self._serving, self._link = serving, link
        owner = Owner.from_environment()
        # Serving refuses the policies of a job that is not its owner any more.
        self._job = {"attempt": owner.attempt} if owner is not None else {}

    def announce(self, step: int, token: str, what: Callable[[], dict[str, Any]]) -> int:
        """The version's number. `what` is asked on the first rank. Raises RoleUnreachable on all
        ranks, RoleRefused."""
        version, problem = self._link.ask(lambda: self._ask(step, token, what()))
        if problem is not None:
            raise RoleUnreachable(problem)
        assert version is not None
        return version

    def _ask(self, step: int, token: str, what: dict[str, Any]) -> tuple[int | None, str | None]:
        body = {
            "step": step,
            "token": token,
            "wait": "none",
            "deadline_s": PUBLISH_DEADLINE_S - ANSWER_S,
            **what,
            **self._job,
        }
        try:
            answer = self._serving.post("/v1/publish", body, deadline_s=PUBLISH_DEADLINE_S)
        except RoleUnreachable as e:
            return None, str(e)
        except RoleRefused as e:
            if e.status == LATE:
                return None, str(e)
            raise
        return int(answer["version"]), None


class DiskPublisher:
    """The group with the duty writes a folder on the file system that all share."""

    every_group_offers = False

    def __init__(
        self,
        weights: LiveWeights,
        announcer: Announcer,
        link: GroupLink,
        *,
        assets: Path,
        folder: Path,
        buffer_bytes: int,
    ) -> None:
        self._weights, self._announcer, self._link = weights, announcer, link
        self._assets, self._folder, self._buffer_bytes = assets, folder, buffer_bytes

    def offer(self, step: int, token: str) -> None:
        pass

    def publish(self, step: int, token: str) -> int:
        written, non_finite = None, None
        try:
            written = publish(
                self._weights.tensors(),
                target=self._folder / f"step-{step}-{token[:8]}",
                assets=self._assets,
                step=step,
                token=token,
                writer=self._link.is_speaker,
                buffer_bytes=self._buffer_bytes,
            )
        except NonFiniteWeights as e:  # only the first rank looks
            non_finite = str(e)
        if found := [why for why in self._link.gather(non_finite) if why is not None]:
            raise NonFiniteWeights(found[0])

        def what() -> dict[str, Any]:
            assert written is not None
            return {"path": str(written.path), "manifest_digest": written.manifest_digest}

        return self._announcer.announce(step, token, what)

    def close(self) -> None:
        pass


class HolderPublisher:
    """Every group's sources hold what it committed; the one with the duty has serving fetch it."""

    every_group_offers = True

    def __init__(
        self,
        weights: LiveWeights,
        announcer: Announcer,
        link: GroupLink,
        offers: Offers,
        *,
        wait_relays: Literal["first", "all"],
    ) -> None:
        self._weights, self._announcer, self._link = weights, announcer, link
        self._offers, self._wait_relays = offers, wait_relays

    def offer(self, step: int, token: str) -> None:
        self._offers.offer(self._weights.tensors(), Key(step, token), patient=False)

    def publish(self, step: int, token: str) -> int:
        """Serving has the version when a relay has it, or when all have; see `wait_relays`."""
        tensors, key = self._weights.tensors(), Key(step, token)
        offered = self._offers.offer(tensors, key, patient=True)
        problem = offered.problem or self._offers.settle()
        found = self._link.gather((offered.non_finite, problem))
        for rank, (non_finite, _) in enumerate(found):
            if non_finite is not None:
                raise NonFiniteWeights(
                    f"tensor {non_finite!r} holds NaN or infinity (rank {rank}); not published"
                )
        if problems := [f"rank {rank}: {why}" for rank, (_, why) in enumerate(found) if why]:
            raise RoleUnreachable("; ".join(problems))
        image = self._offers.image(tensors)

        def what() -> dict[str, Any]:
            return {
                "layout_digest": image.layout_digest,
                "nbytes": image.nbytes,
                "wait_relays": self._wait_relays,
            }

        return self._announcer.announce(step, token, what)

    def close(self) -> None:
        self._offers.close()


@dataclass(frozen=True)
class PublishSettings:
    """`transport`: as resolved for the job; "auto", which nobody resolved, is "disk". `sync`: the
    trainer needs the next batch from the new policy, and waits for all relays."""

    transport: Literal["auto", "disk", "nixl"]
    assets: Path
    buffer_bytes: int
    replica_id: int
    sync: bool

    @property
    def wait_relays(self) -> Literal["first", "all"]:
        return "all" if self.sync else "first"


def make_publisher(
    settings: PublishSettings,
    weights: LiveWeights,
    serving: RoleClient,
    link: GroupLink,
    run: RunFolder,
) -> PolicyPublisher:
    """By the transport that the job uses."""
    announcer = Announcer(serving, link)
    if settings.transport != "nixl":
        return DiskPublisher(
            weights,
            announcer,
            link,
            assets=settings.assets,
            folder=run.weights,
            buffer_bytes=settings.buffer_bytes,
        )
    section = Resolved.read(run.path).sections.weights
    source = Source(run, section, settings.replica_id, link.rank, run.token())
    with contextlib.suppress(OSError):  # the first offer tries again, and tells
        source.ensure()  # it gets ready while the rank does
    offers = Offers(source, link, settings.assets, settings.buffer_bytes)
    return HolderPublisher(weights, announcer, link, offers, wait_relays=settings.wait_relays)
