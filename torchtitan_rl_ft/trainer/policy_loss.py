"""Policy losses of the GRPO family, as a TorchTitan loss."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

import torch
from torchtitan.components.loss import BaseLoss, compute_logprobs
from torchtitan.config import CompileConfig

from torchtitan_rl_ft.trainer.rows import (
    ADVANTAGE,
    BEHAVIOUR_LOGPROB,
    REFERENCE_LOGPROB,
    TARGET,
    WEIGHT,
)

MAX_LOG_RATIO = 20.0  # exp(20) is far outside every clip range and far inside float32


class Stat(IntEnum):
    """Sums over trained tokens that a loss call leaves behind, in the order of `take_stats`."""

    TOKENS = 0
    ABS_LOGPROB_DIFF = 1
    RATIO = 2
    CLIPPED = 3
    KL = 4
    ENTROPY = 5


class PolicyLoss(BaseLoss):
    """`sum_t w_t l_t` over the tokens of a micro-batch, with weights sealed in the batch.

    With ratio r = exp(log pi(t) - log mu(t)), mu the engine's recorded behaviour policy, advantage
    A, truncated ratio r' = min(r, cap):

    * `grpo`: l = -min(r' A, clip(r', 1 - low, 1 + high) A). GRPO: arXiv 2402.03300, eq. 3, with
      the clip of PPO (arXiv 1707.06347, eq. 7), two-sided widths as in DAPO (arXiv 2503.14476).
      Truncation bounds the term for A < 0, which the clip leaves unbounded (arXiv 1912.09729).
    * `tis`: l = -stop_gradient(r') A log pi(t): policy gradient under a truncated importance
      weight (arXiv 1802.01561, eq. 1).
    * plus `kl_coef` times the k3 estimate exp(d) - d - 1, d = log ref(t) - log pi(t)
      (arXiv 2402.03300, eq. 4).

    Weights are normalised over the global batch when it is sealed, so the number of replica
    groups never enters. Labels: [B, S, C], channels of `trainer/rows.py`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseLoss.Config):
        kind: Literal["grpo", "tis"] = "grpo"
        """Which loss; see the class."""

        clip_ratio_low: float = 0.2
        """The ratio is kept above 1 - clip_ratio_low."""

        clip_ratio_high: float = 0.2
        """The ratio is kept below 1 + clip_ratio_high."""

        ratio_cap: float = 2.0
        """Truncation of the importance ratio."""

        kl_coef: float = 0.0
        """Weight of the KL term to the reference policy."""

        record: bool = False
        """Keep the policy's log-probs of each call, for `take_logprobs`."""

    def __init__(self, config: Config, *, compile_config: CompileConfig | None = None) -> None:
        self.config = config
        self.fn = self._token_losses  # type: ignore[assignment]  # typed for one loss tensor
        self._maybe_compile(compile_config)
        self._stats: torch.Tensor | None = None
        self._logprobs: list[torch.Tensor] = []

    def __call__(
        self,
        pred: torch.Tensor,
        labels: torch.Tensor,
        global_valid_tokens: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """`pred` logits [B, S, V], `labels` [B, S, C]; returns the scalar weighted sum."""
        loss, stats, logprobs = self.fn(pred, labels)
        if self.config.record:
            self._logprobs.append(logprobs)
        self._stats = stats if self._stats is None else self._stats + stats
        return loss, {}

    def take_stats(self) -> torch.Tensor | None:
        """Sums since the last call, float64 [len(Stat)], and start anew."""
        stats, self._stats = self._stats, None
        return stats

    def take_logprobs(self) -> torch.Tensor:
        """The targets' log-probs under the policy [B, S], 0 where nothing is trained, of the calls
        since the last one; with `record` only."""
        taken, self._logprobs = self._logprobs, []
        return torch.cat(taken)

    def _token_losses(
        self, pred: torch.Tensor, labels: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        c = self.config
        targets = labels[..., TARGET].long()
        weight, advantage = labels[..., WEIGHT], labels[..., ADVANTAGE]
        logprob, entropy = compute_logprobs(pred, targets, return_entropy=True)
        trained = weight > 0
        # Tokens without weight keep a finite value, so that 0 * loss stays 0.
        behaviour = torch.where(trained, labels[..., BEHAVIOUR_LOGPROB], logprob.detach())
        log_ratio = (logprob - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp().clamp(max=c.ratio_cap)
        clipped = ratio.clamp(1 - c.clip_ratio_low, 1 + c.clip_ratio_high)
        if c.kind == "grpo":
            token_loss = -torch.minimum(ratio * advantage, clipped * advantage)
        else:
            token_loss = -ratio.detach() * advantage * logprob
        kl = torch.zeros_like(logprob)
        if c.kl_coef > 0:
            gap = torch.where(trained, labels[..., REFERENCE_LOGPROB] - logprob, 0.0)
            gap = gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            kl = gap.exp() - gap - 1
            token_loss = token_loss + c.kl_coef * kl
        loss = (token_loss * weight).sum()
        with torch.no_grad():
            per_token = torch.stack(
                [
                    torch.ones_like(ratio),
                    (logprob - behaviour).abs(),
                    ratio,
                    (ratio != clipped).to(ratio.dtype),
                    kl,
                    entropy,
                ]
            )
            stats = torch.where(trained, per_token, 0.0).double().sum(dim=(1, 2))
            logprobs = torch.where(trained, logprob, 0.0)
        return loss, stats, logprobs
