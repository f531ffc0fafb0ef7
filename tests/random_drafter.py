"""Untrained drafters whose guesses are far from uniform and far from the target's."""

import torch

from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.target import Target


def make_drafter(
    target: Target,
    block_size: int = 4,
    sample_from_anchor: bool = True,
    head: str | None = "vanilla",
    seed: int = 1,
    draft_ids: list[int] | None = None,
    **config: object,
) -> Drafter:
    """A one-layer drafter for `target`: large random weights, rank 4, confidence head.

    `draft_ids`: the only tokens that it can draft; `config`: more fields of its configuration.
    """
    torch.manual_seed(seed)
    drafter = Drafter(
        DrafterConfig(
            hidden_size=target.hidden_size,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            vocab_size=target.vocab_size,
            num_target_layers=target.num_layers,
            target_layer_ids=[0],
            block_size=block_size,
            sample_from_anchor=sample_from_anchor,
            mask_token_id=0,
            markov_head_type=head,
            markov_rank=4,
            draft_vocab_size=None if draft_ids is None else len(draft_ids),
            **config,
        )
    )
    if draft_ids is not None:
        drafter.draft_only(torch.tensor(draft_ids))
    for parameter in drafter.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.4)
    return drafter
