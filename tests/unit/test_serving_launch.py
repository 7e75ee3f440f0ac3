"""The command line and environment of engines."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from torchtitan_rl_ft.config.placement import option
from torchtitan_rl_ft.config.sections import EngineGroup, RolloutSection
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.platform import sglang_cpu
from torchtitan_rl_ft.run_folder import TOKEN_ENV, RunFolder
from torchtitan_rl_ft.serving.launch import (
    SGLangLauncher,
    check_model_folder,
    interpreter_problem,
)
from torchtitan_rl_ft.weights.engine_hashes import cpu_hash, gpu_hash

POLICY = EngineGroup(name="policy")


def launcher(tmp_path: Path, on_cpu: bool = True, **rollout: object) -> SGLangLauncher:
    section = RolloutSection(**rollout)
    return SGLangLauncher(section, tmp_path / "model", RunFolder(tmp_path), on_cpu=on_cpu)


def test_an_engine_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_ENV, "secret")
    made = launcher(tmp_path)
    launch = made.prepare(1)
    assert launch.nodes[0][1:3] == ["-m", "torchtitan_rl_ft.platform.sglang_cpu"]
    assert option(launch.nodes[0], ("--model-path",)) == str(tmp_path / "model")
    assert option(launch.nodes[0], ("--host",)) == "127.0.0.1"
    port, torch_port = (
        option(launch.nodes[0], ("--port",)),
        option(launch.nodes[0], ("--nccl-port",)),
    )
    assert launch.url == f"http://127.0.0.1:{port}"
    assert port != torch_port
    assert launch.env["OMP_NUM_THREADS"] == "1"
    assert launch.env["TMPDIR"] == str(launch.scratch) == str(tmp_path / "serving" / "engine-1")
    assert TOKEN_ENV not in launch.env
    assert not any("secret" in word for word in launch.nodes[0])
    layout = made.layout(POLICY)
    assert made.seeded(POLICY)
    assert layout.hash is cpu_hash
    assert (layout.dtype, layout.ranks) == ("float32", 1)


def test_engines_on_gpus_take_devices_side_by_side(tmp_path: Path) -> None:
    arguments = ["--tp-size", "2", "--dtype=float16"]
    made = launcher(tmp_path, on_cpu=False, engines=4, engine_args=arguments)
    argv = made.prepare(3).nodes[0]
    assert argv[1:3] == ["-m", "sglang.launch_server"]
    assert option(argv, ("--base-gpu-id",)) == "6"
    layout = made.layout(POLICY)
    assert (layout.dtype, layout.ranks) == ("float16", 2)
    assert layout.hash is gpu_hash
    assert not made.seeded(POLICY)


def test_the_users_arguments_win_and_in_place_updates_need_no_prefix_cache(tmp_path: Path) -> None:
    made = launcher(tmp_path, engine_args=["--max-total-tokens=99"], pause_mode="in_place")
    argv = made.prepare(0).nodes[0]
    assert option(argv, ("--max-total-tokens",)) == "99"
    assert "--disable-radix-cache" in argv
    assert "--disable-radix-cache" not in launcher(tmp_path).prepare(0).nodes[0]


GROUPS = [
    EngineGroup(name="p", role="prefill", engines=2),
    EngineGroup(name="d", role="decode", engines=4, engine_args=["--tp-size=2"]),
    EngineGroup(name="big", nodes_per_engine=2, engine_args=["--tp=4", "--trust-remote-code"]),
    EngineGroup(name="reference", role="frozen", model="/models/base"),
]


@pytest.mark.row("C11")
def test_engines_of_groups(tmp_path: Path) -> None:
    made = launcher(tmp_path, on_cpu=False, engine_args=["--dtype=float16"], groups=GROUPS)
    prefill, decode = made.prepare(0), made.prepare(2)
    (argv,) = prefill.nodes
    assert "--disaggregation-mode=prefill" in argv
    assert option(argv, ("--disaggregation-bootstrap-port",)) == str(prefill.bootstrap_port)
    assert prefill.bootstrap_port not in (made.prepare(0).bootstrap_port, None)
    assert "--disaggregation-mode=decode" in decode.nodes[0]
    assert decode.bootstrap_port is None
    # Devices side by side: 2 of prefill, 4 x 2 of decode.
    assert option(made.prepare(3).nodes[0], ("--base-gpu-id",)) == "4"
    first, second = made.prepare(6).nodes
    address = option(first, ("--dist-init-addr",))
    assert address == option(second, ("--dist-init-addr",))
    assert [option(n, ("--node-rank",)) for n in (first, second)] == ["0", "1"]
    assert [option(n, ("--base-gpu-id",)) for n in (first, second)] == ["10", "12"]
    assert option(first, ("--port",)) != option(second, ("--port",))
    frozen = made.prepare(7).nodes[0]
    assert option(frozen, ("--model-path",)) == "/models/base"
    assert option(frozen, ("--base-gpu-id",)) == "14"


def test_colocated_engines_can_give_their_memory_up(tmp_path: Path) -> None:
    made = launcher(tmp_path, placement="colocated", groups=[POLICY, GROUPS[3]])
    assert "--enable-memory-saver" in made.prepare(0).nodes[0]
    assert "--enable-weights-cpu-backup" not in made.prepare(0).nodes[0]
    # Nobody would give it its weights again.
    assert "--enable-weights-cpu-backup" in made.prepare(1).nodes[0]


def test_another_interpreter_runs_the_launcher_by_path(tmp_path: Path) -> None:
    argv = launcher(tmp_path, engine_python="/usr/bin/python3").prepare(0).nodes[0]
    assert argv[:2] == ["/usr/bin/python3", sglang_cpu.__file__]
    rollout = RolloutSection(engine_python="no-such-python")
    assert interpreter_problem(rollout, {"PATH": "/usr/bin"}) == (
        "rollout.engine_python = 'no-such-python' is not a program"
    )
    assert interpreter_problem(RolloutSection(), {}) is None


def test_scratch_is_short_enough_for_a_socket_and_empty(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100)
    launch = SGLangLauncher(RolloutSection(), tmp_path, RunFolder(deep), on_cpu=True).prepare(0)
    assert len(str(launch.scratch)) < 80
    launch.scratch.rmdir()
    again = launcher(tmp_path / "r")
    (again.prepare(0).scratch / "old").touch()
    assert not list(again.prepare(0).scratch.iterdir())


def test_model_folders_that_cannot_be_served_are_named(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "m", seed=0)
    assert check_model_folder(model) is None
    for file, message in (
        ("model.safetensors", "holds no weights"),
        ("tokenizer.json", "holds no tokenizer"),
        ("config.json", "config.json is missing"),
    ):
        (model / file).unlink()
        assert message in (check_model_folder(model) or "")


@pytest.mark.parametrize(
    "argv", [["--model-path", "{}"], ["--model-path={}"], ["--model={}"], ["--x", "y"]]
)
def test_only_the_needed_model_family_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS", raising=False)
    config = {"architectures": ["AlphaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    models = tmp_path / "lib" / sglang_cpu.MODEL_MODULES
    models.mkdir(parents=True)
    (models / "alpha.py").write_text("class AlphaForCausalLM(Base):\n")
    (models / "beta.py").write_text("class BetaForCausalLM(Base):\n")
    (models / "gamma.py").write_text("class AlphaForCausalLMLong(Base):\n")
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    sglang_cpu._load_only_needed_model([word.format(tmp_path) for word in argv])
    disabled = os.environ.get("SGLANG_DISABLED_MODEL_ARCHS")
    monkeypatch.delenv("SGLANG_DISABLED_MODEL_ARCHS", raising=False)
    assert disabled == (None if argv[0] == "--x" else "beta,gamma")


def test_devices_of_a_slot_are_those_that_its_engine_computes_on(tmp_path: Path) -> None:
    assert launcher(tmp_path).devices(1) == []
    made = launcher(tmp_path, on_cpu=False, engine_args=["--tp-size=2"])
    assert [made.devices(slot) for slot in (0, 1)] == [[0, 1], [2, 3]]
    placed = launcher(tmp_path, on_cpu=False, engine_args=["--base-gpu-id=4"])
    assert placed.devices(0) == [4]
