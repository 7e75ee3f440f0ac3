"""What the trainer says about its checkpoints: which steps may be saved, what is written beside
them, who is told (checkpoint.SaveDuty)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from torchtitan_rl_ft.journal.checkpoints import Marker
from torchtitan_rl_ft.journal.protocol import State
from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.replica.shards import local_shard
from torchtitan_rl_ft.trainer.attempt import all_finite
from torchtitan_rl_ft.trainer.group_link import GroupLink
from torchtitan_rl_ft.trainer.lineage import Lineage
from torchtitan_rl_ft.trainer.stepper import Stepper

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saving:
    """`reseed` seeds the random numbers of the step that was restored; `model` and `layout` are
    the identity and the layout that markers carry."""

    stepper: Stepper
    lineage: Lineage
    link: GroupLink
    parameters: Sequence[torch.nn.Parameter]
    reseed: Callable[[], None]
    model: str
    layout: Mapping[str, int]
    events: EventSink

    def may_save(self, step: int) -> bool:
        """False also when the update has made numbers of finite gradients that are not finite: no
        later start may find them."""
        finite = all_finite([local_shard(p.detach()) for p in self.parameters])
        if not self.link.all_agree(finite):
            self.save_failed(step, "parameters are not finite")
            return False
        return self.stepper.may_save()

    def marker(self) -> Marker:
        at, tail = self.lineage, self.lineage.tail
        return Marker(
            step=at.step,
            token=at.token,
            model=self.model,
            batch=None if tail is None else {"id": tail.batch_id, "digest": tail.digest},
            policy_version=self.stepper.policy_version,
            torchft={"step": at.step, "batches_committed": at.batches_committed},
            layout=self.layout,
        )

    def saved(self, marker: Marker, path: str) -> list[str]:
        return self.stepper.saved(State(marker.step, marker.token), path)

    def save_failed(self, step: int, reason: str) -> None:
        cause = f"checkpoint of step {step} not written, the run goes on: {reason}"
        logger.error("%s", cause)
        self.events.emit(Kind.FAULT, cause=cause, step=step, subject="checkpoint")

    def restored(self, marker: Marker, path: str, differs: list[str]) -> None:
        random_numbers = "as saved"
        if differs:
            random_numbers = f"seeded anew for step {marker.step}: {', '.join(differs)} changed"
            self.reseed()
        logger.info("restored %s; random numbers: %s", path, random_numbers)
        self.events.emit(
            Kind.RESTORE,
            step=marker.step,
            path=path,
            random_numbers=random_numbers,
            batch=marker.batch,
            torchft=dict(marker.torchft),
        )
