"""Healing state, its transport and the rendezvous ids, without a lighthouse."""

import copy
import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)

from torchtitan_rl_ft.replica.live_state import LiveState, StateMismatch
from torchtitan_rl_ft.replica.rendezvous import RendezvousClient, rendezvous_id
from torchtitan_rl_ft.replica.state_transport import StateTransport

TOKEN = "secret"


class Counter:
    def __init__(self):
        self.value = {"step": 0, "token": "genesis", "tail": None}

    def progress(self):
        return dict(self.value)

    def load_progress(self, progress):
        self.value = progress


def make(seed, width=4):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Linear(width, 2))
    config = OptimizersContainer.Config(
        param_groups=default_adamw(lr=0.1).param_groups, implementation="for-loop"
    )
    optimizers = config.build(model_parts=[model])
    schedulers = LRSchedulersContainer.Config(warmup_steps=3, total_steps=20).build(
        optimizers=optimizers, training_steps=20
    )
    counter = Counter()
    state = LiveState([model], optimizers, schedulers, counter)
    return SimpleNamespace(
        model=model, optimizers=optimizers, schedulers=schedulers, counter=counter, state=state
    )


def train(t, steps):
    for _ in range(steps):
        t.model(torch.ones(5, 3)).square().sum().backward()
        t.optimizers.step()
        t.schedulers.step()
        t.optimizers.zero_grad()
        t.counter.value["step"] += 1


def assert_equal(a, b):
    left, right = a.state.state_dict(), b.state.state_dict()
    torch.testing.assert_close(left["parameters"], right["parameters"], rtol=0, atol=0)
    torch.testing.assert_close(left["optimizers"], right["optimizers"], rtol=0, atol=0)
    for key in ("param_groups", "lr_scheduler", "progress"):
        assert left[key] == right[key]


@pytest.mark.row("G3")
@pytest.mark.scenario("R-1")
def test_a_joiner_equals_its_donor_also_in_learning_rate_and_in_the_steps_after():
    donor, joiner = make(1), make(2)
    train(donor, 5)
    train(joiner, 1)
    joiner.state.load_state_dict(copy.deepcopy(donor.state.state_dict()))
    assert_equal(donor, joiner)
    assert joiner.optimizers.optimizers[0].param_groups[0]["lr"] == pytest.approx(
        donor.schedulers.get_metrics()["lr/AdamW"]
    )
    train(donor, 3)
    train(joiner, 3)
    assert_equal(donor, joiner)


def test_the_offer_is_live_not_a_copy_from_the_start():
    donor = make(1)
    before = copy.deepcopy(donor.state.state_dict())
    train(donor, 2)
    after = donor.state.state_dict()
    assert after["param_groups"] != before["param_groups"]
    assert not torch.equal(after["parameters"]["0.0.weight"], before["parameters"]["0.0.weight"])


def test_a_state_that_does_not_fit_changes_nothing():
    donor, joiner = make(1, width=6), make(2)
    before = copy.deepcopy(joiner.state.state_dict())
    with pytest.raises(StateMismatch, match=r"0\.0\.weight"):
        joiner.state.load_state_dict(donor.state.state_dict())
    torch.testing.assert_close(joiner.state.state_dict()["parameters"], before["parameters"])


def test_reset_is_the_state_before_the_first_step():
    t = make(1)
    train(t, 4)
    t.state.reset_optimizer()
    tensors = t.state.state_dict()["optimizers"][0]
    assert all(float(v.abs().sum()) == 0 for v in tensors.values())
    assert t.schedulers.state_dict() == {"last_epoch": 0}


# Transport ----------------------------------------------------------------------------------


@pytest.fixture
def transports():
    made = [StateTransport("127.0.0.1", TOKEN, timedelta(seconds=5)) for _ in range(2)]
    yield made
    for t in made:
        t.shutdown()


def offer(transport, state, step=3):
    transport.send_checkpoint([1], step, state, timedelta(seconds=5))


def fetch(transport, address, step=3):
    return transport.recv_checkpoint(0, address, step, timedelta(seconds=5))


def test_state_travels_bitwise_and_the_donor_may_go_on(transports):
    donor, joiner = transports
    live = {"w": torch.arange(6.0).view(2, 3), "lr": 0.25, "nested": {"steps": [1, "a", None]}}
    offer(donor, live)
    live["w"].fill_(-1)
    got = fetch(joiner, donor.metadata())
    assert torch.equal(got["w"], torch.arange(6.0).view(2, 3))
    assert got["lr"] == 0.25 and got["nested"] == {"steps": [1, "a", None]}


@pytest.mark.parametrize("step", [2, 4])
def test_another_step_is_refused(transports, step):
    donor, joiner = transports
    offer(donor, {"w": torch.ones(1)})
    with pytest.raises(OSError, match="409"):
        fetch(joiner, donor.metadata(), step)


@pytest.mark.scenario("R-3")
def test_a_joiner_that_asks_too_early_waits_for_the_copy(transports):
    donor, joiner = transports
    later = threading.Timer(0.3, offer, (donor, {"w": torch.ones(1)}))
    later.start()
    assert torch.equal(fetch(joiner, donor.metadata())["w"], torch.ones(1))
    later.join()


def test_nothing_is_served_after_the_step():
    donor, joiner = (StateTransport("127.0.0.1", TOKEN, timedelta(seconds=1)) for _ in range(2))
    offer(donor, {"w": torch.ones(1)})
    donor.disallow_checkpoint()
    with pytest.raises(OSError, match="409"):
        fetch(joiner, donor.metadata())
    donor.shutdown()
    joiner.shutdown()


def test_who_waits_for_an_offer_is_told_when_the_donors_attempt_is_over(transports):
    donor, joiner = transports
    started_s = time.monotonic()
    timer = threading.Timer(0.3, donor.disallow_checkpoint)
    timer.start()
    with pytest.raises(OSError, match="409"):
        fetch(joiner, donor.metadata())
    assert time.monotonic() - started_s < 4.0  # the limit is 5 s
    timer.join()


def test_without_the_token_nothing_is_served(transports):
    donor, _ = transports
    offer(donor, {"w": torch.ones(1)})
    stranger = StateTransport("127.0.0.1", "guess", timedelta(seconds=5))
    try:
        with pytest.raises(OSError, match="401"):
            fetch(stranger, donor.metadata())
    finally:
        stranger.shutdown()


def test_code_in_a_state_is_not_run(transports):
    class Evil:
        def __reduce__(self):
            return (print, ("run!",))

    donor, joiner = transports
    offer(donor, {"w": Evil()})
    with pytest.raises(Exception, match="[Ww]eights.only|Unsupported"):
        fetch(joiner, donor.metadata())


# Rendezvous ---------------------------------------------------------------------------------


class Lighthouse:
    def __init__(self):
        self.result = SimpleNamespace(
            replica_ids=["a:1", "b:1"], quorum_id=1, max_step=0, heal=False
        )

    def _quorum(self, **kwargs):
        return SimpleNamespace(**vars(self.result))


def test_the_id_is_stable_while_members_and_lighthouse_are():
    lighthouse = Lighthouse()
    client = RendezvousClient(lighthouse)
    first = client._quorum().quorum_id
    lighthouse.result.max_step = 9
    assert client._quorum().quorum_id == first
    assert client.latest.lighthouse_quorum_id == 1


def test_a_restarted_lighthouse_never_repeats_an_id():
    lighthouse = Lighthouse()
    client = RendezvousClient(lighthouse)
    first = client._quorum().quorum_id
    lighthouse.result.quorum_id = 2
    second = client._quorum().quorum_id
    # Ids start over and the members changed: stock torchft would reuse the key of id 1.
    lighthouse.result.quorum_id, lighthouse.result.replica_ids = 1, ["a:1", "b:2"]
    lighthouse.result.max_step = 5
    third = client._quorum().quorum_id
    assert len({first, second, third}) == 3


def test_who_was_missed_out_under_an_id_that_repeats_reconfigures_with_the_others():
    """A restarted lighthouse: "a" commits alone under id 1, then both meet under id 2, which they
    had before."""
    lighthouse = Lighthouse()
    ours, other = RendezvousClient(lighthouse), RendezvousClient(lighthouse)
    lighthouse.result.quorum_id, lighthouse.result.max_step = 2, 5
    before = ours._quorum(step=5).quorum_id
    assert other._quorum(step=5).quorum_id == before
    lighthouse.result.quorum_id, lighthouse.result.replica_ids = 1, ["a:1"]
    other._quorum(step=5)
    lighthouse.result.quorum_id, lighthouse.result.replica_ids = 2, ["a:1", "b:1"]
    lighthouse.result.max_step = 7
    after = ours._quorum(step=5).quorum_id
    assert after == other._quorum(step=7).quorum_id != before
    lighthouse.result.max_step = 8
    assert ours._quorum(step=8).quorum_id == other._quorum(step=0).quorum_id == after


def test_members_that_change_under_an_equal_id_reconfigure():
    lighthouse = Lighthouse()
    client = RendezvousClient(lighthouse)
    first = client._quorum().quorum_id
    lighthouse.result.replica_ids = ["a:1", "b:2"]
    assert client._quorum().quorum_id != first


def test_all_members_compute_the_same_id():
    assert rendezvous_id(["a", "b"], 3, 7) == rendezvous_id(["a", "b"], 3, 7)
    assert rendezvous_id(["a", "b"], 3, 7) != rendezvous_id(["a", "b"], 3, 8)
