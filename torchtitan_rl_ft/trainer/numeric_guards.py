"""The guards of `[recovery]` against bad numbers, put together for one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from torchtitan_rl_ft.config.recovery import RecoverySection
from torchtitan_rl_ft.observability.events import EventSink
from torchtitan_rl_ft.trainer.anomalies import AnomalyWatch
from torchtitan_rl_ft.trainer.attempt import Guards, Placement
from torchtitan_rl_ft.trainer.gradients import local_gradients
from torchtitan_rl_ft.trainer.numeric_watch import NumericWatch
from torchtitan_rl_ft.trainer.rerun import Rerun


def guards_of(
    recovery: RecoverySection, degree: int, hashed: Callable[[], Mapping[str, torch.Tensor]]
) -> Guards:
    """What an attempt looks at. `degree`: data-parallel ranks of the group. `hashed`: what all
    groups hold alike, local tensors by name."""
    rerun = None
    if recovery.rerun_mode != "disabled":
        rerun = Rerun(recovery.rerun_mode, recovery.rerun_interval, degree)
    return Guards(
        finite=recovery.check_for_nan_in_loss_and_grad,
        rerun=rerun,
        hashed=hashed if recovery.replica_hash_interval else None,
        hash_interval=recovery.replica_hash_interval or 1,
    )


def watch_of(
    recovery: RecoverySection,
    placement: Placement,
    rerun: Rerun | None,
    model_parts: Sequence[torch.nn.Module],
    events: EventSink,
) -> NumericWatch:
    """What tells of anomalies, and of what the guards have found."""
    anomalies = AnomalyWatch(
        loss=recovery.check_for_spiky_loss,
        gradients=recovery.check_for_large_grads,
        factor=recovery.anomaly_factor,
        warmup_steps=recovery.anomaly_warmup_steps,
        degree=placement.degree,
    )
    return NumericWatch(events, anomalies, lambda: largest_gradient(model_parts, placement), rerun)


def largest_gradient(
    model_parts: Sequence[torch.nn.Module], placement: Placement
) -> tuple[str, float]:
    """Name of the parameter with the largest gradient, and its share of all squared norms.
    Collective over the group."""
    named = [(n, p) for m in model_parts for n, p in m.named_parameters() if p.requires_grad]
    held = local_gradients(p for _, p in named)
    squares = torch.stack([g.double().square().sum() for g in held])
    placement.sum(squares)
    at = int(squares.argmax())
    return named[at][0], float(squares[at] / squares.sum())
