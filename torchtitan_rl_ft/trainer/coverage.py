"""The proof that a step trained each sample of its batch exactly once.

Every participating rank fills a vector, the vectors are summed inside the group and over the
groups, and every rank checks the same sum. A wrong split, a group on another batch, step or
history, or a group that abstains makes the sum wrong for all, so all refuse the commit.
Loss, metrics and anomaly flags ride along, so that all groups see the same numbers.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import torch

from torchtitan_rl_ft.trainer.policy_loss import Stat

HASH_BITS = 40  # 40-bit hashes of up to 8192 groups sum exactly in float64
NONCE_BITS = 32
OWNER = 1 << 20  # a sample's slot sums up (1 + OWNER * rank of the group) of all that trained it


class Slot(IntEnum):
    """Fixed slots, before the statistics and the per-sample counts."""

    GROUPS = 0  # one per group that takes part
    ABSTAINED = 1  # groups that only kept the collective alive
    STEP = 2
    STATE_HASH = 3
    BATCH_HASH = 4
    NONCE = 5
    NONFINITE = 6  # groups whose own loss or gradients were not finite
    LOSS = 7


HEAD = len(Slot) + len(Stat)


class CoverageError(Exception):
    """The sum over the groups does not prove the step."""


@dataclass(frozen=True)
class Claim:
    """What this group believes it is doing."""

    step: int
    token: str
    digest: str
    n_samples: int
    n_recorded: int = 0
    """Values that ride along, one per token, to be dumped by whoever commits."""
    board: tuple[int, int] = (0, 0)
    """Rows, one per data-parallel rank of all groups, and columns of numbers that every rank tells
    all others (`Attempt.board` says which)."""

    @property
    def n_riders(self) -> int:
        """Values after the per-sample counts."""
        return self.n_recorded + self.board[0] * self.board[1]


@dataclass(frozen=True)
class Outcome:
    """What all groups agree on after the sum."""

    groups: int
    nonce: int
    nonfinite: int
    loss: float
    stats: np.ndarray  # [len(Stat)] sums over all trained tokens
    owners: np.ndarray  # [n_samples] rank in the quorum of the group that trained the sample
    recorded: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [n_recorded]
    board: np.ndarray = field(default_factory=lambda: np.zeros((0, 0)))  # [ranks, columns]


def draw_nonce() -> int:
    return secrets.randbits(NONCE_BITS)


def fold(text: str) -> int:
    """The hex digest or token `text` as a HASH_BITS integer."""
    raw = bytes.fromhex(text) if _is_hex(text) else text.encode()
    return int.from_bytes(raw[: HASH_BITS // 8], "little")


def _is_hex(text: str) -> bool:
    try:
        return len(bytes.fromhex(text)) >= HASH_BITS // 8
    except ValueError:
        return False


def fill(
    claim: Claim,
    samples: np.ndarray,
    *,
    rank: int,
    nonce: int,
    speaks: bool,
    nonfinite: bool,
    loss: float,
    stats: torch.Tensor | None,
    recorded: np.ndarray | None = None,
    row: tuple[int, np.ndarray] | None = None,
) -> torch.Tensor:
    """This rank's vector, float64 [HEAD + n_samples + n_riders].

    `rank` is the group's in the quorum. `speaks`: exactly one rank of the group carries the
    group's own slots. `row`: this rank's place on the board and its finite numbers [columns].
    """
    vector = np.zeros(HEAD + claim.n_samples + claim.n_riders)
    if speaks:
        state(vector, claim)
        vector[Slot.NONCE] = nonce
    vector[Slot.NONFINITE] = float(nonfinite)
    vector[Slot.LOSS] = loss if np.isfinite(loss) else 0.0
    if stats is not None:
        numbers = stats.cpu().numpy()
        vector[len(Slot) : HEAD] = np.where(np.isfinite(numbers), numbers, 0.0)
    np.add.at(vector, HEAD + samples, 1 + OWNER * rank)
    start = HEAD + claim.n_samples
    if recorded is not None:
        vector[start : start + claim.n_recorded] = recorded
    if row is not None:
        place, numbers = row
        at = start + claim.n_recorded + place * claim.board[1]
        vector[at : at + claim.board[1]] = numbers
    return torch.from_numpy(vector)


def state(vector: np.ndarray, claim: Claim) -> None:
    """Put one group's claim into its slots."""
    vector[Slot.GROUPS] = 1
    vector[Slot.STEP] = claim.step
    vector[Slot.STATE_HASH] = fold(claim.token)
    vector[Slot.BATCH_HASH] = fold(claim.digest)


def require_one_state(v: np.ndarray, claim: Claim, participants: int) -> None:
    """Raises CoverageError unless `participants` groups made this very claim in the sum `v`."""
    if v[Slot.ABSTAINED]:
        raise CoverageError(f"{int(v[Slot.ABSTAINED])} group(s) abstained")
    if v[Slot.GROUPS] != participants:
        raise CoverageError(f"{v[Slot.GROUPS]:g} of {participants} groups took part")
    for slot, own, what in (
        (Slot.STEP, claim.step, "step"),
        (Slot.STATE_HASH, fold(claim.token), "history"),
        (Slot.BATCH_HASH, fold(claim.digest), "batch"),
    ):
        if v[slot] != participants * own:
            raise CoverageError(f"groups disagree on the {what}")


def abstain(n_samples: int, *, speaks: bool, n_riders: int = 0) -> torch.Tensor:
    """The vector of a group that may not train: it makes every group's check fail at once,
    instead of letting the others wait for it until their timeout."""
    vector = torch.zeros(HEAD + n_samples + n_riders, dtype=torch.float64)
    vector[Slot.ABSTAINED] = float(speaks)
    return vector


def check(total: torch.Tensor, claim: Claim, participants: int) -> Outcome:
    """Raises CoverageError unless the sum proves that `participants` groups on this very state,
    step and batch trained every sample exactly once."""
    v = total.cpu().numpy()
    require_one_state(v, claim, participants)
    counts, owners = v[HEAD : HEAD + claim.n_samples] % OWNER, v[HEAD : HEAD + claim.n_samples]
    if not np.all(counts == 1):
        wrong = np.flatnonzero(counts != 1)
        raise CoverageError(
            f"{len(wrong)} of {len(counts)} samples not trained exactly once (first: sample "
            f"{wrong[0]}, {counts[wrong[0]]:g} times)"
        )
    riders = v[HEAD + claim.n_samples :]
    return Outcome(
        groups=participants,
        nonce=int(v[Slot.NONCE]),
        nonfinite=int(v[Slot.NONFINITE]),
        loss=float(v[Slot.LOSS]),
        stats=v[len(Slot) : HEAD].copy(),
        owners=owners.astype(np.int64) // OWNER,
        recorded=riders[: claim.n_recorded].copy(),
        board=riders[claim.n_recorded :].reshape(claim.board).copy(),
    )
