"""What a step's numbers show beside the proof, told as events: anomalies, groups that hold other
bits, groups that compute wrong results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torchtitan_rl_ft.observability.events import EventSink, Kind
from torchtitan_rl_ft.replica.group import Quorum
from torchtitan_rl_ft.trainer.anomalies import AnomalyWatch
from torchtitan_rl_ft.trainer.attempt import LOSS, NORM, Result, rerun_part
from torchtitan_rl_ft.trainer.rerun import Finding, Rerun, Verdict, WrongResult


class NumericWatch:
    """Sees the result of every attempt. All ranks of all groups call it alike; the first group of
    the quorum tells."""

    def __init__(
        self,
        events: EventSink,
        anomalies: AnomalyWatch,
        largest_parameter: Callable[[], tuple[str, float]],
        rerun: Rerun | None,
    ) -> None:
        """`largest_parameter`: name of the parameter with the largest gradient, and its share of
        all squared norms; a collective of the group."""
        self._events, self._anomalies = events, anomalies
        self._largest_parameter, self._rerun = largest_parameter, rerun

    def committed(self, step: int, quorum: Quorum, result: Result) -> dict[str, float]:
        """A step will be committed; its gradients are still there. Returns metrics."""
        outcome = result.outcome
        assert outcome is not None
        losses, norms = outcome.board[:, LOSS].tolist(), outcome.board[:, NORM].tolist()
        for found in self._anomalies.look(outcome.loss, result.grad_norm, losses, norms):
            name, share = self._largest_parameter()
            self._tell(
                quorum,
                Kind.ANOMALY,
                cause=f"{found}; the largest gradient is that of {name} ({share:.0%})",
                step=step,
                what=found.what,
                value=found.value,
                place=found.place,
                parameter=name,
            )
        self._tell_findings(step, quorum, result.findings)
        if self._rerun is not None and self._rerun.mode == "report_stats":
            part = rerun_part(outcome.board, self._rerun)
            return {"rerun/largest_difference": self._rerun.largest_difference(part)}
        return {}

    def refused(self, step: int, quorum: Quorum, result: Result) -> bool:
        """A step was refused. True when this rank holds other bits than the rest and has to be
        healed. Raises WrongResult when this group's results are wrong again and again."""
        for difference in result.differing:
            self._tell(
                quorum,
                Kind.FAULT,
                cause=f"replica groups differ: {difference}",
                step=step,
                subject=difference.name,
                groups=_names(quorum, difference.groups),
                rank=difference.rank,
            )
        self._tell_findings(step, quorum, result.findings)
        wrong = [f for f in result.findings if f.verdict is not Verdict.TRANSIENT]
        if mine := [f for f in wrong if quorum.rank in f.groups]:
            who = " or ".join(_names(quorum, mine[0].groups))
            raise WrongResult(f"step {step}: {mine[0].verdict} of {who}: {mine[0]}")
        return any(quorum.rank in d.groups for d in result.differing)

    def _tell_findings(self, step: int, quorum: Quorum, findings: Sequence[Finding]) -> None:
        for finding in findings:
            self._tell(
                quorum,
                Kind.FAULT,
                cause=str(finding),
                step=step,
                subject=" or ".join(_names(quorum, finding.groups)),
                verdict=str(finding.verdict),
            )

    def _tell(self, quorum: Quorum, kind: Kind, *, cause: str, step: int, **data: Any) -> None:
        if quorum.rank == 0:
            self._events.emit(kind, cause=cause, step=step, **data)


def _names(quorum: Quorum, places: Sequence[int]) -> list[str]:
    """Replica ids of groups at `places` in the quorum."""
    return [quorum.members[p].split(":")[0] for p in places]
