"""An SGLang look-alike with a real worker process and faults on demand.

Takes SGLang's command line. The "model" is a function of (prompt, weights, seed, position), so
an answer shows which weights gave it. Tokens are computed in the worker: stop or kill it and the
server goes on answering /health and nothing else, as the real one does.

Faults are set by `POST /fault {name: value}` or, from the start, by FAKE_SGLANG_FAULTS (JSON):

    slow_probe=S      a probe takes S seconds more
    probe_status=N    a probe is answered N at once
    probe_hang        a probe is never answered
    probe_id=ID       a probe gets the answer of another request
    prefill_s=S       the worker computes for S seconds before the first token of each answer
    token_s=S         seconds per generated token
    child_dead        the worker is killed, now
    freeze            the worker is stopped, now
    die_at="sync"     the server kills itself half-way through an update
    freeze_at="sync"  the worker is stopped when an update begins: no answer to it
    sync_s=S          an update takes S seconds more
    sync_status=N     an update answers N at once
    lie_sync          an update answers success and loads nothing
    half_sync         an update loads half the tensors and answers an error
    stale_sync        an update loads half the tensors and answers success
    skip_tensor=NAME  an update leaves that parameter as it is and answers success
    no_flush          the prefix cache outlives an update: answers come from the old weights
    flush_status=N    /flush_cache answers N at once
    no_version        answers have no version
    reject=[ids]      400 on that prompt
    poison=[ids]      the server kills itself on that prompt
    drop_task=N       every N-th request fails with 500
    break_streams     running answers break off
    die_at_start      exit code 3 before anything is served
    orphan            the worker survives the server, in a session of its own
    ignore_abort      requests that are to be aborted go on
    stuck_transfer=N  N requests are in transfer between prefill and decode, for ever
    wipe_on_resume    random weights whenever memory is resumed

`--disaggregation-mode`, `--nnodes` and `--node-rank` make it a half or a node (see
fake_disaggregation.py), `--enable-memory-saver` one that gives its memory up (fake_memory.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from aiohttp import web
from fake_disaggregation import gather_nodes, join_node_0
from fake_generation import Generation
from fake_memory import Memory, MemoryMisused, wipe
from fake_state import load_parameters
from fake_worker import Worker

FAULTS_ENV = "FAKE_SGLANG_FAULTS"


class FakeEngine(Generation):
    # Health ---------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def health_generate(self, request: web.Request) -> web.Response:
        if status := self.faults.get("probe_status"):
            return web.Response(status=status)
        await asyncio.sleep(1.0 + self.faults.get("slow_probe", 0))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                await self.go.wait()
                await self.worker.word("probe")
                return web.Response()
        return web.Response(status=503)

    async def loads(self, request: web.Request) -> web.Response:
        """What the worker published last."""
        rank = {
            "timestamp": self.worker.published_s,
            "total_prefill_uncached_tokens": self.prefilled,
            "num_running_reqs": self.running if self.go.is_set() else 0,
            "num_waiting_reqs": 0 if self.go.is_set() else self.running,
            "queues": {"waiting": 0, "grammar": 0, "paused": 0, "retracted": 0},
        }
        if self.half is not None:
            rank["num_running_reqs"] -= min(self.running, self.half.in_transfer)
            rank["disaggregation"] = self.half.figures(self._stuck)
        return web.json_response({"loads": [rank]})

    @property
    def _stuck(self) -> int:
        return self.faults.get("stuck_transfer", 0)

    async def model_info(self, request: web.Request) -> web.Response:
        info = {
            "model_path": str(self.model_path),
            "served_model_name": str(self.model_path),
            "tokenizer_path": str(self.model_path),
            "is_generation": True,
            "weight_version": self.version,
            "load_format": "auto",
            "model_type": "qwen3",
            "architectures": ["Qwen3ForCausalLM"],
        }
        if self.faults.get("no_version"):
            del info["weight_version"]
        return web.json_response(info)

    # Weights --------------------------------------------------------------------------------

    async def pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            return web.json_response(
                {"object": "error", "message": "Input should be a mode", "code": 400}, status=400
            )
        self.paused = mode
        self.go.clear()
        if mode == "abort":
            await self.idle.wait()
        return status_ok("Generation paused successfully.")

    async def resume(self, request: web.Request) -> web.Response:
        self.paused = ""
        self.go.set()
        return status_ok("Generation continued successfully.")

    async def update(self, request: web.Request) -> web.Response:
        body = await request.json()
        if status := self.faults.get("sync_status"):
            return web.Response(status=status, text="Internal Server Error")
        if self.faults.get("freeze_at") == "sync":
            self.worker.send(signal.SIGSTOP)
            await self.worker.word("update")
        if not self.paused:
            await self.idle.wait()
        await asyncio.sleep(self.faults.get("sync_s", 0))
        path = Path(body["model_path"])
        if not (path / "config.json").is_file():
            return updated(False, f"Failed to get weights iterator: {path}")
        if self.faults.get("lie_sync"):
            self.version = body.get("weight_version") or self.version
            return updated(True, "Succeeded to update model weights.")
        if self.memory is not None:
            self.memory.need("weights")
        new = load_parameters(path)
        half = self.faults.get("half_sync") or self.faults.get("stale_sync")
        for i, name in enumerate(sorted(new)):
            if new[name].shape != self.parameters[name].shape:
                return updated(False, f"Failed to update weights: {name} has another shape")
            if half and i >= len(new) // 2:
                break
            if self.faults.get("die_at") == "sync" and i >= len(new) // 2:
                os.kill(os.getpid(), signal.SIGKILL)
            if name != self.faults.get("skip_tensor"):
                self.parameters[name] = new[name]
        if self.faults.get("half_sync"):
            return updated(False, "Failed to update weights: half of them.")
        self.version = body.get("weight_version") or self.version
        if body.get("flush_cache", True) and self.running and self.paused == "in_place":
            return updated(False, "Weights were updated, but the cache was not flushed")
        if not self.faults.get("no_flush"):
            self.cached = self.weights_hash()
        self.model_path = path
        return updated(True, "Succeeded to update model weights.")

    async def check_weights(self, request: web.Request) -> web.Response:
        action = (await request.json()).get("action")
        if action != "checksum":
            message = f"Unsupported action={action!r}"
            return web.json_response({"success": False, "message": message}, status=400)
        if self.memory is not None:
            self.memory.need("weights")
        await self.worker.word("checksum")  # which the scheduler computes
        sums = {
            n: hashlib.sha256(np.ascontiguousarray(a).tobytes()).hexdigest()[:16]
            for n, a in self.parameters.items()
        }
        digest = hashlib.sha256(json.dumps(sums, sort_keys=True).encode()).hexdigest()
        rank = {"checksums": sums, "per_gpu_checksum": digest, "parallelism_info": [{"rank": 0}]}
        return web.json_response(
            {
                "success": True,
                "message": "Success.",
                "ranks": [rank],
                "per_engine_checksum": digest,
            }
        )

    async def flush(self, request: web.Request) -> web.Response:
        if status := self.faults.get("flush_status"):
            return web.Response(status=status, text="Flush cache failed.\n")
        if (self.running and self.paused != "retract") or self._stuck:
            return web.Response(status=400, text="Flush cache failed.\n")
        self.cached = self.weights_hash()
        return web.Response(text="Cache flushed.\n")

    # Profiles -------------------------------------------------------------------------------

    profile: dict[str, Any] | None = None

    async def start_profile(self, request: web.Request) -> web.Response:
        if self.profile is not None:  # SGLang loses it
            return web.Response(status=500, text="Internal Server Error")
        self.profile = await request.json()
        return web.Response(text="Start profiling.\n")

    async def stop_profile(self, request: web.Request) -> web.Response:
        if self.profile is None:
            return web.Response(status=500, text="Internal Server Error")
        folder, name = Path(self.profile["output_dir"]), self.profile["profile_id"]
        self.profile = None
        (folder / f"{name}-TP-0.trace.json.gz").write_bytes(gzip.compress(b"{}"))
        return web.Response(text="Stop profiling. This will take some time.\n")

    # Memory ---------------------------------------------------------------------------------

    async def release(self, request: web.Request) -> web.Response:
        tags = (await request.json()).get("tags")
        memory = self._saver()
        memory.release(tags, idle=not self.running and not self._stuck)
        return web.json_response(None)

    async def resume_memory(self, request: web.Request) -> web.Response:
        tags = (await request.json()).get("tags")
        self._saver().resume(tags, lambda: wipe(self.parameters))
        if self.faults.get("wipe_on_resume"):
            wipe(self.parameters)
        return web.json_response(None)

    def _saver(self) -> Memory:
        if self.memory is None:
            raise MemoryMisused("started without --enable-memory-saver")
        return self.memory

    # Faults ---------------------------------------------------------------------------------

    async def set_fault(self, request: web.Request) -> web.Response:
        given = await request.json()
        self.faults.update(given)
        if given.get("child_dead"):
            self.worker.send(signal.SIGKILL)
        if "freeze" in given:
            self.worker.send(signal.SIGSTOP if given["freeze"] else signal.SIGCONT)
        shown = {"boot": self.boot, "requests": self.requests, "running": self.running}
        return web.json_response(shown)

    async def log(self, request: web.Request) -> web.Response:
        """Every call so far: (monotonic seconds, path)."""
        return web.json_response(self.calls)

    def app(self) -> web.Application:
        @web.middleware
        async def note(request: web.Request, handler: Any) -> web.StreamResponse:
            self.calls.append((time.monotonic(), request.path))
            try:
                return await handler(request)
            except web.HTTPNotFound:
                return web.json_response({"detail": "Not Found"}, status=404)
            except MemoryMisused as e:
                print(f"fake engine: {e}", flush=True)
                self.worker.send(signal.SIGKILL)
                return await asyncio.Event().wait()

        app = web.Application(middlewares=[note], client_max_size=1 << 28)
        app.router.add_get("/health", self.health)
        app.router.add_get("/health_generate", self.health_generate)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_get("/v1/loads", self.loads)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/abort_request", self.abort_request)
        app.router.add_post("/pause_generation", self.pause)
        app.router.add_post("/continue_generation", self.resume)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_post("/weights_checker", self.check_weights)
        app.router.add_post("/flush_cache", self.flush)
        app.router.add_post("/release_memory_occupation", self.release)
        app.router.add_post("/resume_memory_occupation", self.resume_memory)
        app.router.add_post("/start_profile", self.start_profile)
        app.router.add_post("/stop_profile", self.stop_profile)
        app.router.add_post("/fault", self.set_fault)
        app.router.add_get("/calls", self.log)
        return app


def status_ok(message: str) -> web.Response:
    return web.json_response({"message": message, "status": "ok"})


def updated(success: bool, message: str) -> web.Response:
    body = {"success": success, "message": message, "num_paused_requests": 0}
    return web.json_response(body, status=200 if success else 400)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--stream-interval", type=int, default=1)
    parser.add_argument("--incremental-streaming-output", action="store_true")
    parser.add_argument("--disaggregation-mode", choices=("prefill", "decode"))
    parser.add_argument("--disaggregation-bootstrap-port", type=int, default=8998)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--dist-init-addr", default="")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    args, _ = parser.parse_known_args()
    faults = json.loads(os.environ.get(FAULTS_ENV, "{}"))
    if faults.get("die_at_start"):
        sys.exit(f"fake engine: cannot start from {args.model_path}")
    node_0, _, nodes_port = args.dist_init_addr.partition(":")
    if args.node_rank > 0:
        await join_node_0(node_0, int(nodes_port), Worker(bool(faults.get("orphan"))).open)
        return
    engine = FakeEngine(args, faults)
    await engine.worker.open()
    if args.nnodes > 1:
        await gather_nodes(node_0, int(nodes_port), args.nnodes - 1, engine.go.clear)
    if engine.half is not None and engine.half.mode == "prefill":
        await engine.half.serve(args.host, args.disaggregation_bootstrap_port)
    runner = web.AppRunner(engine.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, args.host, args.port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
