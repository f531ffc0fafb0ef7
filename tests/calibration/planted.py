"""Rounds whose chance of acceptance is known."""

import torch

from dspark_train.calibration.traces import Traces


def planted_traces(
    temperatures: list[float],
    rounds: int,
    seed: int = 0,
    conversations: int = 100,
    shift: float = 0.0,
) -> Traces:
    """Draft k stands after those before it by a chance of σ((logit + shift) / T_k)."""
    generator = torch.Generator().manual_seed(seed)
    P = len(temperatures)
    logits = torch.randn(rounds, P, generator=generator) * 2 + 1
    chance = ((logits + shift) / torch.tensor(temperatures)).sigmoid()
    passed = (torch.rand(chance.shape, generator=generator) < chance).cumprod(-1)
    whole = torch.zeros(rounds, dtype=torch.int64)
    return Traces(
        logits=logits,
        overlap=chance,
        proposed=whole + P,
        accepted=passed.sum(-1),
        known=whole + P,
        context=whole + 10,
        conversation=torch.arange(rounds) % conversations,
        domain=whole,
        temperature=torch.full((rounds,), 0.7),
        domains=("planted",),
    )
