"""Groups on real SGLang: a frozen engine beside one of the policy; the arguments of the others."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import aiohttp
import pytest
from conftest import serving_role

from torchtitan_rl_ft.config.sections import EngineGroup, RolloutSection
from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.rollout.generation import GenerationFailed, checked_samples
from torchtitan_rl_ft.run_folder import RunFolder
from torchtitan_rl_ft.serving.engine_client import EngineClient
from torchtitan_rl_ft.serving.groups import slot_plans
from torchtitan_rl_ft.serving.launch import SGLangLauncher


async def queues(url: str) -> dict[str, int]:
    async with aiohttp.ClientSession() as http:
        return await EngineClient(http, url, "engine").queues(5.0)


@pytest.mark.row("C11")
@pytest.mark.timeout(300)
def test_a_real_frozen_engine_reloads_its_own_checkpoint(tmp_path: Path) -> None:
    reference = make_tiny_model(tmp_path / "reference", seed=7)
    groups = [
        {"name": "policy"},
        {"name": "reference", "role": "frozen", "model": str(reference)},
    ]
    with serving_role(tmp_path / "run", groups=groups) as role:
        role.until(lambda: role.states() == ["stale", "serving"], 120)
        before = role.engines()[1]
        assert "proved by checksum (exact)" in before["reason"]
        role.publish(0)
        role.publish(1, scale=1.1)
        frozen = role.generate("a", seeds=[1, 2], group="reference")
        policy = role.generate("b", seeds=[1, 2])
        assert {s["engine"] for s in frozen} == {"engine-1"}
        assert {s["max_version"] for s in policy} == {2}
        assert [s["output_ids"] for s in frozen] != [s["output_ids"] for s in policy]
        with pytest.raises(GenerationFailed, match="of a frozen group"):
            checked_samples({"samples": frozen}, 2)
        # What a drain of colocated engines reads, in the shape of a real scheduler.
        assert set(asyncio.run(queues(before["url"])).values()) == {0}
        os.kill(before["pid"], signal.SIGKILL)
        role.until(lambda: role.engines()[1]["pid"] not in (before["pid"], None), 60)
        role.until(lambda: role.states() == ["serving", "serving"], 120)
        after = role.engines()[1]
        assert after["digest"] == before["digest"]
        again = role.generate("c", seeds=[1, 2], group="reference")
        assert [s["output_ids"] for s in again] == [s["output_ids"] for s in frozen]
        # It was never given a version.
        assert [e["data"]["subject"] for e in role.events("install")] == ["engine-0"] * 2
        log = Path(after["log"]).read_text()
        assert "update_weights" not in log


MODES = ("prefill", "decode", "null")

PARSE = """
import argparse, json, sys
from torchtitan_rl_ft.platform import sglang_cpu
sglang_cpu._stub_kernel_loader()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for argv in json.load(sys.stdin):
    a = parser.parse_args(argv)
    print(a.disaggregation_mode, a.disaggregation_bootstrap_port, a.nnodes, a.node_rank,
          a.dist_init_addr, a.base_gpu_id, a.enable_memory_saver, a.enable_weights_cpu_backup)
"""


@pytest.mark.row("C11")
@pytest.mark.timeout(120)
def test_sglangs_parser_takes_the_arguments_of_all_groups(tmp_path: Path) -> None:
    rollout = RolloutSection(
        placement="colocated",
        groups=[
            EngineGroup(name="p", role="prefill"),
            EngineGroup(name="d", role="decode", engine_args=["--tp-size=2"]),
            EngineGroup(name="big", nodes_per_engine=2, engine_args=["--tp-size=4"]),
            EngineGroup(name="reference", role="frozen", model="/m"),
        ],
    )
    launcher = SGLangLauncher(rollout, tmp_path / "model", RunFolder(tmp_path), on_cpu=False)
    launches = [launcher.prepare(plan.slot) for plan in slot_plans(rollout)]
    argvs = [node[3:] for launch in launches for node in launch.nodes]
    done = subprocess.run(
        [sys.executable, "-c", PARSE],
        input=json.dumps(argvs),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = [line.split() for line in done.stdout.splitlines() if line.startswith(MODES)]
    address = seen[2][4]
    assert seen == [
        ["prefill", str(launches[0].bootstrap_port), "1", "0", "None", "0", "True", "False"],
        ["decode", "8998", "1", "0", "None", "1", "True", "False"],
        ["null", "8998", "2", "0", address, "3", "True", "False"],
        ["null", "8998", "2", "1", address, "5", "True", "False"],
        ["null", "8998", "1", "0", "None", "7", "True", "True"],
    ]
    assert address.startswith("127.0.0.1:")
