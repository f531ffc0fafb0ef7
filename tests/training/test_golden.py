"""Law 3: the reference tensors are reproduced to 1e-5 in float32."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch.nn import functional as F

from dspark_train.data.batch import Batch
from dspark_train.decoding.proposers import BlockProposer
from dspark_train.decoding.proposers import drawing as drawing_module
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.objective import ObjectiveWeights, lean_loss, reference_loss
from dspark_train.training.forward import block_states
from tests import golden_tensors

KINDS = ("vanilla", "gated", "rnn")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def golden_batch(t: dict[str, torch.Tensor]) -> Batch:
    ids, anchors = t["in.input_ids"], t["in.anchors"]
    B, T = ids.shape
    return Batch(
        input_ids=ids,
        positions=torch.arange(T).expand(B, T),
        loss_mask=t["in.loss_mask"].bool(),
        features=t["in.target_features"],
        anchors=anchors,
        starts=torch.zeros_like(anchors),
        ends=torch.full_like(anchors, T),
        keep=t["in.keep"],
        last_hidden=t["in.target_last_hidden"].flatten(0, 1),
        hidden_rows=torch.arange(B * T).view(B, T),
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", [reference_loss, lean_loss])
def test_training_forward_loss_and_gradients(kind: str, loss: Callable) -> None:
    drafter, head, t = golden_tensors.load(f"dspark_{kind}")
    states = block_states(drafter, head, golden_batch(t))
    w2 = drafter.markov_head.markov_w2.weight
    keep, supervised = t["in.keep"].flatten(), t["out.eval_mask"].bool().flatten(0, 1)
    assert torch.equal(states.supervised, supervised)
    assert torch.equal(states.labels[supervised], t["out.target_ids"].flatten(0, 1)[supervised])
    draft_logits = head.logits(states.hidden) + F.linear(states.latents, w2)
    expected = t["out.draft_logits"].flatten(0, 1)
    torch.testing.assert_close(draft_logits[keep], expected[keep], **CLOSE)
    expected = t["out.confidence_logits"].flatten(0, 1)
    torch.testing.assert_close(states.confidence_logits[keep], expected[keep], **CLOSE)

    terms = loss(states, head, w2, ObjectiveWeights(0.1, 0.9, 1.0, loss_decay=4.0))
    for ours, name in ((terms.ce, "ce"), (terms.tv, "l1"), (terms.confidence, "confidence")):
        torch.testing.assert_close(ours, t[f"out.{name}_loss_num"], **CLOSE)
        torch.testing.assert_close(terms.weight, t[f"out.{name}_loss_den"], **CLOSE)
    torch.testing.assert_close(terms.loss(), t["out.loss"], **CLOSE)
    terms.loss().backward()
    parameters = dict(drafter.named_parameters())
    names = {key.removeprefix("grads.") for key in t if key.startswith("grads.")}
    assert names == set(parameters)
    for name in names:
        torch.testing.assert_close(parameters[name].grad, t[f"grads.{name}"], **CLOSE)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_greedy_proposal(kind: str) -> None:
    drafter, head, t = golden_tensors.load(f"dspark_{kind}")
    anchor = t["infer.anchor"].item()
    context = drafter.context_kv(
        t["in.target_features"][:1, :anchor], torch.arange(anchor).unsqueeze(0)
    )
    at = torch.tensor([[anchor]])
    tokens = drafter.slots.inputs(t["in.input_ids"][:1, anchor : anchor + 1], 95)
    hidden = drafter.backbone(head.embed(tokens), drafter.slots.positions(at), context)[:, 0]
    torch.testing.assert_close(hidden, t["infer.hidden"], **CLOSE)
    previous, state = t["in.input_ids"][:1, anchor], drafter.markov_head.start(hidden[:, 0])
    for k in range(drafter.slots.num_proposals):
        bias, embedding, state = drafter.markov_head.step(state, previous, hidden[:, k])
        confidence = drafter.confidence_head.logits(hidden[:, k], embedding)
        torch.testing.assert_close(confidence, t["infer.confidence_logits"][:, k], **CLOSE)
        logits = head.logits(hidden[:, k]) + bias
        torch.testing.assert_close(logits, t["infer.logits"][:, k], **CLOSE)
        previous = logits.argmax(-1)
        assert torch.equal(previous, t["infer.tokens"][:, k])


@torch.no_grad()
def test_dflash2_rounds_with_a_growing_context() -> None:
    """Convolutions and the walk among candidates, greedy and at temperature 0.7."""
    drafter, head, t = golden_tensors.load("dflash2")
    greedy, warm = SamplingSettings(), SamplingSettings(0.7)
    proposer = BlockProposer(drafter, head)
    for name in ("round0", "round1"):
        start, end = t[f"{name}.context_range"].tolist()
        tokens = [0] * end + [t[f"{name}.anchor_token"].item()]
        requests = {one: [Request(tokens, one, 99)] for one in (greedy, warm)}
        features = t["in.target_features"][:, start:end]
        proposer.observe(0, requests[greedy], features, [end - start])
        hidden = proposer._block(requests[greedy])
        torch.testing.assert_close(hidden, t[f"{name}.hidden"][:, 1:], **CLOSE)
        unary = head.logits(hidden)
        torch.testing.assert_close(unary, t[f"{name}.unary_logits"], **CLOSE)
        (proposal,) = proposer.propose(requests[greedy], [99])
        assert proposal.tokens == t[f"{name}.greedy_tokens"][0].tolist()

        # draws that follow the greedy path: the rows are those of the reference
        path = [torch.tensor([token]) for token in proposal.tokens]
        with mock.patch.object(drawing_module, "draw_rows", side_effect=path):
            (drawn,) = proposer.propose(requests[warm], [99])
        probs = drawn.probs[None]
        candidates = t[f"{name}.candidates"]
        expected = torch.zeros_like(probs).scatter(2, candidates, t[f"{name}.probs_t07"])
        torch.testing.assert_close(probs, expected, **CLOSE)
        scores = (probs.gather(2, candidates).log() * 0.7).diff()
        torch.testing.assert_close(scores, t[f"{name}.scores"].diff(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_dflash_rounds_with_a_growing_context() -> None:
    drafter, head, t = golden_tensors.load("dflash")
    context = None
    for name in ("round0", "round1"):
        start, end = t[f"{name}.context_range"].tolist()
        new = drafter.context_kv(
            t["in.target_features"][:, start:end], torch.arange(start, end).unsqueeze(0)
        )
        context = (
            new
            if context is None
            else [
                tuple(torch.cat(pair, dim=2) for pair in zip(old, fresh, strict=True))
                for old, fresh in zip(context, new, strict=True)
            ]
        )
        tokens = drafter.slots.inputs(t[f"{name}.anchor_token"].view(1, 1), 95)
        positions = drafter.slots.positions(torch.tensor([[end]]))
        hidden = drafter.backbone(head.embed(tokens), positions, context)[:, 0]
        torch.testing.assert_close(hidden, t[f"{name}.hidden"], **CLOSE)
        logits = head.logits(hidden[:, drafter.slots.proposing])
        torch.testing.assert_close(logits, t[f"{name}.proposal_logits"], **CLOSE)
        assert torch.equal(logits.argmax(-1), t[f"{name}.greedy_tokens"])
