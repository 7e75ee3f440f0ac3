"""Which parameter an anomaly is told with, and the guards that the configuration asks for."""

import torch

from torchtitan_rl_ft.config.recovery import RecoverySection
from torchtitan_rl_ft.observability.events import EventList
from torchtitan_rl_ft.trainer.attempt import Placement
from torchtitan_rl_ft.trainer.numeric_guards import guards_of, largest_gradient, watch_of

ALONE = Placement(rank=0, degree=1, group=None)


def test_the_largest_gradient_is_named_with_its_share_of_the_squared_norms():
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(1, 1))
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = torch.tensor([[1.0, 0.0]])
    model[1].weight.grad = torch.tensor([[3.0]])
    name, share = largest_gradient([model], ALONE)
    assert name == "1.weight" and share == 0.9


def test_guards_are_those_of_the_configuration():
    recovery = RecoverySection(check_for_nan_in_loss_and_grad=False)
    guards = guards_of(recovery, 2, dict)
    assert not guards.finite and guards.rerun is None and guards.hashed is None
    recovery = RecoverySection(rerun_mode="report_stats", rerun_interval=3, replica_hash_interval=5)
    guards = guards_of(recovery, 2, dict)
    assert guards.finite and guards.hashed is dict and guards.hash_interval == 5
    assert guards.rerun is not None
    assert (guards.rerun.mode, guards.rerun.interval, guards.rerun.degree) == ("report_stats", 3, 2)
    watch_of(recovery, ALONE, guards.rerun, [], EventList())
