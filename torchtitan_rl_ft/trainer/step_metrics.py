"""The numbers of one committed step, as the reporting group sees them."""

from __future__ import annotations

from torchtitan_rl_ft.trainer.coverage import Outcome
from torchtitan_rl_ft.trainer.policy_loss import Stat


def step_metrics(
    outcome: Outcome, grad_norm: float, rates: dict[str, float], seconds: dict[str, float]
) -> dict[str, float]:
    """Means over the trained tokens of the whole batch; seconds by phase of this group.

    The keys of `metrics.jsonl` that come from the trainer; the ledger adds the batch's own.
    """
    tokens = outcome.stats[Stat.TOKENS]
    mean = outcome.stats / tokens if tokens else outcome.stats * 0.0
    timings = {f"time/{phase}_s": value for phase, value in seconds.items()}
    timings["time/wait_batch_s"] = timings.pop("time/waiting_for_batch_s", 0.0)
    return {
        "loss": outcome.loss,
        "grad_norm": grad_norm,
        "logprob_diff/mean": float(mean[Stat.ABS_LOGPROB_DIFF]),
        "ratio/mean": float(mean[Stat.RATIO]),
        "ratio/clipped": float(mean[Stat.CLIPPED]),
        "kl/mean": float(mean[Stat.KL]),
        "entropy/mean": float(mean[Stat.ENTROPY]),
        "trained_tokens": float(tokens),
        "participants": float(outcome.groups),
        "lr": next(iter(rates.values()), 0.0),
        "time/step_s": sum(seconds.values()),
        **timings,
    }
