"""What can only be checked with TorchTitan: its config, and the model on the meta device.

Imports torch; `torchtitan check` calls it after the rules of `checks.py` have passed.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchtitan_rl_ft.config import overlay, registry
from torchtitan_rl_ft.config.errors import ConfigError, near_miss
from torchtitan_rl_ft.config.resolve import Resolved
from torchtitan_rl_ft.models.tiny import make_tiny_model


@dataclass
class DeepReport:
    summary: str = ""
    """One line on the model and its parameters."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def run(resolved: Resolved) -> DeepReport:
    """Build the trainer config and the model without memory for its weights."""
    report = DeepReport()
    logging.disable(logging.WARNING)  # TorchTitan's, about configs that are not yet overlaid
    try:
        _check_plug_ins(resolved)
        with tempfile.TemporaryDirectory(prefix="torchtitan-check-") as scratch:
            report.summary = _check_model(resolved, trainer_config(resolved, Path(scratch)))
    except ConfigError as e:
        report.problems = e.problems
    finally:
        logging.disable(logging.NOTSET)
    return report


def _check_plug_ins(resolved: Resolved) -> None:
    """Import what `rl.data_source`, `rl.reward` and `rl.filter` name. Raises ConfigError."""
    for path in ("rl.data_source", "rl.reward", "rl.filter"):
        spec = resolved.get(path).partition("?")[0]
        if not spec:
            continue
        module, _, name = spec.partition(":")
        try:
            found = importlib.import_module(module)
        except Exception as e:  # a plug-in's import runs its own code: any error is the user's
            cause = f"{type(e).__name__}: {e}"
            raise ConfigError(f"{resolved.where(path)}: importing {module}: {cause}") from e
        if not callable(getattr(found, name, None)):
            hint = near_miss(name, dir(found))
            raise ConfigError(f"{resolved.where(path)}: {module} has no {name!r} to call{hint}")


def trainer_config(resolved: Resolved, scratch: Path) -> Any:
    """The trainer's config. A tiny model that the job would make in its run folder is made in
    `scratch` instead. Raises ConfigError."""
    job = resolved.sections.job
    config = registry.call(job.module, job.config)
    if not hasattr(config, "fault_tolerance") or not hasattr(config, "rl"):
        raise ConfigError(
            f"{resolved.where('job.config')}: the registry function returns "
            f"{type(config).__qualname__}, no config of the RL trainer"
        )
    from torchtitan_rl_ft.trainer.model_spec import ModelConfigError, build_model_spec

    config = overlay.apply(config, resolved)
    model = resolved.sections.model
    assets = model.hf_assets_path
    if model.flavor == "tiny" and not assets:
        assets = str(make_tiny_model(scratch / "model", model.init_seed))
    try:
        spec = build_model_spec(model.name, model.flavor, assets)
    except ModelConfigError as e:
        raise ConfigError(f"[model]: {e}") from None
    return overlay.refusing(lambda: dataclasses.replace(config, model_spec=spec))


def _check_model(resolved: Resolved, config: Any) -> str:
    """Build the model on the meta device and match it with the sizes. Raises ConfigError."""
    import torch

    from torchtitan_rl_ft.trainer.optimizers import RLOptimizers

    model_config = config.model_spec.model
    pipeline = "parallelism.pipeline_parallel_degree"
    if resolved.get(pipeline) > 1 and config.model_spec.pipelining_fn is None:
        raise ConfigError(f"this model cannot be pipelined: {resolved.where(pipeline)}")
    try:
        model_config.update_from_config(config=config)
        with torch.device("meta"):
            model = model_config.build()
        model.verify_module_protocol()
    except (ValueError, TypeError, NotImplementedError, RuntimeError, AssertionError) as e:
        raise ConfigError(
            f"the model cannot be built: {' '.join(str(e).split())} "
            f"({resolved.where('model.name')}, {resolved.where('model.flavor')})"
        ) from e
    try:
        RLOptimizers._build_param_groups(model, config.optimizer.param_groups, {})
        for group in config.optimizer.param_groups:
            RLOptimizers._resolve_optimizer_factory(group.optimizer_name)
    except (ValueError, NotImplementedError) as e:
        raise ConfigError(f"[optimizer] is refused: {e}") from None
    parameters = sum(p.numel() for p in model.parameters())
    return (
        f"model {config.model_spec.name} {config.model_spec.flavor}: {parameters:,} parameters in "
        f"{len(model_config.layers)} layers"
    )
