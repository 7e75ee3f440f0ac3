"""The outer step against plain arithmetic, and which parameters form a fragment."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtitan_rl_ft.replica.group import ReplicaGroup
from torchtitan_rl_ft.trainer.fragments import fragments, named_trainable
from torchtitan_rl_ft.trainer.outer_optimizer import outer_optimizer

LR, MOMENTUM = 0.7, 0.9


class Tied(torch.nn.Module):
    """As Qwen3 with tied weights: the head is the embedding's parameter."""

    def __init__(self):
        super().__init__()
        self.tok_embeddings = torch.nn.Embedding(8, 4)
        self.layers = torch.nn.ModuleDict({str(i): torch.nn.Linear(4, 4) for i in range(3)})
        self.lm_head = torch.nn.Linear(4, 8, bias=False)
        self.lm_head.weight = self.tok_embeddings.weight


def made(method="diloco", model=None, **keys):
    keys = {"outer_lr": LR, "outer_momentum": MOMENTUM, **keys}
    model = model or Tied()
    return model, outer_optimizer([model], method, ReplicaGroup.Config(**keys))


def pseudo_gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}


def step(model, outer, seed):
    for name, g in pseudo_gradients(model, seed).items():
        model.get_parameter(name).grad = g
    outer.step()


@pytest.mark.row("G9")
@pytest.mark.parametrize("num_fragments", [1, 3])
def test_diloco_is_nesterov_sgd_whatever_the_fragments(num_fragments):
    model, outer = made(num_fragments=num_fragments)
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    velocity = {n: torch.zeros_like(p) for n, p in expected.items()}
    for seed in range(4):
        step(model, outer, seed)
        for name, g in pseudo_gradients(model, seed).items():
            velocity[name] = MOMENTUM * velocity[name] + g
            expected[name] -= LR * (g + MOMENTUM * velocity[name])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name])


def test_local_sgd_takes_the_mean_itself():
    model, outer = made("local_sgd")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step(model, outer, 1)
    for name, g in pseudo_gradients(model, 1).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - g)
    assert not outer.has_state and outer.tensors() == {}


def test_without_momentum_there_is_no_state_to_heal_or_save():
    _, outer = made(outer_momentum=0.0)
    assert not outer.has_state and outer.state_dict() == {}


@pytest.mark.row("G9")
def test_a_state_that_was_carried_over_goes_on_the_same():
    model, outer = made()
    step(model, outer, 1)
    other, taken = made(model=copy.deepcopy(model))
    taken.load_state_dict(copy.deepcopy(outer.state_dict()))
    for seed in (2, 3):
        step(model, outer, seed)
        step(other, taken, seed)
    for name, p in model.named_parameters():
        assert torch.equal(p, other.get_parameter(name))


@pytest.fixture
def one_rank(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.row("G9")
def test_the_momentum_of_sharded_parameters_is_sharded_alike_and_comes_back(one_rank, tmp_path):
    def sharded():
        model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 2))
        return made(model=fully_shard(model, mesh=one_rank))

    model, outer = sharded()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    outer.step()
    for name, buffer in outer.state_dict().items():
        assert isinstance(buffer, DTensor)
        assert buffer.placements == model.get_parameter(name).placements
        assert not isinstance(outer.tensors()[name], DTensor)
    dcp.save({"outer_optimizer": outer}, checkpoint_id=tmp_path / "saved")
    _, found = sharded()
    dcp.load({"outer_optimizer": found}, checkpoint_id=tmp_path / "saved")
    for name, buffer in found.tensors().items():
        assert torch.equal(buffer, outer.tensors()[name]) and buffer.any()


@pytest.mark.row("G9")
@pytest.mark.parametrize(
    "keys",
    [
        {"num_fragments": 2},
        {
            "module_fqns_per_model_fragment": [
                ["tok_embeddings", "layers.0"],
                ["layers.1", "layers.2", "lm_head"],
            ]
        },
    ],
)
def test_a_tied_weight_is_in_one_fragment_and_moves_once(keys):
    model, outer = made(outer_momentum=0.0, outer_lr=1.0, **keys)
    held = [p for fragment in outer.fragments for p in fragment]
    assert len(held) == len({id(p) for p in held}) == len(list(model.parameters()))
    before = model.lm_head.weight.detach().clone()
    model.lm_head.weight.grad = torch.ones_like(before)
    outer.step()
    torch.testing.assert_close(model.lm_head.weight.detach(), before - 1)


def test_parts_of_a_pipeline_share_no_parameter():
    model = Tied()
    assert len(named_trainable([model, model.layers])) == len(list(model.parameters()))


def test_fragments_by_size_are_runs_that_are_about_even():
    sizes = {f"p{i}": 10 for i in range(9)}
    assert [len(f) for f in fragments(sizes, 3)] == [3, 3, 3]
    assert fragments({"big": 100, "a": 1, "b": 1}, 3) == [["big"], ["a"], ["b"]]
    assert fragments({"a": 1, "b": 1, "big": 100}, 2) == [["a", "b"], ["big"]]
    assert sum(fragments(sizes, 4), []) == list(sizes)


@pytest.mark.row("G10")
@pytest.mark.parametrize(
    ("count", "modules", "says"),
    [
        (4, [], "num_fragments = 4, but the model has 3 parameters"),
        (1, [["a"]], "names no module that holds b.weight"),
        (1, [["a", "b", "c"], ["d"]], r"fragment \['d'\] holds no parameter"),
    ],
)
def test_fragments_that_do_not_fit_the_model_are_refused(count, modules, says):
    with pytest.raises(ValueError, match=says):
        fragments({"a.weight": 1, "b.weight": 1, "c.weight": 1}, count, modules)
