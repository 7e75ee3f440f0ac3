"""How fast an engine takes a policy that is in memory: as a file, or as tensors.

    python benchmarks/weight_handover.py [--repeats 5] [--verify] [--out FILE]

A real SGLang engine on the CPU, of 0.4 MB and of 200 MB, takes its weights by turns from a file in
/dev/shm (`/update_weights_from_disk`, as relays have it done) and as tensors of another process
(`/update_weights_from_tensor` between `/begin_weight_update` and `/end_weight_update`), both
between pause and continue. The tensors are mapped from the same file and shared by name: torch's
default way, by descriptor, needs the receiver's authentication key, and without it ends the
engine. Aim: the file, which is what we use, is no slower. About a minute on an idle machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import torch.multiprocessing
from report import Aim, finish
from safetensors.torch import load_file
from sglang.srt.utils import MultiprocessingSerializer

from torchtitan_rl_ft.host.ports import HOST, free_port
from torchtitan_rl_ft.models.tiny import TinySpec, make_tiny_model
from torchtitan_rl_ft.platform import sglang_cpu

LIMIT_S = 240.0
MODELS = {
    "small": TinySpec(),
    "large": TinySpec(
        hidden_size=1024, intermediate_size=3072, layers=4, heads=16, kv_heads=8, head_dim=64
    ),
}


class Engine:
    def __init__(self, http: httpx.Client, url: str, model: Path) -> None:
        self._http, self._url, self._model = http, url, model

    def post(self, path: str, **body: Any) -> None:
        self._http.post(self._url + path, json=body).raise_for_status()

    def from_file(self) -> None:
        self.post("/update_weights_from_disk", model_path=str(self._model), weight_version="1")

    def from_tensors(self) -> None:
        named = list(load_file(self._model / "model.safetensors").items())
        told = MultiprocessingSerializer.serialize(named, output_str=True)
        self.post("/begin_weight_update")
        self.post(
            "/update_weights_from_tensor",
            serialized_named_tensors=[told],
            flush_cache=False,
            weight_version="2",
        )
        self.post("/end_weight_update")

    def takes_s(self, way: str) -> float:
        begun_s = time.monotonic()
        self.post("/pause_generation", mode="in_place")
        getattr(self, way)()
        self.post("/continue_generation")
        return time.monotonic() - begun_s


@contextlib.contextmanager
def running(model: Path, log: Path) -> Iterator[Engine]:
    port = free_port()
    command = [sys.executable, "-m", "torchtitan_rl_ft.platform.sglang_cpu"]
    command += [f"--model-path={model}", f"--host={HOST}", f"--port={port}"]
    command += ["--log-level-http=warning", *sglang_cpu.ARGUMENTS]
    env = {**os.environ, **sglang_cpu.ENVIRONMENT, "HF_HUB_OFFLINE": "1"}
    with open(log, "wb") as out:
        started = subprocess.Popen(command, env=env, stdout=out, stderr=out, start_new_session=True)
    try:
        with httpx.Client(timeout=LIMIT_S, trust_env=False) as http:
            url, end_s = f"http://{HOST}:{port}", time.monotonic() + LIMIT_S
            while not is_up(http, url):
                if started.poll() is not None or time.monotonic() > end_s:
                    raise RuntimeError(f"the engine did not start: {log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield Engine(http, url, model)
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def is_up(http: httpx.Client, url: str) -> bool:
    try:
        return http.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def measure(folder: Path, repeats: int) -> dict[str, Any]:
    found = {}
    for name, spec in MODELS.items():
        model = make_tiny_model(folder / name, 0, spec)
        ways: dict[str, list[float]] = {"from_file": [], "from_tensors": []}
        with running(model, folder / f"{name}.log") as engine:
            for n in range(repeats + 1):
                for way, took_s in ways.items():
                    took = engine.takes_s(way)
                    if n:  # the first one maps and allocates
                        took_s.append(took)
        nbytes = (model / "model.safetensors").stat().st_size
        medians = {way: round(statistics.median(t) * 1e3, 1) for way, t in ways.items()}
        found[name] = {"megabytes": round(nbytes / 1e6, 1), "median_ms": medians}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.multiprocessing.set_sharing_strategy("file_system")
    with tempfile.TemporaryDirectory(prefix="handover-", dir="/dev/shm") as folder:
        figures = measure(Path(folder), args.repeats)
    aims = {}
    for name, found in figures.items():
        ms = found["median_ms"]
        aims[f"{name}: file / tensors"] = Aim(ms["from_file"] / ms["from_tensors"], 1.0)
    if args.out is not None:
        shown = {n: {"value": a.value, "aim": a.aim, "met": a.met} for n, a in aims.items()}
        args.out.write_text(json.dumps({"figures": figures, "aims": shown}, indent=1) + "\n")
    return finish("weight_handover", figures, aims, verify=args.verify)


if __name__ == "__main__":
    sys.exit(main())
