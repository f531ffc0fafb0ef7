"""Traces of easy, middling and hard conversations with calibrated confidences."""

import torch

from dspark_train.calibration.traces import Traces

P = 7


def mixed_traces(conversations: int = 60, rounds: int = 40, seed: int = 0) -> Traces:
    """Overlap falls from slot to slot; every third conversation is easy, every third hard."""
    generator = torch.Generator().manual_seed(seed)
    N = conversations * rounds
    conversation = torch.arange(N) // rounds
    ease = torch.tensor([2.6, 1.2, -0.4])[conversation % 3]
    noise = torch.randn(N, P, generator=generator)
    logits = ease[:, None] - 0.12 * torch.arange(P) + 0.9 * noise
    overlap = logits.sigmoid()
    passed = (torch.rand(N, P, generator=generator) < overlap).cumprod(-1)
    whole = torch.zeros(N, dtype=torch.int64)
    return Traces(
        logits=logits,
        overlap=overlap,
        proposed=whole + P,
        accepted=passed.sum(-1),
        known=whole + P,
        context=whole + 100,
        conversation=conversation,
        domain=whole,
        temperature=torch.ones(N),
        domains=("mixed",),
    )
