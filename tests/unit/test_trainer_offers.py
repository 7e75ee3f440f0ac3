"""A rank's shards in its source's memory: written, offered, and no harm to the rank when the source
dies, hangs or is full."""

import errno
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "fakes"))

from fake_source import start_fake  # noqa: E402

from torchtitan_rl_ft.config.weights import WeightsSection  # noqa: E402
from torchtitan_rl_ft.host import process  # noqa: E402
from torchtitan_rl_ft.rpc.client import RoleRefused, RoleUnreachable  # noqa: E402
from torchtitan_rl_ft.run_folder import RunFolder  # noqa: E402
from torchtitan_rl_ft.trainer import offers as offers_module  # noqa: E402
from torchtitan_rl_ft.trainer import source as source_module  # noqa: E402
from torchtitan_rl_ft.trainer.group_link import GroupLink  # noqa: E402
from torchtitan_rl_ft.trainer.offers import Offered, Offers  # noqa: E402
from torchtitan_rl_ft.trainer.publishing import (  # noqa: E402
    Announcer,
    HolderPublisher,
    PublishSettings,
)
from torchtitan_rl_ft.trainer.source import Source, remove_memory  # noqa: E402
from torchtitan_rl_ft.weights.holder import launch  # noqa: E402
from torchtitan_rl_ft.weights.holder.settings import Key  # noqa: E402
from torchtitan_rl_ft.weights.publisher import NonFiniteWeights  # noqa: E402
from torchtitan_rl_ft.weights.tensor_files import TensorFile  # noqa: E402

V1, V2, V3 = (Key(n, f"{n}" * 32) for n in (1, 2, 3))


def tensors(scale=1.0):
    g = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": scale * torch.randn(4, 3 + i, generator=g) for i in range(5)}


class Rank:
    """One rank with a source."""

    def __init__(self, path):
        self.run = RunFolder(path / "run")
        self.run.path.mkdir()
        self.weights = WeightsSection(memory_folder=str(path / "memory"))
        self.source = Source(self.run, self.weights, 0, 0, "secret", start_fake)
        self.offers = Offers(self.source, GroupLink(), path, 1 << 20)

    def told(self):
        path = self.run.path / f"offers-{self.source.name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def say(self, what):
        path = self.run.path / f"{what}-{self.source.name}"
        path.touch()
        return path

    def offer(self, key, scale=1.0, patient=True):
        """What became of it, and why it is not offered."""
        offered = self.offers.offer(tensors(scale), key, patient=patient)
        return offered, self.offers.settle() if patient else None

    @property
    def child(self):
        return self.source._child.id


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    yield made
    made.offers.close()


def assert_holds(told, key, scale):
    """The file that was offered is a model that any reader loads."""
    assert (told["step"], told["token"]) == key
    file = TensorFile(Path(told["file"]))
    for name, tensor in tensors(scale).items():
        with file.raw(name) as raw:
            assert bytes(raw) == tensor.numpy().tobytes()
    file.close()
    assert told["ranges"] == [[0, Path(told["file"]).stat().st_size]]


def test_versions_are_written_into_memory_and_offered_and_files_are_used_again(rank):
    inodes = []
    for n, key in enumerate((V1, V2, V3), start=1):
        assert rank.offer(key, scale=n) == (Offered(), None)
        told = rank.told()[-1]
        assert_holds(told, key, scale=n)
        inodes.append(os.stat(told["file"]).st_ino)
    assert inodes[2] == inodes[0] != inodes[1]
    assert rank.source.starts == 1


def test_what_is_offered_already_is_not_written_again(rank):
    rank.offer(V1)
    rank.offer(V1)
    assert len(rank.told()) == 1
    rank.offer(V2)
    rank.offer(V1)  # after a rewind: it may be gone by now
    assert [t["step"] for t in rank.told()] == [1, 2, 1]


def test_a_source_that_died_is_started_for_the_next_version_and_again_for_the_same(rank):
    rank.offer(V1)
    dead = rank.child
    process.kill(dead)
    while dead.alive():
        time.sleep(0.01)
    assert rank.offer(V1) == (Offered(), None)
    assert rank.source.starts == 2 and rank.child != dead
    assert [t["pid"] for t in rank.told()] == [dead.pid, rank.child.pid]


def test_a_source_that_dies_while_it_is_offered_a_version_costs_that_version_alone(rank):
    rank.offer(V1)
    slow = rank.say("slow")
    assert rank.offers.offer(tensors(), V2, patient=True) == Offered()
    process.kill(rank.child)
    assert "killed by SIGKILL" in rank.offers.settle()
    slow.unlink()
    assert rank.offer(V2) == (Offered(), None)
    assert [t["step"] for t in rank.told()] == [1, 2]


def test_a_source_that_hangs_holds_the_rank_up_within_a_limit_and_is_replaced(rank, monkeypatch):
    rank.offer(V1)
    hung = rank.child
    process.kill(hung, signal.SIGSTOP)
    began_s = time.monotonic()
    with monkeypatch.context() as patched:
        patched.setattr(source_module, "RESERVE_DEADLINE_S", 0.5)
        offered, _ = rank.offer(V2)
    assert "did not answer" in offered.problem and time.monotonic() - began_s < 10
    assert not hung.alive()
    assert rank.offer(V2) == (Offered(), None)


def test_a_source_that_hangs_while_it_hashes_is_replaced_too(rank, monkeypatch):
    rank.offer(V1)
    hung = rank.child
    slow = rank.say("slow")
    with monkeypatch.context() as patched:
        patched.setattr(offers_module, "OFFER_DEADLINE_S", 0.5)
        assert "did not answer" in rank.offer(V2)[1]
    assert not hung.alive()
    slow.unlink()
    assert rank.offer(V2) == (Offered(), None)


def test_without_memory_the_version_is_left_out_and_the_reason_is_told(rank, monkeypatch):
    full = rank.say("full")
    offered, _ = rank.offer(V1)
    assert "no memory for another version" in offered.problem
    full.unlink()

    def full_file_system(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", full_file_system)
        assert "No space left" in rank.offer(V1)[0].problem
    assert rank.told() == []
    assert rank.offer(V1) == (Offered(), None)


def test_a_source_that_does_not_come_up_is_not_started_for_every_version(tmp_path):
    now_s, argv = [time.monotonic()], [sys.executable, "-c", "raise SystemExit(2)"]

    def start(settings, *, token, log, env):
        return process.spawn(argv, log=log, env=env)

    run = RunFolder(tmp_path)
    weights = WeightsSection(memory_folder=str(tmp_path / "memory"))
    source = Source(run, weights, 0, 0, "secret", start, lambda: now_s[0])
    starts = []
    for _ in range(4):
        with pytest.raises(RoleUnreachable, match="exit code 2"):
            source.reserve(V1, b"")
        starts.append(source.starts)
    assert starts == [1, 1, 1, 1]
    now_s[0] += source_module.LONGEST_START_PAUSE_S + 1
    with pytest.raises(RoleUnreachable, match="exit code 2"):
        source.reserve(V1, b"")
    assert source.starts == 2
    source.close()


def test_a_group_without_the_duty_does_not_wait_for_its_source(rank):
    rank.offer(V1)
    slow = rank.say("slow")
    assert rank.offers.offer(tensors(), V2, patient=False) == Offered()
    assert rank.offers.offer(tensors(), V3, patient=False) == Offered()  # left out: V2 is under way
    slow.unlink()
    assert rank.offers.settle() is None
    assert [t["step"] for t in rank.told()] == [1, 2]


def test_a_closed_source_is_gone_and_its_memory_with_it(rank):
    rank.offer(V1)
    child, folder = rank.child, rank.source.settings.folder
    assert folder.exists()
    rank.offers.close()
    assert not child.alive() and not folder.parent.exists()
    folder.mkdir(parents=True)  # as one that was killed leaves it
    remove_memory(rank.run, rank.weights)
    assert not folder.parent.exists()


def test_what_ucx_does_is_not_for_the_ranks_environment_to_say():
    given = {"UCX_TLS": "tcp", "LD_PRELOAD": "x", "PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0"}
    assert launch.environment(given) == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": ""}


# The publisher over it ------------------------------------------------------------------------


class Serving:
    """Answers from a list, the last one for ever."""

    def __init__(self, *answers):
        self.answers, self.asked = list(answers), []

    def post(self, path, body, deadline_s):
        self.asked.append((path, body))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class Weights:
    def __init__(self):
        self.found = tensors()

    def tensors(self):
        return self.found


def publisher(rank, *answers):
    serving, weights = Serving(*(answers or ({"version": 7},))), Weights()
    made = HolderPublisher(
        weights, Announcer(serving, GroupLink()), GroupLink(), rank.offers, wait_relays="first"
    )
    return made, serving, weights


def test_the_duty_announces_the_layout_when_the_version_is_offered(rank):
    made, serving, weights = publisher(rank)
    assert made.publish(*V1) == 7
    [(path, body)] = serving.asked
    image = rank.offers.image(weights.found)
    assert path == "/v1/publish" and (body["step"], body["token"]) == V1
    assert body["layout_digest"] == image.layout_digest and body["nbytes"] == image.nbytes
    assert body["wait_relays"] == "first" and "path" not in body
    made.offer(*V2)
    assert len(serving.asked) == 1


@pytest.mark.parametrize("sync, relays", [(True, "all"), (False, "first")])
def test_who_needs_the_next_batch_from_the_new_policy_waits_for_all_relays(tmp_path, sync, relays):
    settings = PublishSettings("nixl", tmp_path, 1 << 20, 0, sync)
    assert settings.wait_relays == relays


@pytest.mark.row("I7")
def test_a_nan_is_neither_offered_nor_announced(rank):
    made, serving, weights = publisher(rank)
    weights.found["layer.2.weight"][1, 1] = math.nan
    with pytest.raises(NonFiniteWeights, match=r"layer\.2\.weight"):
        made.publish(*V1)
    made.offer(*V1)  # without the duty it is no more than left out
    assert serving.asked == [] and rank.told() == []


def test_what_cannot_be_offered_is_not_announced_but_tried_again(rank):
    made, serving, _ = publisher(rank)
    full = rank.say("full")
    with pytest.raises(RoleUnreachable, match="no memory"):
        made.publish(*V1)
    assert serving.asked == []
    full.unlink()
    assert made.publish(*V1) == 7


def test_a_serving_that_is_late_is_asked_again_without_another_copy(rank):
    made, serving, _ = publisher(rank, RoleRefused(503, "no relay has it yet"), {"version": 8})
    with pytest.raises(RoleUnreachable, match="no relay"):
        made.publish(*V1)
    assert made.publish(*V1) == 8
    assert len(serving.asked) == 2 and len(rank.told()) == 1
    made, *_ = publisher(rank, RoleRefused(409, "not the owner"))
    with pytest.raises(RoleRefused, match="not the owner"):
        made.publish(*V2)
