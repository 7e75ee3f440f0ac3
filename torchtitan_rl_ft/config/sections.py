"""The config sections that this package registers, as plain dataclasses (no torch here).

The text under each field is its help. `[fault_tolerance]` carries TorchTitan's own keys with
TorchTitan's spelling and defaults, then ours for what TorchTitan hides; a test keeps the first
part equal to TorchTitan's. `[recovery]` is in recovery.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torchtitan_rl_ft.config.observing import ObservabilitySection, OtelSection
from torchtitan_rl_ft.config.recovery import RecoverySection
from torchtitan_rl_ft.config.weights import WeightsSection


@dataclass(kw_only=True, slots=True)
class JobSection:
    config_file: str = ""
    """TOML file of the job: a path, or the name of one shipped with the package."""

    module: str = "torchtitan_rl_ft"
    """Module whose config registry gives the base config (TorchTitan's --module)."""

    config: str = "base"
    """Function of that registry (TorchTitan's --config)."""

    dump_folder: str = "./outputs/rl_ft"
    """The run folder itself."""

    description: str = ""
    """Free text, copied into config.resolved.json."""


@dataclass(kw_only=True, slots=True)
class ModelSection:
    name: str = "qwen3"
    """Model family, as TorchTitan names it."""

    flavor: str = "tiny"
    """"tiny": made by this package in the run folder; "hf": derived from config.json in
    hf_assets_path; else a flavor of TorchTitan's registry."""

    hf_assets_path: str = ""
    """Directory with config.json, tokenizer and safetensors. Empty with flavor "tiny"."""

    init_seed: int = 0
    """Seed of the random weights of flavor "tiny"."""


@dataclass(kw_only=True, slots=True)
class FaultToleranceSection:
    # TorchTitan's keys ------------------------------------------------------------------
    enable: bool = False
    """Run replica groups under torchft."""

    process_group: str = "gloo"
    """Backend between replica groups: gloo or nccl."""

    process_group_timeout_ms: int = 10000
    """A collective between replica groups that takes longer fails and the step is retried."""

    replica_id: int = 0
    """This replica group's id, counted from 0."""

    group_size: int = 0
    """Number of replica groups. 0: auto, as many as the job starts (`replica_groups`)."""

    min_replica_size: int = 1
    """Fewest groups that may commit a step. Below it training waits."""

    semi_sync_method: str | None = None
    """None, "local_sgd" or "diloco": groups step by themselves and sync once a window
    (docs/semi_sync.md)."""

    sync_steps: int = 5
    """Inner steps of a window, that is between outer syncs; training.steps and the LR schedule
    count windows (semi-sync only)."""

    should_quantize: bool = False
    """Quantize the outer all-reduce; refused, see docs (semi-sync only)."""

    fragment_sync_delay: int = 0
    """Inner steps between issuing and applying a fragment's sync; 0, the only legal value."""

    fragment_update_alpha: float = 0.0
    """Share of the local parameters kept at a sync; 0, the only legal value."""

    module_fqns_per_model_fragment: list[list[str]] = field(default_factory=list)
    """Modules of each fragment of the outer sync; every parameter in one (semi-sync only)."""

    num_fragments: int = 1
    """Fragments of the outer sync, by size, where none are named (semi-sync only)."""

    # Ours -------------------------------------------------------------------------------
    replica_groups: int = 2
    """Replica groups that `torchtitan run` starts."""

    ranks_per_group: int = 1
    """Processes (ranks) of one replica group."""

    heartbeat_interval_ms: int = 100
    """How often a group's manager tells the lighthouse that it lives."""

    heartbeat_timeout_ms: int = 5000
    """Silence after which the lighthouse takes a group for dead."""

    join_timeout_ms: int = 1000
    """How long the lighthouse waits for stragglers once a quorum is possible."""

    quorum_tick_ms: int = 50
    """How often the lighthouse looks for a quorum."""

    lighthouse_min_replicas: int = 0
    """Smallest quorum the lighthouse forms. 0: min_replica_size, the only legal value else."""

    quorum_timeout_s: int = 300
    """How long a group waits for a quorum before it ends."""

    quorum_retries: int = 299
    """Tries within quorum_timeout_s; the pause after a lighthouse restart is
    quorum_timeout_s / (quorum_retries + 1)."""

    connect_timeout_s: int = 20
    """Limit for connecting to manager and lighthouse."""

    manager_timeout_s: int = 60
    """Limit for commit votes and for healing transfers."""

    max_commit_retries: int = 20
    """Refused commits in a row with unchanged members before a group gives up."""

    heal_address: str = ""
    """Host, or host:port, at which other groups reach the state that this one offers to heal them.
    Empty: where it listens (loopback, or TORCHTITAN_RL_FT_HOST). Printed at the start."""

    heal_port: int = 0
    """Port at which the job's first rank offers its state, each further rank one higher; the same
    goes for a port in heal_address. 0: any."""

    heal_warn_share: float = 0.5
    """Share of a heal, from asking for a quorum to the loaded state, above which its transfer is
    told of as slow."""

    outer_lr: float = 0.7
    """Learning rate of the outer optimizer (diloco only)."""

    outer_momentum: float = 0.9
    """Nesterov momentum of the outer optimizer (diloco only)."""


@dataclass(kw_only=True, slots=True)
class RLSection:
    mode: Literal["sync", "semi_async", "async"] = "sync"
    """Share of a batch that must be rolled out by the newest policy, the one of the step
    before: sync 1, semi_async `start_fraction`, async 0."""

    start_fraction: float = 0.5
    """See mode (semi_async only)."""

    max_policy_age: int = 0
    """Largest number of policy versions between a sample's generation and its training.
    Judged when a batch is sealed; older samples are dropped and counted."""

    groups_per_step: int = 16
    """Prompt groups of one batch; of one inner step in semi-sync, whose batch is a window."""

    samples_per_prompt: int = 8
    """Samples of one prompt group."""

    loss: Literal["grpo", "tis"] = "grpo"
    """grpo: clipped importance ratio. tis: truncated importance weight on the policy gradient."""

    clip_ratio_low: float = 0.2
    """Lower clip: the ratio is kept above 1 - clip_ratio_low."""

    clip_ratio_high: float = 0.2
    """Upper clip: the ratio is kept below 1 + clip_ratio_high."""

    ratio_cap: float = 2.0
    """Truncation of the importance ratio itself."""

    kl_coef: float = 0.0
    """Weight of the KL term to the reference policy. 0: no reference is loaded."""

    kl_reference: str = ""
    """HF directory of the reference policy. Empty: the initial model."""

    advantage_norm: Literal["std", "none"] = "std"
    """Divide group-centred rewards by their standard deviation, or not (Dr. GRPO)."""

    loss_norm: Literal["token", "sample"] = "token"
    """Normalise by all trained tokens of the batch, or per sample first."""

    data_source: str = "torchtitan_rl_ft.rollout.tasks.sorting:SortDigits"
    """module:name of the prompt source (rollout/protocols.py: DataSource)."""

    reward: str = "torchtitan_rl_ft.rollout.tasks.sorting:reward"
    """module:name of the reward (rollout/protocols.py: Reward)."""

    filter: str = ""
    """module:name of a filter of prompt groups (rollout/protocols.py: GroupFilter)."""

    seed: int = 0
    """Seed of prompts and sampling."""

    eval_prompts: int = 100
    """Held-out prompts answered greedily at the end. 0: no evaluation."""

    mask_off_policy_prefix: bool = False
    """Train only the tokens of the newest version of a sample that spans several."""

    max_prompt_failures: int = 3
    """Failed generations of a prompt before its group is dropped."""

    warn_silent_s: float = 60.0
    """No prompt group was accepted for so long while some are rolled out: a warning that says
    why, repeated at growing distances."""

    max_silent_s: float = 0.0
    """No prompt group was accepted for so long while some are rolled out: the rollout role fails.
    0: never."""

    max_dropped_batches: int = 10
    """So many batches' worth of prompt groups dropped in a row: the rollout role fails."""

    max_flat_batches: int = 0
    """So many batches in a row in which all rewards of each group are equal: the rollout role
    fails. 0: never, since a model that has learned all there is looks the same."""


@dataclass(kw_only=True, slots=True)
class EngineGroup:
    """One `[[rollout.groups]]` table."""

    name: str
    """Name of the group; requests name it, "policy" when they name none."""

    role: Literal["regular", "prefill", "decode", "frozen"] = "regular"
    """regular: takes the policy's versions. prefill, decode: the two halves of disaggregated
    engines, taken from one group of each. frozen: keeps its own checkpoint (a reference or
    reward model)."""

    model: str = ""
    """HF directory. Empty: the job's model; a frozen group must name one."""

    engines: int = 1
    """Engines of the group."""

    nodes_per_engine: int = 1
    """Processes that one engine spans (SGLang's --nnodes); started and retired as one."""

    engine_args: list[str] = field(default_factory=list)
    """Arguments after those of rollout.engine_args."""


@dataclass(kw_only=True, slots=True)
class RolloutSection:
    # slime's knobs, by name ---------------------------------------------------------------
    use_fault_tolerance: bool = True
    """Accepted for old configurations, without effect: engines are always watched."""

    health_check_first_wait: float = 600.0
    """Seconds after a (re)start or resume before an engine is probed in the background."""

    health_check_interval: float = 600.0
    """Seconds between background probes."""

    health_check_timeout: float = 600.0
    """Seconds within which one of the probes of a check must be answered."""

    health_check_failure_threshold: int = 2
    """Probes that all have to fail, within health_check_timeout and without a token of any
    request, before an engine is taken for dead."""

    cleanup_timeout: float = 60.0
    """Seconds for all clean-up together."""

    session_id: str = ""
    """Name of the serving session. Empty: chosen by rule (see docs)."""

    data_dir: str = ""
    """Folder of queues and dumps of the session."""

    queue_run_id: str = ""
    """Id of the run inside data_dir."""

    retain_ttl: float = 3600.0
    """Seconds that serving and its engines are kept after a job that failed or was killed, for a
    resubmitted one to reattach. 0: they end with the job."""

    keep_serving: bool = False
    """Keep them after Ctrl-C as well (`torchtitan run --keep-serving`)."""

    debug_mode: Literal["none", "rollout_only", "train_only"] = "none"
    """rollout_only: no trainer, samples are dumped. train_only: no engine, batches come from
    dumps."""

    save_debug_rollout_data: str = ""
    """Template of dump files of the samples that are sealed, with {rollout_id}. Relative: in the
    run folder."""

    load_debug_rollout_data: str = ""
    """Template of dump files to train from instead of generating (implies train_only). Relative:
    in the run folder."""

    load_debug_rollout_data_subsample: float = 1.0
    """Share of the prompt groups of each dump that is used; groups stay whole."""

    save_debug_train_data: str = ""
    """Template of dump files of what was trained, with {rollout_id}. Relative: in the run
    folder."""

    # Engines ----------------------------------------------------------------------------
    engines: int = 2
    """SGLang engines."""

    engine_args: list[str] = field(default_factory=list)
    """More arguments for each SGLang server, as on its command line."""

    engine_python: str = ""
    """Interpreter that runs SGLang. Empty: this one."""

    engine_start_timeout_s: float = 300.0
    """Limit for an engine to come up."""

    engine_max_restarts: int = 3
    """Starts of one engine within engine_restart_window_s before its slot is given up."""

    engine_restart_window_s: float = 600.0
    """See engine_max_restarts."""

    min_engines: int = 1
    """Fewest engines that must serve."""

    standby_engines: int = 0
    """Engines more, started and idle: one takes the place of an engine that died by one
    install."""

    refill_start: Literal["at_once", "at_boundary", "before_update"] = "at_once"
    """at_once: a replacement starts when an engine dies and takes the current version.
    at_boundary: it starts at once and joins with the next version. before_update: it starts only
    when the next version is published."""

    external_urls: list[str] = field(default_factory=list)
    """SGLang servers that somebody else owns: probed, given versions and requests, never started
    or ended."""

    groups: list[EngineGroup] = field(default_factory=list)
    """`[[rollout.groups]]`: groups of engines. Empty: one regular group of `engines`."""

    placement: Literal["separate", "colocated"] = "separate"
    """colocated: engines give their memory up while the trainer computes."""

    router: Literal["own", "smg"] = "own"
    """smg: an SGLang gateway (package smg) in front of the engines."""

    stream_interval_tokens: int = 32
    """Tokens between two messages of a running request: what a dying engine can lose. A request for
    no more than that is not streamed."""

    request_timeout_s: float = 120.0
    """Limit for one generate request."""

    max_concurrent_groups: int = 64
    """Prompt groups in flight."""

    # Sampling ---------------------------------------------------------------------------
    temperature: float = 1.0
    """Sampling temperature."""

    top_p: float = 1.0
    """Nucleus mass."""

    top_k: int = -1
    """Number of candidate tokens; -1: all."""

    max_response_tokens: int = 16
    """Longest answer, in tokens."""

    max_prompt_tokens: int = 64
    """Longest prompt, in tokens; longer ones are dropped with a reason."""

    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end an answer, beside the tokenizer's end token."""

    # Weights ----------------------------------------------------------------------------
    weight_transport: Literal["auto", "disk", "nixl"] = "auto"
    """How policies travel to engines."""

    pause_mode: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to running requests when an engine takes a new version."""

    install_timeout_s: float = 120.0
    """Limit for installing one version on one engine."""

    publish_buffer_mb: int = 256
    """Buffer in which weights are gathered, tensor by tensor."""

    # Journal ----------------------------------------------------------------------------
    journal: bool = True
    """Keep every accepted sample on disk before it is trained on."""


@dataclass(kw_only=True, slots=True)
class ChaosSection:
    enable: bool = False
    """Inject faults (benchmarks and tests only)."""

    faults: list[str] = field(default_factory=list)
    """What to inject, one-shot each: "kill engine-1 at step 2" (docs/faults.md)."""

    mtbf_s: float = 0.0
    """Mean time between faults drawn from `mtbf_faults`, exponential, from `seed`. 0: none."""

    mtbf_faults: list[str] = field(default_factory=list)
    """What is drawn, each a fault without a moment: "kill any trainer"."""

    replay: str = ""
    """File of a recorded fault trace to inject again: events.jsonl of a run, or what `torchtitan
    chaos --record` wrote."""

    replay_by: Literal["time", "step"] = "time"
    """Inject recorded faults at the same times of training, or so long after the same steps."""

    seed: int = 0
    """Seed of what a fault leaves open."""


@dataclass(kw_only=True, slots=True)
class Sections:
    """The registered sections of a job, resolved."""

    job: JobSection = field(default_factory=JobSection)
    model: ModelSection = field(default_factory=ModelSection)
    fault_tolerance: FaultToleranceSection = field(default_factory=FaultToleranceSection)
    rl: RLSection = field(default_factory=RLSection)
    rollout: RolloutSection = field(default_factory=RolloutSection)
    weights: WeightsSection = field(default_factory=WeightsSection)
    recovery: RecoverySection = field(default_factory=RecoverySection)
    observability: ObservabilitySection = field(default_factory=ObservabilitySection)
    otel: OtelSection = field(default_factory=OtelSection)
    chaos: ChaosSection = field(default_factory=ChaosSection)
