"""The verdict on a proposal: how many drafts stand, and what the next token is drawn from.

Leviathan et al. 2023, Chen et al. 2023: accept a drafted token x iff
`u · draft_probs[x] < target_probs[x]`; after the first rejection the next token comes from the
residual, after full acceptance from the target's next row. Then every committed token has the
target's own distribution.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dspark_train.objective import acceptance


@dataclass(frozen=True)
class Verdict:
    """`accepted` drafts stand; the token after them is drawn from `next_probs` `[V]`."""

    accepted: int
    next_probs: torch.Tensor


def accepts(u: float, draft_prob: float, target_prob: float) -> bool:
    """Half-open: u = 0 must not accept a token that the target never emits."""
    return u * draft_prob < target_prob


def residual(target_row: torch.Tensor, draft_row: torch.Tensor | None, token: int) -> torch.Tensor:
    """`(target − draft)₊ / Σ` over `[V]`, after `token` was rejected.

    `draft_row` None means that the draft was certain of `token`. Rows that agree to the last bit
    leave nothing; then the target's row is the limit.
    """
    if draft_row is None:
        left = target_row.clone()
        left[token] = 0
    else:
        left = (target_row - draft_row).clamp_(min=0)
    total = left.sum()
    return torch.where(total > 0, left / total, target_row)


def chances(
    target_probs: Sequence[torch.Tensor],
    tokens: Sequence[Sequence[int]],
    draft_probs: Sequence[torch.Tensor | None],
) -> list[list[tuple[float, float]]]:
    """Of every draft of n requests, its probability as drafted and with the target.

    They are read at once: on a GPU, a read for each request would be a wait for each.

    Args:
        target_probs, tokens, draft_probs: of each request, as for `verify`.
    """
    found, device = [], target_probs[0].device
    for rows, drafted, drawn_from in zip(target_probs, tokens, draft_probs, strict=True):
        ids = torch.tensor(drafted, dtype=torch.long, device=device)[:, None]
        of_target = rows[: len(drafted)].gather(1, ids)
        certain = torch.ones_like(of_target)
        found.append(
            torch.cat((certain if drawn_from is None else drawn_from.gather(1, ids), of_target), 1)
        )
    pairs = iter(torch.cat(found).tolist())
    return [[tuple(next(pairs)) for _ in drafted] for drafted in tokens]


def verify(
    target_probs: torch.Tensor,
    tokens: Sequence[int],
    draft_probs: torch.Tensor | None,
    uniforms: Sequence[float],
    pairs: Sequence[tuple[float, float]] | None = None,
) -> Verdict:
    """Judge L drafted tokens in order.

    Args:
        target_probs: `[L+1, V]`, row i the target's distribution of the i-th drafted token, given
            the drafts before it; the last row is for the token after all of them.
        tokens: L drafted ids.
        draft_probs: `[L, V]` that the drafts were drawn from; None only for drafts that were not
            drawn at all (certain, one-hot).
        uniforms: L numbers in [0, 1), independent of those that the drafts were drawn with.
        pairs: what `chances` says of the drafts; None reads it here.

    Raises:
        ValueError: lengths that contradict each other.
    """
    L = len(tokens)
    if target_probs.shape[0] != L + 1 or len(uniforms) != L:
        raise ValueError(
            f"{L} drafts need {L + 1} target rows and {L} uniforms, got "
            f"{target_probs.shape[0]} and {len(uniforms)}"
        )
    if draft_probs is not None and draft_probs.shape != (L, target_probs.shape[1]):
        raise ValueError(
            f"draft_probs has shape {tuple(draft_probs.shape)}, expected "
            f"{(L, target_probs.shape[1])}: one row per draft over the target's vocabulary"
        )
    if pairs is None:
        (pairs,) = chances([target_probs], [tokens], [draft_probs])
    for i, (of_draft, of_target) in enumerate(pairs):
        if not accepts(uniforms[i], of_draft, of_target):
            draft_row = None if draft_probs is None else draft_probs[i]
            return Verdict(i, residual(target_probs[i], draft_row, tokens[i]))
    return Verdict(L, target_probs[L])


def verify_greedy(choices: Sequence[int], tokens: Sequence[int]) -> tuple[int, int]:
    """`verify` for one-hot rows: accepted drafts, and the token after them.

    Args:
        choices: L+1 ids that the target chooses itself (its most likely, or drawn without regard
            to the drafts), one per row of `target_probs`.
        tokens: L drafted ids.
    """
    accepted = 0
    while accepted < len(tokens) and tokens[accepted] == choices[accepted]:
        accepted += 1
    return accepted, choices[accepted]


def overlap(
    target_probs: torch.Tensor, tokens: Sequence[int], draft_probs: torch.Tensor | None
) -> list[float]:
    """`1 − ½‖draft − target‖₁` of L drafts: the chance that each is accepted once it is judged.

    Arguments as those of `verify`.
    """
    L = len(tokens)
    if draft_probs is None:
        drafted = torch.tensor(tokens, dtype=torch.int64, device=target_probs.device)[:, None]
        return target_probs[:L].gather(1, drafted)[:, 0].tolist()
    return acceptance.overlap(draft_probs, target_probs[:L]).tolist()
