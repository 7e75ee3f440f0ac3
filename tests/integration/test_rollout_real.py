"""The rollout role over real SGLang engines, without trainers: samples, SIGKILL, restart."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
import pytest
from conftest import TOKEN, ServingRole
from safetensors.numpy import load_file

from torchtitan_rl_ft.config.resolve import resolve
from torchtitan_rl_ft.exit_codes import ExitCode
from torchtitan_rl_ft.journal.records import GENESIS, SealedBatch
from torchtitan_rl_ft.models.tiny import ALPHABET, EOS
from torchtitan_rl_ft.rpc.client import RoleClient
from torchtitan_rl_ft.run_folder import TOKEN_ENV

pytestmark = pytest.mark.timeout(180)

GROUPS, SAMPLES = 6, 4


class RolloutRole:
    """The role as a process in the run folder of a living serving role."""

    def __init__(self, serving: ServingRole) -> None:
        self.serving, self.folder = serving, serving.folder
        self.client = RoleClient("rollout", self._url, TOKEN)
        self.process: subprocess.Popen[bytes] | None = None
        self.log = self.folder.path / "rollout.log"
        shutil.rmtree(self.folder.journal, ignore_errors=True)
        self._began = self.folder.events.stat().st_size

    def configure(self, **values: object) -> None:
        flags = [f"--{key}={value}" for key, value in values.items()]
        folder = ["--job.dump_folder", str(self.folder.path)]
        resolve(["--job.config_file", "rl_ft_debug.toml", *folder, *flags]).write()

    def start(self) -> None:
        command = [sys.executable, "-m", "torchtitan_rl_ft", "run", "--role", "rollout"]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [*command, "--run-folder", str(self.folder.path)],
                env={**os.environ, TOKEN_ENV: TOKEN, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def until(self, predicate: Callable[[], bool], timeout_s: float = 60) -> None:
        end = time.monotonic() + timeout_s
        while not predicate():
            assert self.process is not None and self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.005)

    def accepts(self) -> list[int]:
        """Groups whose acceptance was told, in order."""
        lines = self.folder.events.read_bytes()[self._began :].split(b"\n")[:-1]
        events = [json.loads(line) for line in lines]
        return [e["data"]["group"] for e in events if e["kind"] == "accept"]

    def sealed(self) -> bool:
        return self.client.get("/v1/status", deadline_s=10)["sealed_ahead"] > 0

    def batch(self) -> SealedBatch:
        head = self.client.get("/v1/ledger/status", deadline_s=10)["head"]
        data = self.client.get_bytes(f"/v1/batches/{head['batch_id']}", deadline_s=10)
        return SealedBatch.from_bytes(data, head["digest"])

    def _url(self) -> str | None:
        role = self.folder.role("rollout")
        current = role is not None and self.process is not None and role.pid == self.process.pid
        return role.url if role is not None and current else None


def prompt_keys(journal: Path) -> list[tuple[str, str]]:
    """(key, state) of every group that was ever issued."""
    with sqlite3.connect(f"file:{journal / 'journal.sqlite'}?mode=ro", uri=True) as db:
        return db.execute("SELECT key, state FROM groups ORDER BY id").fetchall()


@pytest.fixture
def role(real_serving: ServingRole):
    real_serving.publish(0, token=GENESIS)
    role = RolloutRole(real_serving)
    yield role
    if role.process is not None and role.process.poll() is None:
        role.process.send_signal(signal.SIGTERM)
        role.process.wait(20)
    role.client.close()


@pytest.mark.row("E2")
@pytest.mark.scenario("L-1")
def test_killed_in_the_middle_of_a_batch_it_goes_on_where_it_was(role: RolloutRole) -> None:
    role.configure(
        **{
            "rl.groups_per_step": GROUPS,
            "rl.samples_per_prompt": SAMPLES,
            "rollout.max_concurrent_groups": 1,
        }
    )
    for killed_after in (1, 3):
        role.start()
        role.until(lambda n=killed_after: len(role.accepts()) >= n)
        role.kill()
        rows = prompt_keys(role.folder.journal)
        assert [key for key, _ in rows] == list(dict.fromkeys(key for key, _ in rows))
        assert len(rows) == GROUPS
        assert sum(state == "accepted" for _, state in rows) >= killed_after
    role.start()
    role.until(role.sealed)
    batch = role.batch()

    assert all(n == 1 for n in Counter(role.accepts()).values())  # nothing generated twice
    assert {state for _, state in prompt_keys(role.folder.journal)} == {"sealed"}
    a, version = batch.arrays, role.serving.status()["version"]
    assert sorted(a["group_ids"].tolist()) == sorted(list(range(1, GROUPS + 1)) * SAMPLES)
    trained = a["loss_mask"].astype(bool)
    assert (a["versions"][trained] == version).all() and (a["versions"][~trained] == -1).all()
    assert (a["logprobs"][trained] < 0).all() and (a["logprobs"][trained] > -20).all()
    assert a["weights"].sum() == pytest.approx(1.0, rel=1e-5)
    assert np.isfinite(a["advantages"]).all()
    assert batch.meta["policy_age/mean"] == 0 and batch.meta["policy_version"] == version

    role.client.post("/v1/stop", {"reason": "the test is over"}, deadline_s=10)
    assert role.process is not None
    assert role.process.wait(30) == ExitCode.DONE


# Unfinished samples -----------------------------------------------------------------------------

LONG_TOKENS, INTERVAL = 400, 64


def endless(model: Path) -> dict[str, np.ndarray]:
    """Weights that practically never draw the end token: its logit is 0, that of the likeliest
    other some 20."""
    head = load_file(model / "model.safetensors")["lm_head.weight"] * np.float32(20)
    head[ALPHABET.index(EOS)] = 0
    return {"lm_head.weight": head}


def kept_samples(journal: Path) -> dict[tuple[int, int], tuple[list[int], list[int]]]:
    """(group, sample) -> tokens and versions that the journal has of it."""
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    with sqlite3.connect(f"file:{journal / 'journal.sqlite'}?mode=ro", uri=True) as db:
        for group, sample, start, ids, versions in db.execute(
            "SELECT group_id, sample, start, output_ids, versions FROM partials ORDER BY id"
        ):
            tokens, of = found.setdefault((group, sample), ([], []))
            del tokens[start:], of[start:]
            tokens += np.frombuffer(ids, np.int32).tolist()
            of += np.frombuffer(versions, np.int32).tolist()
    return found


def sealed_samples(journal: Path) -> dict[tuple[int, int], tuple[np.ndarray, ...]]:
    """(group, sample) -> tokens, versions and log-probs of a response."""
    found = {}
    with sqlite3.connect(f"file:{journal / 'journal.sqlite'}?mode=ro", uri=True) as db:
        for (payload,) in db.execute("SELECT payload FROM batches"):
            a = SealedBatch.from_bytes(payload).arrays
            for i, group in enumerate(a["group_ids"].tolist()):
                begin, end = a["sample_offsets"][i : i + 2]
                part = slice(begin + a["prompt_lens"][i], end)
                lists = (a["tokens"][part], a["versions"][part], a["logprobs"][part])
                found[group, i % SAMPLES] = lists
    return found


def drawn_by(serving: ServingRole) -> int:
    """Tokens that running requests have in the engines, by SGLang's own count; prompts are 4."""
    loads = [httpx.get(e["url"] + "/v1/loads").json()["loads"][0] for e in serving.engines()]
    return sum(load["num_used_tokens"] - 4 * load["num_running_reqs"] for load in loads)


@pytest.mark.row("E2")
@pytest.mark.row("M2")
@pytest.mark.scenario("L-1")
def test_killed_in_the_middle_of_long_answers_it_goes_on_from_their_tokens(
    role: RolloutRole,
) -> None:
    """What the journal has is not drawn again: tokens, log-probs and versions of the final samples
    begin with it, and what was drawn before the death and is drawn again is about the interval
    per sample."""
    serving, groups = role.serving, 4
    serving.publish(50, change=endless(serving.model))
    role.configure(
        **{
            "rl.mode": "async",
            "rl.max_policy_age": 3,  # nobody trains: a policy counts as one behind the tip
            "rl.groups_per_step": groups // 2,
            "training.steps": 2,
            "rl.samples_per_prompt": SAMPLES,
            "rollout.max_response_tokens": LONG_TOKENS,
            "training.seq_len": 512,
            "recovery.partial_interval_tokens": INTERVAL,
        }
    )
    role.start()
    seen = [0]  # of 6,400; one engine may be behind the other
    role.until(lambda: seen.append(drawn_by(serving)) or seen[-1] > 1600)
    role.kill()
    kept = kept_samples(role.folder.journal)
    kept_tokens = sum(len(tokens) for tokens, _ in kept.values())
    # An interval for each sample, and one for what is under way on a machine that is busy.
    assert seen[-1] - kept_tokens < 2 * INTERVAL * groups * SAMPLES and kept_tokens > 400
    unfinished = [key for key, state in prompt_keys(role.folder.journal) if state == "pending"]
    missing = len(unfinished) * SAMPLES * LONG_TOKENS - kept_tokens
    serving.until(lambda: serving.status()["in_flight"] == 0, 10)

    before = serving.status()["drawn_tokens"]
    new = serving.publish(51, change=endless(serving.model), scale=1.1)["version"]
    role.start()
    role.until(lambda: len(sealed_samples(role.folder.journal)) == groups * SAMPLES)
    assert serving.status()["drawn_tokens"] - before == missing
    resumed = [e for e in serving.events("partial") if e["phase"] == "resume"]
    assert sum(e["data"]["tokens"] for e in resumed) == kept_tokens
    samples = sealed_samples(role.folder.journal)
    for name, (tokens, versions) in kept.items():
        final_tokens, final_versions, logprobs = samples[name]
        assert len(final_tokens) == LONG_TOKENS
        assert final_tokens[: len(tokens)].tolist() == tokens
        assert set(versions) == {new - 1}
        rest = [new] * (LONG_TOKENS - len(tokens))
        assert final_versions.tolist() == versions + rest
        assert np.isfinite(logprobs).all() and (logprobs <= 0).all()
    assert not kept_samples(role.folder.journal)
    role.client.post("/v1/stop", {"reason": "the test is over"}, deadline_s=10)
    assert role.process is not None
    assert role.process.wait(30) == ExitCode.DONE
