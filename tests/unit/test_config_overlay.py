"""The values of a job on TorchTitan's config classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from config_jobs import job

from torchtitan_rl_ft.config.errors import ConfigError
from torchtitan_rl_ft.config.overlay import apply, read_values
from torchtitan_rl_ft.platform import torchtitan_cpu

torchtitan_cpu.install()

from torchtitan.components.optimizer import (  # noqa: E402
    OptimizersContainer,
    ParamGroupConfig,
    default_adamw,
)
from torchtitan.distributed.activation_checkpoint import (  # noqa: E402
    FullAC,
    MemoryBudgetAC,
    SelectiveAC,
)

from torchtitan_rl_ft.trainer.rl_trainer import RLFaultTolerantTrainer  # noqa: E402

pytestmark = pytest.mark.timeout(120)


def trainer(**kwargs: Any) -> RLFaultTolerantTrainer.Config:
    """A trainer config as a registry function would return it."""
    return RLFaultTolerantTrainer.Config(**{"optimizer": default_adamw(lr=1e-2), **kwargs})


def overlaid(tmp_path: Path, text: str, config: Any = None, *argv: str) -> Any:
    resolved = job(tmp_path, text, *argv, registry=lambda module, function: {})
    return apply(config or trainer(), resolved)


def test_values_reach_torchtitan_and_our_sections(tmp_path: Path) -> None:
    text = """
[job]
dump_folder = "/runs/a"
[model]
hf_assets_path = "/models/a"
[training]
seq_len = 64
[profiling]
profile_freq = 7
[comm]
train_timeout_seconds = 50
[fault_tolerance]
min_replica_size = 2
[rl]
kl_coef = 0.5
[rollout]
engine_args = ["--a"]
"""
    config = overlaid(tmp_path, text)
    assert (config.dump_folder, config.hf_assets_path) == ("/runs/a", "/models/a")
    assert config.training.seq_len == 64
    assert config.profiler.profile_freq == 7
    assert config.comm.train_timeout_seconds == 50
    assert config.fault_tolerance.min_replica_size == 2
    assert config.rl.kl_coef == 0.5
    assert config.rollout.engine_args == ["--a"]


def test_what_the_job_does_not_name_stays(tmp_path: Path) -> None:
    base = trainer(activation_checkpoint=None)
    base.training.steps = 77
    config = overlaid(tmp_path, "[training]\nseq_len = 64\n", base)
    assert config.training.steps == 77
    assert config.activation_checkpoint is None
    assert config.optimizer == base.optimizer
    assert base.training.seq_len == 2048  # the registry's config is not touched


def test_the_config_shares_nothing_with_the_job(tmp_path: Path) -> None:
    resolved = job(tmp_path, '[compile]\ncomponents = ["loss"]\n')
    apply(trainer(), resolved).compile.components.append("model")
    assert resolved.get("compile.components") == ["loss"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[checkpoint]\nkeep_latest_k = 1\n", r"\[checkpoint\] is refused: We need to maintain"),
        ("[checkpoint]\ninterval = 0\n", r"\[checkpoint\] .*interval.*job.toml:2"),
        ("[compile]\nenable_async_tensor_parallel = true\n", r"\[compile\] is refused: Async TP"),
        ("[debug]\nbatch_invariant = true\n", "TorchTitan refuses the configuration: Batch-inv"),
        ('[activation_checkpoint]\nmode = "memory_budget"\n', "TorchTitan refuses .* compile"),
    ],
)
def test_what_torchtitan_refuses_is_one_clear_error(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as e:
        overlaid(tmp_path, text)
    assert len(e.value.problems) == 1 and "\n" not in e.value.problems[0]


# [optimizer] --------------------------------------------------------------------------------


def kwargs(config: Any) -> dict[str, Any]:
    (group,) = config.optimizer.param_groups
    return group.optimizer_kwargs


def test_flat_keys_change_the_one_group_of_the_registry(tmp_path: Path) -> None:
    config = overlaid(tmp_path, "[optimizer]\nbeta2 = 0.99\nweight_decay = 0.0\n")
    assert kwargs(config) == {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0}
    assert config.optimizer.implementation == "fused"


def test_flat_keys_keep_the_pattern_and_other_settings(tmp_path: Path) -> None:
    group = ParamGroupConfig(
        pattern="layers", optimizer_name="AdamW", optimizer_kwargs={"lr": 1.0, "amsgrad": True}
    )
    base = trainer(optimizer=OptimizersContainer.Config(param_groups=[group]))
    config = overlaid(tmp_path, '[optimizer]\nlr = 0.5\nimplementation = "foreach"\n', base)
    assert config.optimizer.param_groups[0].pattern == "layers"
    assert kwargs(config) == {"lr": 0.5, "amsgrad": True}
    assert config.optimizer.implementation == "foreach"


def test_a_registry_without_groups_gets_torchtitans_adamw(tmp_path: Path) -> None:
    base = trainer(optimizer=OptimizersContainer.Config())
    config = overlaid(tmp_path, "[optimizer]\nlr = 0.5\n", base)
    assert config.optimizer.param_groups[0].optimizer_name == "AdamW"
    assert kwargs(config)["lr"] == 0.5


def test_flat_keys_on_several_groups_are_ambiguous(tmp_path: Path) -> None:
    groups = [
        ParamGroupConfig(pattern=p, optimizer_name="AdamW", optimizer_kwargs={"lr": 1.0})
        for p in ("bias", ".*")
    ]
    base = trainer(optimizer=OptimizersContainer.Config(param_groups=groups))
    with pytest.raises(ConfigError, match="optimizer.lr fits one parameter group.*'bias', '.*'"):
        overlaid(tmp_path, "[optimizer]\nlr = 0.5\n", base)


def test_groups_of_the_file_replace_those_of_the_registry(tmp_path: Path) -> None:
    text = """
[[optimizer.param_groups]]
pattern = "bias"
optimizer_name = "Adam"
optimizer_kwargs = { lr = 0.1 }
[[optimizer.param_groups]]
pattern = ".*"
optimizer_name = "AdamW"
optimizer_kwargs = { lr = 0.2 }
"""
    config = overlaid(tmp_path, text)
    assert [type(g) for g in config.optimizer.param_groups] == [ParamGroupConfig] * 2
    assert config.optimizer.param_groups[0].optimizer_kwargs == {"lr": 0.1}


def test_another_optimizer_drops_what_only_the_former_knew(tmp_path: Path) -> None:
    group = ParamGroupConfig(
        pattern=".*",
        optimizer_name="DistMuon",
        optimizer_kwargs={"lr": 0.5, "momentum": 0.9, "nesterov": True},
    )
    base = trainer(optimizer=OptimizersContainer.Config(param_groups=[group]))
    config = overlaid(tmp_path, '[optimizer]\nname = "AdamW"\n', base)
    assert kwargs(config) == {"lr": 0.5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    with pytest.raises(ConfigError, match="beta1 and beta2 mean nothing to .*'DistMuon'"):
        overlaid(tmp_path, '[optimizer]\nname = "DistMuon"\nbeta1 = 0.5\n')


# [activation_checkpoint] --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "policy"),
    [("none", None), ("selective", SelectiveAC.Config), ("full", FullAC.Config)],
)
@pytest.mark.parametrize("before", [None, SelectiveAC.Config(), FullAC.Config()])
def test_the_mode_chooses_the_policy(tmp_path: Path, mode: str, policy: Any, before: Any) -> None:
    base = trainer(activation_checkpoint=before)
    config = overlaid(tmp_path, f'[activation_checkpoint]\nmode = "{mode}"\n', base)
    found = config.activation_checkpoint
    assert found is None if policy is None else type(found) is policy


def test_keys_of_the_policy(tmp_path: Path) -> None:
    text = '[activation_checkpoint]\nmode = "memory_budget"\nmemory_budget = 0.3\n'
    config = overlaid(tmp_path, f"{text}[compile]\nenable = true\n")
    found = config.activation_checkpoint
    assert isinstance(found, MemoryBudgetAC.Config) and found.memory_budget == 0.3
    base = trainer(activation_checkpoint=FullAC.Config())
    text = "[activation_checkpoint]\npreserve_rng_state = false\n"
    assert overlaid(tmp_path, text, base).activation_checkpoint.preserve_rng_state is False
    with pytest.raises(ConfigError, match="FullAC.Config has no 'memory_budget'"):
        overlaid(tmp_path, "[activation_checkpoint]\nmemory_budget = 0.3\n", base)
    with pytest.raises(ConfigError, match="means nothing without activation checkpoints"):
        overlaid(
            tmp_path,
            "[activation_checkpoint]\ndebug = true\n",
            trainer(activation_checkpoint=None),
        )


# And back -----------------------------------------------------------------------------------


def test_values_are_read_back(tmp_path: Path) -> None:
    text = """
[training]
seq_len = 64
[optimizer]
lr = 0.5
beta1 = 0.8
[activation_checkpoint]
mode = "full"
[rl]
kl_coef = 0.5
"""
    found = read_values(overlaid(tmp_path, text))
    assert found["training"]["seq_len"] == 64
    assert (found["optimizer"]["lr"], found["optimizer"]["beta1"]) == (0.5, 0.8)
    assert "param_groups" not in found["optimizer"]
    assert found["activation_checkpoint"]["mode"] == "full"
    assert found["rl"]["kl_coef"] == 0.5


def test_groups_that_flat_keys_cannot_say_are_read_back_as_groups(tmp_path: Path) -> None:
    base = trainer()
    base.optimizer.param_groups[0].pattern = "layers"
    (group,) = read_values(base)["optimizer"]["param_groups"]
    assert group["pattern"] == "layers" and group["optimizer_kwargs"]["betas"] == [0.9, 0.95]


def test_our_own_config_takes_every_key(tmp_path: Path) -> None:
    """Each key of each section has a place in the trainer's config."""
    from torchtitan_rl_ft.config import registry
    from torchtitan_rl_ft.config.schema import load_schema

    found = read_values(registry.call("torchtitan_rl_ft", "base"))
    policy_keys = {"mode", "memory_budget", "debug", "preserve_rng_state", "determinism_check"}
    policy_keys |= {"visualize_memory_budget_pareto", "force_recompute_mm_shapes_by_fqns"}
    for name, section in load_schema().sections.items():
        if name in ("job", "model", "observability", "otel", "chaos", "weights"):
            continue
        missing = set(section.keys) - set(found[name]) - {"param_groups"}
        assert missing <= (policy_keys if name == "activation_checkpoint" else set()), name
