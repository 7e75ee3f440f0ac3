"""The section `[recovery]`. The text under each field is its help (no torch here)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(kw_only=True, slots=True)
class RecoverySection:
    # Restarting -------------------------------------------------------------------------
    auto_continue_train: bool = False
    """Resume from the newest complete checkpoint and the journal of the run folder."""

    exit_on_missing_checkpoint: bool = False
    """With auto_continue_train: refuse to start fresh."""

    role_max_restarts: int = 3
    """Restarts of one role within role_restart_window_s before the job ends."""

    role_restart_window_s: float = 600.0
    """See role_max_restarts."""

    batch_wait_timeout_s: float = 600.0
    """How long a trainer waits for a sealed batch before it ends."""

    save_optimizer: bool = True
    """Keep the optimizer's state in checkpoints. False only for an optimizer without state."""

    partial_interval_tokens: int = 256
    """Tokens of an unfinished trajectory between two writes to the journal, from which a restarted
    rollout role goes on. 0: unfinished trajectories are not kept."""

    # Standby trainers -------------------------------------------------------------------
    standby: Literal["none", "spare", "from_rollout"] = "none"
    """spare: warm trainer processes wait and take the place of a lost group. from_rollout: without
    a spare, an engine's place is lent to the new trainer until it trains."""

    standby_groups: int = 1
    """Warm spare groups (standby "spare")."""

    # Graceful exit (Primus's names and defaults) ------------------------------------------
    exit_signal_handler: bool = False
    """At SIGTERM: save at the next step boundary and exit with the code to be requeued (75)."""

    exit_duration_in_mins: float | None = None
    """Minutes after which the job saves at a step boundary and exits to be requeued."""

    exit_interval: int | None = None
    """Save and exit to be requeued after every step that this divides."""

    adlr_autoresume: bool = False
    """Look for a request to stop (autoresume_file) at an interval; alias autoresume."""

    adlr_autoresume_interval: int = 1000
    """Steps between two looks; alias autoresume_interval."""

    autoresume_file: str = ""
    """The request to stop, a file. Empty: autoresume.request in the run folder."""

    disable_last_saving: bool = False
    """No checkpoint at the natural last step. An early exit saves all the same."""

    # Monitoring (Primus's names and defaults) ---------------------------------------------
    enable_ft_package: bool = False
    """Limits of their own for phases: phase_timeouts, and what calc_ft_timeouts has learned.
    Without it every rank is watched all the same, by phase_timeout_s and
    rank_silence_timeout_s."""

    calc_ft_timeouts: bool = False
    """With enable_ft_package: learn the limits of the phases from their observed durations; kept in
    the run folder for its next start."""

    phase_timeouts: list[str] = field(default_factory=list)
    """With enable_ft_package: limits of phases in seconds, as reduce=20, or
    first_forward_backward=120 for the time before a process has committed a step."""

    phase_timeout_s: float = 600.0
    """A rank that does not come forward in a phase for this long is ended. Phases in which it waits
    for others (a batch, a quorum) have their own timeouts and a minute."""

    rank_silence_timeout_s: float = 60.0
    """A rank that gives no sign of life for this long (stopped, or its interpreter held) is ended,
    whatever its phase."""

    run_workload_inspector_server: bool = False
    """Serve phases, stacks and last events of every rank over HTTP, with the run's token."""

    workload_inspector_port: int = 0
    """Its port on loopback. 0: any; the address is in roles/."""

    inprocess_restart: bool = False
    """After a failed step or a dead peer, start again inside the living process."""

    inprocess_max_restarts: int = 3
    """In-process restarts of a group within role_restart_window_s; then the process ends."""

    # Numeric safety (Primus's names and defaults) -------------------------------------------
    check_for_nan_in_loss_and_grad: bool = True
    """Refuse a step whose loss or gradients are not finite on any rank."""

    max_numeric_refusals: int = 3
    """Refusals of one batch on numeric grounds before the job stops."""

    check_for_spiky_loss: bool = False
    """Tell of a loss far from those of the steps before."""

    check_for_large_grads: bool = False
    """Tell of a gradient norm far from those of the steps before, and of its parameter."""

    anomaly_factor: float = 10.0
    """How many times the largest of the steps before is spiky or large."""

    anomaly_warmup_steps: int = 10
    """Steps before anomalies are told."""

    decrease_batch_size_if_needed: bool = False
    """At start: shrink a batch that the layout cannot split to the nearest that it can."""

    rerun_mode: Literal["disabled", "validate_results", "report_stats"] = "disabled"
    """Compute a step's result again on another group. validate_results: every rerun_interval
    steps, and end a group whose result is wrong; report_stats: tell how results differ."""

    rerun_interval: int = 1
    """Steps between two reruns."""

    replica_hash_interval: int = 0
    """Steps between two comparisons of the groups' parameters, by hash. 0: never."""
