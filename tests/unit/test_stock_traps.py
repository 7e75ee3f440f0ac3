"""What stock TorchTitan and torchft do wrong, provoked, beside what this package does instead."""

import copy
import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torchtitan.components.optimizer import (
    LRSchedulersContainer,
    OptimizersContainer,
    default_adamw,
)
from torchtitan.experiments.torchft.diloco.utils import module_split
from torchtitan.experiments.torchft.manager import TorchFTManager
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer

from torchtitan_rl_ft.models.tiny import make_tiny_model
from torchtitan_rl_ft.replica.group import ReplicaGroup
from torchtitan_rl_ft.replica.live_state import LiveState
from torchtitan_rl_ft.trainer.model_spec import build_model_spec
from torchtitan_rl_ft.trainer.outer_optimizer import outer_optimizer


@pytest.fixture
def one_rank():
    with tempfile.NamedTemporaryFile() as f:
        store = dist.FileStore(f.name, 1)
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        yield
        dist.destroy_process_group()


class NoProgress:
    def progress(self):
        return {}

    def load_progress(self, progress):
        pass


class Net(torch.nn.Module):
    """Offers its state in the middle of its own forward, as a donor's quorum thread does."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        self.offer = lambda: None

    def forward(self, x):
        h = self.first(x)
        self.offer()
        return self.second(h) + torch.nn.functional.linear(x, self.own)


def sharded_net():
    torch.manual_seed(0)
    net = Net()
    net.own = torch.nn.Parameter(torch.ones(4, 4))
    fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
    return net


def plain_optimizer(model):
    config = OptimizersContainer.Config(
        param_groups=default_adamw(lr=0.1).param_groups, implementation="for-loop"
    )
    return config.build(model_parts=[model])


def schedule(optimizers):
    config = LRSchedulersContainer.Config(warmup_steps=5, total_steps=50)
    return config.build(optimizers=optimizers, training_steps=50)


def test_trap_1_stock_state_dict_in_the_middle_of_forward_breaks_the_donor(one_rank):
    net = sharded_net()
    net.offer = net.state_dict
    with pytest.raises(Exception, match="DTensor|mixed|storage|resize|sharded"):
        net(torch.ones(2, 4)).sum().backward()


def test_trap_1_our_offer_in_the_middle_of_forward_changes_nothing(one_rank):
    quiet, offering = sharded_net(), sharded_net()
    optimizers = plain_optimizer(offering)
    state = LiveState([offering], optimizers, schedule(optimizers), NoProgress())
    offering.offer = state.state_dict
    x = torch.ones(2, 4)
    quiet(x).sum().backward()
    offering(x).sum().backward()
    for a, b in zip(quiet.parameters(), offering.parameters(), strict=True):
        assert torch.equal(a.grad.full_tensor(), b.grad.full_tensor())


def stock_optimizer(model, commits=True):
    manager = SimpleNamespace(
        start_quorum=lambda: None,
        should_commit=lambda: commits,
        disallow_state_dict_read=lambda: None,
        allow_state_dict_read=lambda: None,
    )
    ft = SimpleNamespace(manager=manager, use_async_quorum=True)
    config = TorchFTOptimizersContainer.Config(
        param_groups=default_adamw(lr=0.1).param_groups, implementation="for-loop"
    )
    return config.build(model_parts=[model], ft_manager=ft)


def run_steps(model, optimizers, schedulers, steps=3):
    for _ in range(steps):
        model(torch.ones(2, 4)).sum().backward()
        optimizers.step()
        schedulers.step()
        optimizers.zero_grad()


def offered_rates(state):
    return {v for k, v in state.items() if k.endswith(".lr")}


def test_trap_2_stock_offers_the_learning_rate_of_the_start():
    model = torch.nn.Linear(4, 4)
    optimizers = stock_optimizer(model)
    schedulers = schedule(optimizers)
    optimizers.init_cache_state_dict()
    run_steps(model, optimizers, schedulers)
    live = {g["lr"] for o in optimizers for g in o.param_groups}
    assert offered_rates(optimizers.state_dict()) != live


def test_trap_2_ours_offers_the_live_one():
    model = torch.nn.Linear(4, 4)
    optimizers = plain_optimizer(model)
    schedulers = schedule(optimizers)
    state = LiveState([model], optimizers, schedulers, NoProgress())
    run_steps(model, optimizers, schedulers)
    live = {g["lr"] for o in optimizers for g in o.param_groups}
    assert {g["lr"] for groups in state.state_dict()["param_groups"] for g in groups} == live


@pytest.mark.timeout(120)
def test_trap_3_models_are_built_without_fused_qkv(tmp_path):
    spec = build_model_spec("qwen3", "tiny", str(make_tiny_model(tmp_path / "model", 0)))
    with torch.device("meta"):
        model = spec.model.build()
    names = [n for n, _ in model.named_parameters()]
    assert any(n.endswith("wq.weight") for n in names)
    assert not any("wqkv" in n for n in names)


def test_trap_6_stock_data_parallel_world_is_zero_and_ours_is_the_groups_own():
    stock = object.__new__(TorchFTManager)
    stock._manager, stock.group_size, stock.replica_id = object(), 0, 0
    assert stock.get_dp_info(2, 1)[0] == 0
    ours = ReplicaGroup(ReplicaGroup.Config(enable=False))
    assert ours.get_dp_info(2, 1) == (2, 1)


def shared_parameters(fragments):
    ids = [id(p) for fragment in fragments for p in fragment]
    return len(ids) - len(set(ids))


def test_trap_10_stock_puts_a_tied_weight_into_two_fragments_and_ours_into_one():
    model = torch.nn.Module()
    model.tok_embeddings = torch.nn.Embedding(8, 4)
    model.layers = torch.nn.ModuleDict({"0": torch.nn.Linear(4, 4)})
    model.lm_head = torch.nn.Linear(4, 8, bias=False)
    model.lm_head.weight = model.tok_embeddings.weight
    named = [["tok_embeddings"], ["layers.0", "lm_head"]]
    stock = module_split(model, named)
    assert shared_parameters([list(fragment.parameters()) for fragment in stock]) == 1
    config = ReplicaGroup.Config(module_fqns_per_model_fragment=named)
    assert shared_parameters(outer_optimizer([model], "diloco", config).fragments) == 0


def count_hook_calls(optimizers, model):
    calls = []
    optimizers.register_step_pre_hook(lambda *args: calls.append(1))
    model(torch.ones(2, 4)).sum().backward()
    optimizers.step()
    return len(calls)


def test_trap_11_stock_runs_step_hooks_repeatedly_and_without_a_commit():
    model = torch.nn.Linear(4, 4)
    assert count_hook_calls(stock_optimizer(model, commits=True), model) > 1
    assert count_hook_calls(stock_optimizer(model, commits=False), model) == 1


def test_trap_11_ours_runs_them_once():
    model = torch.nn.Linear(4, 4)
    assert count_hook_calls(plain_optimizer(model), model) == 1


def test_trap_13_replica_ids_sort_as_they_count():
    ids = [f"torchtitan_ft_{i:05d}" for i in (2, 10, 100)]
    assert sorted(ids) == ids
    assert sorted(f"torchtitan_ft_{i}" for i in (2, 10, 100)) != [
        f"torchtitan_ft_{i}" for i in (2, 10, 100)
    ]


def test_trap_15_a_restored_scheduler_does_not_reach_the_optimizer_in_stock():
    model = torch.nn.Linear(4, 4)
    optimizers = plain_optimizer(model)
    schedulers = schedule(optimizers)
    run_steps(model, optimizers, schedulers)
    saved = copy.deepcopy(schedulers.state_dict())
    fresh = plain_optimizer(torch.nn.Linear(4, 4))
    restored = schedule(fresh)
    restored.load_state_dict(saved)
    assert fresh.optimizers[0].param_groups[0]["lr"] != restored.get_metrics()["lr/AdamW"]
