"""Runs in the environment of speculators, never in ours: its own model of a checkpoint, one pass.

python speculators_reader.py CHECKPOINT INPUTS.safetensors OUTPUTS.safetensors
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core


@torch.no_grad()
def main(checkpoint: str, inputs: str, outputs: str) -> None:
    given = load_file(inputs)
    config = SpeculatorModelConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "eager"
    model = SpeculatorModel.from_pretrained(checkpoint, config=config).eval()
    # full vocabularies take both from the target, which is not on this machine
    model.embed_tokens.weight.copy_(given["embedding"])
    if "d2t" not in given:
        model.lm_head.weight.copy_(given["head"])
    anchors = given["anchors"]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    ids = given["input_ids"][None]
    features = given["features"][None]
    hidden, logits, _, _, at = model._backbone_forward(
        features,
        ids,
        torch.ones_like(ids),
        torch.zeros(1, ids.shape[1], model.embed_tokens.weight.shape[1]),
        torch.zeros_like(ids),
        max_anchors=len(anchors),
    )
    A, K = len(anchors), model.block_size
    tokens = ids[0, at].view(A, K)
    shifted = torch.cat((tokens[:, :1], tokens[:, :-1]), dim=1)
    previous = tokens if config.sample_from_anchor else shifted
    states, logits = hidden.view(A, K, -1), logits.view(A, K, -1)
    result = {"hidden": states, "unary": logits}
    if getattr(model, "markov_head", None) is not None:
        embedding = model.markov_head.prev_embeddings(previous)
        bias = model.markov_head.block_bias(
            prev_token_ids=previous, hidden_states=states, prev_emb=embedding
        )
        result["logits"] = logits + bias
        if model.confidence_head is not None:
            both = torch.cat((states, embedding), dim=-1)
            result["confidence"] = model.confidence_head(both).reshape(A, K)
    if hasattr(model, "candidate_selector"):
        selector = model.candidate_selector
        candidates = logits.topk(selector.top_k, dim=-1).indices
        result["candidates"] = candidates
        result["scores"] = selector.score_candidates(logits, states, previous, candidates)
    if model.d2t is not None:
        result["d2t"] = model.d2t
    save_file({name: tensor.contiguous() for name, tensor in result.items()}, outputs)


if __name__ == "__main__":
    main(*sys.argv[1:])
