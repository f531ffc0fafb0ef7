"""Where two greedy outputs part, and whether rounding explains it (fault 23).

A pass over one token and a pass over eight add up in another order. In bf16 that moves logits by a
few units in the last place, so where two tokens are that close, either may win. Everything after
the first such place follows from it.
"""

from dataclasses import dataclass

import torch

from dspark_train.target import Target

# units in the last place of the larger logit by which a batched pass may move it
ULPS = 4


@dataclass(frozen=True)
class Divergence:
    """First place where an output differs from plain decoding.

    Attributes:
        prompt: identity of the prompt.
        position: index in the output.
        token, plain_token: what came, and what plain decoding has there; None: it had ended.
        gap: distance of their logits under the target.
        tolerance: what rounding explains in the target's dtype.
    """

    prompt: str
    position: int
    token: int | None
    plain_token: int | None
    gap: float
    tolerance: float

    @property
    def near_tie(self) -> bool:
        return self.gap <= self.tolerance


@torch.inference_mode()
def first_divergence(
    target: Target, name: str, prompt: list[int], tokens: list[int], plain: list[int]
) -> Divergence | None:
    """Compare an output with that of plain decoding; None where they are identical.

    Args:
        target: judges how close the two tokens are, given all that came before.
        name: identity of the prompt.
        prompt: its token ids.
        tokens, plain: the two outputs.
    """
    if tokens == plain:
        return None
    shared = next(
        (i for i, (a, b) in enumerate(zip(tokens, plain, strict=False)) if a != b),
        min(len(tokens), len(plain)),
    )
    token, other = (out[shared] if shared < len(out) else None for out in (tokens, plain))
    gap, tolerance = float("inf"), 0.0
    if token is not None and other is not None:
        ids = torch.tensor([prompt + plain[:shared]], device=target.device)
        logits = target.head.logits(target.forward(ids).last_hidden[0, -1]).float()
        gap = abs(float(logits[token] - logits[other]))
        step = torch.finfo(target.dtype).eps
        tolerance = ULPS * step * float(logits[[token, other]].abs().max())
    return Divergence(name, shared, token, other, gap, tolerance)
