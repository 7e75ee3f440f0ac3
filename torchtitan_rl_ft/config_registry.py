"""TorchTitan's hook: `python -m torchtitan.train --module torchtitan_rl_ft --config NAME`.

Each function returns the config of one replica group that joins a run whose other roles are up.
`base` is what a TOML file overlays; the others are `base` plus a shipped file; `from_run` is the
config that the run folder holds.
"""

from __future__ import annotations

import dataclasses
import os

from torchtitan_rl_ft.platform import torchtitan_cpu

torchtitan_cpu.install()

from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig  # noqa: E402

from torchtitan_rl_ft.config import overlay, registry  # noqa: E402
from torchtitan_rl_ft.config.debug_mode import roles_of_trainers  # noqa: E402
from torchtitan_rl_ft.config.resolve import Resolved, resolve  # noqa: E402
from torchtitan_rl_ft.run_folder import ATTEMPT_ENV, REPLICA_ENV, RUN_ENV, RunFolder  # noqa: E402
from torchtitan_rl_ft.trainer.addresses import RunNotUp, find_run, require_roles  # noqa: E402
from torchtitan_rl_ft.trainer.checkpoint import RLCheckpointManager  # noqa: E402
from torchtitan_rl_ft.trainer.model_spec import build_model_spec  # noqa: E402
from torchtitan_rl_ft.trainer.optimizers import RLOptimizers  # noqa: E402
from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer  # noqa: E402


def base() -> RLFaultTolerantTrainer.Config:
    """Defaults of an RL job where they differ from TorchTitan's; the same on every machine, so
    that `torchtitan check` shows what any machine will do (config/registry_values.json)."""
    return RLFaultTolerantTrainer.Config(
        metrics=MetricsProcessor.Config(log_freq=1),
        optimizer=RLOptimizers.Config(param_groups=default_adamw(lr=1e-6).param_groups),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=8,
            seq_len=2048,
            steps=100,
            # torchft's collectives cannot be captured.
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(),
        checkpoint=RLCheckpointManager.Config(enable=True, interval=20, last_save_model_only=False),
        activation_checkpoint=None,  # type: ignore[arg-type]
        # The run's own record is events.jsonl.
        debug=DebugConfig(enable_structured_logging=False),
    )


def finished(config: RLFaultTolerantTrainer.Config, job: Resolved) -> RLFaultTolerantTrainer.Config:
    """`config` with everything that `job` says: its sections, the loss they imply, the model."""
    config = overlay.apply(config, job)
    if replica := os.environ.get(REPLICA_ENV):
        group = dataclasses.replace(config.fault_tolerance, replica_id=int(replica))
        config = dataclasses.replace(config, fault_tolerance=group)
    rl, model = job.sections.rl, job.sections.model
    assets = model.hf_assets_path or str(job.run_folder.model)
    return dataclasses.replace(
        config,
        dump_folder=str(job.run_folder.path),
        hf_assets_path=assets,
        model_spec=build_model_spec(model.name, model.flavor, assets),
        loss=dataclasses.replace(
            config.loss,
            kind=rl.loss,
            clip_ratio_low=rl.clip_ratio_low,
            clip_ratio_high=rl.clip_ratio_high,
            ratio_cap=rl.ratio_cap,
            kl_coef=rl.kl_coef,
            record=bool(job.sections.rollout.save_debug_train_data),
        ),
    )


def rl_ft() -> RLFaultTolerantTrainer.Config:
    """A trainer of the main job."""
    return _shipped("rl_ft.toml")


def rl_ft_debug() -> RLFaultTolerantTrainer.Config:
    """A trainer of the small, fast variant."""
    return _shipped("rl_ft_debug.toml")


def rl_ft_semi_sync() -> RLFaultTolerantTrainer.Config:
    """A trainer of the semi-synchronous variant."""
    return _shipped("rl_ft_semi_sync.toml")


def qwen3_8b_math() -> RLFaultTolerantTrainer.Config:
    """A trainer of the Qwen3-8B math workload."""
    return _shipped("qwen3_8b_math.toml")


def from_run() -> RLFaultTolerantTrainer.Config:
    """A trainer of the run in the folder that TORCHTITAN_RL_FT_RUN names."""
    folder = os.environ.get(RUN_ENV)
    if not folder:
        raise RunNotUp(f"{RUN_ENV} is not set: name the folder of the run to join")
    job = Resolved.read(folder)
    return finished(_beneath(job), job)


def _beneath(job: Resolved) -> RLFaultTolerantTrainer.Config:
    """What the registry function of the job returns. Ours are `base`: what they set over it is in
    the job's values."""
    section = job.sections.job
    if section.module == registry.OWN_MODULE:
        return base()
    return registry.call(section.module, section.config)


def _shipped(name: str) -> RLFaultTolerantTrainer.Config:
    """A shipped file; when the environment names a living run, in that run's folder.

    Raises RunNotUp."""
    overrides = ["--job.config_file", name]
    if folder := os.environ.get(RUN_ENV):
        overrides += ["--job.dump_folder", str(RunFolder(folder).path)]
    job = resolve(overrides)
    # Before its model is missed.
    run = find_run(str(job.run_folder.path))
    if ATTEMPT_ENV not in os.environ:  # started by hand: nobody is about to start them
        require_roles(run, roles_of_trainers(job.sections.rollout))
    return finished(base(), job)
