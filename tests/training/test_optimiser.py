"""Learning rates by part, Muon beside AdamW, warm-up and cosine."""

import copy
import math

import pytest
import torch
from torch import nn

from dspark_train.config import TrainConfig
from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.training.muon import Muon
from dspark_train.training.optimiser import cosine_schedule, learning_rates, make_optimiser

NAMES = ["fc.weight", "layers.0.mlp.up_proj.weight", "layers.1.norm.weight", "markov_head.w"]


def step(parameters: nn.ParameterDict, optimiser: torch.optim.Optimizer, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in parameters.values():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()


def some_parameters() -> nn.ParameterDict:
    torch.manual_seed(0)
    shapes = {"fc_weight": (6, 4), "norm": (4,), "markov_head_w1": (9, 3)}
    return nn.ParameterDict({name: torch.randn(shape) for name, shape in shapes.items()})


def optimiser_of(parameters: nn.ParameterDict, **train: object) -> torch.optim.Optimizer:
    settings = TrainConfig(warmup=0.0, weight_decay=0.1, **train)
    return make_optimiser(parameters.items(), settings, 1e-2, total=10**9)[0]


def test_the_longest_part_decides() -> None:
    settings = TrainConfig(lr_heads=5.0, lr_parts={"layers": 2.0, "layers.1": 3.0, "fc": 4.0})
    rates = learning_rates(NAMES, settings, 1.0)
    assert list(rates.values()) == [4.0, 2.0, 3.0, 5.0]
    assert set(learning_rates(NAMES, TrainConfig(), 1.0).values()) == {1.0}


def test_a_part_is_a_whole_name() -> None:
    with pytest.raises(ValueError, match=r"lr_parts names 'layer'.*\['fc', 'layers', 'markov_head"):
        learning_rates(NAMES, TrainConfig(lr_parts={"layer": 2.0}), 1.0)


def test_parts_of_a_drafter_move_at_their_rates() -> None:
    """The first step of Adam is the learning rate itself, whatever the gradient."""
    drafter = Drafter(DrafterConfig())
    parts = {"layers.1": 0.25}
    settings = TrainConfig(optimiser="adamw", lr_heads=0.5, lr_parts=parts, warmup=0.0)
    before = copy.deepcopy(drafter.state_dict())
    optimiser, _ = make_optimiser(drafter.named_parameters(), settings, 0.125, 10**9)
    for parameter in drafter.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    for name, tensor in drafter.named_parameters():
        expected = {"markov": 0.5, "confid": 0.5, "layers": 0.125}.get(name[:6], 0.125)
        expected = 0.25 if name.startswith("layers.1") else expected
        torch.testing.assert_close(
            before[name] - tensor.detach(), torch.full_like(tensor, expected)
        )


def test_muon_takes_the_matrices_of_the_backbone() -> None:
    ours, alone = some_parameters(), some_parameters()
    optimiser = optimiser_of(ours, optimiser="muon")
    muon = Muon([{"params": [alone["fc_weight"]], "lr": 1e-2}], weight_decay=0.1)
    adamw = torch.optim.AdamW(
        [alone["norm"], alone["markov_head_w1"]], lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1
    )
    for seed in range(3):
        step(ours, optimiser, seed)
        step(alone, muon, seed)
        adamw.step()
    for name in ours:
        torch.testing.assert_close(ours[name], alone[name])


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_restored_state_continues(kind: str) -> None:
    whole, part = some_parameters(), some_parameters()
    optimiser = optimiser_of(whole, optimiser=kind)
    for seed in range(4):
        step(whole, optimiser, seed)
        if seed == 1:
            state = copy.deepcopy(optimiser.state_dict())
            part.load_state_dict(whole.state_dict())
    resumed = optimiser_of(part, optimiser=kind)
    resumed.load_state_dict(state)
    for seed in (2, 3):
        step(part, resumed, seed)
    assert all(torch.equal(whole[name], part[name]) for name in whole)
    moments = [v for s in state["state"].values() for v in s.values() if torch.is_tensor(v)]
    assert moments
    assert {moment.dtype for moment in moments} == {torch.float32}


def test_warm_up_and_cosine() -> None:
    factors = [cosine_schedule(s, warmup=4, total=20) for s in range(21)]
    assert factors[:4] == [0.25, 0.5, 0.75, 1.0]
    assert factors[4] == 1.0
    assert math.isclose(factors[12], 0.5)
    assert factors[20] == 0.0
    assert sorted(factors[4:], reverse=True) == factors[4:]


def test_heads_alone_are_adamws_under_muon() -> None:
    """The second stage of the staged schedule has the settings of the first."""
    drafter = Drafter(DrafterConfig())
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name.startswith(("markov_head", "confidence_head")))
    settings = TrainConfig(optimiser="muon")
    optimiser, _ = make_optimiser(drafter.named_parameters(), settings, 1e-3, 10)
    assert type(optimiser) is torch.optim.AdamW
