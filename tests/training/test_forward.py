"""Laws 1 and 2: the masked training forward is the cached decoding forward, and nothing leaks."""

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from dspark_train.blocks import ContextSpan
from dspark_train.data.batch import Batch, collate, pack_rows
from dspark_train.data.shard import Document, label_rows
from dspark_train.decoding.cache import DraftCache
from dspark_train.drafter import Drafter, DrafterConfig
from dspark_train.target.head import TargetHead
from dspark_train.training.forward import block_states
from tests.golden_tensors import head_of

D, V, MASK = 32, 50, 49
CONVENTIONS = [(4, True), (5, False)]
MIXED = {"layer_types": ["full_attention", "sliding_attention"]}
VARIANTS = {
    "full": {},
    "window 5": {**MIXED, "sliding_window": 5},
    "window 9": {**MIXED, "sliding_window": 9},
    "from the anchor": {**MIXED, "sliding_window": 3, "window_from": "anchor"},
    "causal": {"causal_blocks": "all"},
    "causal, from the anchor": {
        "sliding_window": 4,
        "window_from": "anchor",
        "causal_blocks": "sliding",
    },
    "gemma 4": {
        "hidden_act": "gelu_pytorch_tanh",
        "sandwich_norms": True,
        "value_norm": True,
        "keys_are_values": True,
        "attention_scale": 1.0,
        "rope_parameters": {
            "rope_type": "proportional",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
    },
}
KINDS = [None, "vanilla", "gated", "rnn"]


def make_drafter(
    kind: str | None, block_size: int, from_anchor: bool, variant: str = "full"
) -> Drafter:
    """Two layers of a variant."""
    torch.manual_seed(7)
    drafter = Drafter(
        DrafterConfig(
            hidden_size=D,
            intermediate_size=48,
            head_dim=8,
            vocab_size=V,
            mask_token_id=MASK,
            target_layer_ids=[0, 2],
            block_size=block_size,
            sample_from_anchor=from_anchor,
            markov_head_type=kind,
            initializer_range=0.3,
            **VARIANTS[variant],
        )
    )
    for parameter in drafter.parameters():  # norms and zero matrices too
        torch.nn.init.normal_(parameter, std=0.3)
    return drafter.eval()


def make_head() -> TargetHead:
    torch.manual_seed(8)
    return head_of(torch.randn(V, D), torch.randn(V, D))


def make_documents() -> list[Document]:
    """Three documents of different lengths, a prompt before each response."""
    torch.manual_seed(9)
    documents = []
    for length, prompt in ((14, 3), (9, 4), (17, 2)):
        mask = (torch.arange(length) >= prompt).to(torch.uint8)
        rows = label_rows(mask)
        documents.append(
            Document(
                input_ids=torch.randint(V - 1, (length,), dtype=torch.int32),
                loss_mask=mask,
                features=torch.randn(length, 2 * D),
                last_hidden=torch.randn(len(rows), D),
                label_rows=rows,
            )
        )
    return documents


def make_batch(documents: list[Document], row_tokens: int) -> Batch:
    return collate(
        documents, range(len(documents)), anchors=50, row_tokens=row_tokens, seed=0, epoch=0
    )


def outputs(drafter: Drafter, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft logits `[B, A, P, V]` and confidence logits `[B, A, P]`."""
    head, (B, A) = make_head(), batch.anchors.shape
    states = block_states(drafter, head, batch)
    logits = head.logits(states.hidden)
    if states.latents is not None:
        logits = logits + F.linear(states.latents, drafter.markov_head.markov_w2.weight)
    P = logits.shape[1]
    return logits.view(B, A, P, V), states.confidence_logits.view(B, A, P)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("row_tokens", [0, 30])
@pytest.mark.parametrize("variant", VARIANTS)
@torch.no_grad()
def test_training_forward_is_decoding_forward(
    kind: str | None, convention: tuple[int, bool], row_tokens: int, variant: str
) -> None:
    """Law 1, for every anchor of packed and of single documents; both compute in float32."""
    drafter, head = make_drafter(kind, *convention, variant), make_head()
    documents = make_documents()
    batch = make_batch(documents, row_tokens)
    logits, confidence = outputs(drafter, batch)
    compared = 0
    for b, a in batch.keep.nonzero().tolist():
        start, end = int(batch.starts[b, a]), int(batch.ends[b, a])
        anchor = int(batch.anchors[b, a]) - start
        tokens, features = batch.input_ids[b, start:end], batch.features[b : b + 1, start:end]
        cache = DraftCache(drafter.config.num_hidden_layers)
        for at in range(0, anchor, 5):  # the cache grows in pieces, as in decoding
            piece = slice(at, min(anchor, at + 5))
            positions = torch.arange(piece.start, piece.stop)[None]
            cache.append(
                drafter.context_kv(features[:, piece], positions), [piece.stop - piece.start]
            )
        ids = drafter.slots.inputs(tokens[anchor].view(1, 1), MASK)
        positions = drafter.slots.positions(torch.tensor([[anchor]]))
        hidden = drafter.backbone(head.embed(ids), positions, cache.context())
        hidden = hidden[0, :, drafter.slots.proposing]
        state = drafter.markov_head.start(hidden[:, 0]) if kind else None
        for k in range(min(drafter.slots.num_proposals, end - start - anchor - 1)):
            expected, embedding = head.logits(hidden[:, k]), None
            if kind:
                previous = tokens[anchor + k].view(1)
                bias, embedding, state = drafter.markov_head.step(state, previous, hidden[:, k])
                expected = expected + bias
            torch.testing.assert_close(logits[b, a, k], expected[0], rtol=1e-4, atol=1e-5)
            expected = drafter.confidence_head.logits(hidden[:, k], embedding)
            torch.testing.assert_close(confidence[b, a, k], expected[0], rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared > 80


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("variant", ["full", "window 5", "causal, from the anchor"])
@torch.no_grad()
def test_nothing_at_or_after_the_anchor_leaks(
    kind: str | None, convention: tuple[int, bool], variant: str
) -> None:
    """Law 2: bit-equal logits when the future changes, its own token excepted.

    The sequential head is teacher-forced, so a slot may see the tokens before its label: those
    are kept and everything from the label on changes.
    """
    drafter = make_drafter(kind, *convention, variant)
    batch = make_batch(make_documents()[:1], 0)
    before, confidence = outputs(drafter, batch)
    for a in range(batch.anchors.shape[1]):
        anchor = int(batch.anchors[0, a])
        features = batch.features.clone()
        features[0, anchor:] = torch.randn_like(features[0, anchor:])
        for k in range(drafter.slots.num_proposals):
            label = min(anchor + 1 + k, batch.input_ids.shape[1])
            ids = batch.input_ids.clone()
            ids[0, label:] = (ids[0, label:] + 1) % (V - 1)
            after = outputs(drafter, replace(batch, input_ids=ids, features=features))
            assert torch.equal(after[0][0, a, k], before[0, a, k])
            assert torch.equal(after[1][0, a, k], confidence[0, a, k])


@torch.no_grad()
def test_other_documents_and_blocks_do_not_leak() -> None:
    """Law 2 between documents of one row, and between blocks of one document."""
    drafter, documents = make_drafter("rnn", 4, True), make_documents()
    batch = make_batch(documents, 30)
    assert len(batch.input_ids) == 2  # two of the three share a row
    logits, _ = outputs(drafter, batch)

    other = batch.starts[0] > 0  # blocks of the second document of row 0
    cut = int(batch.starts[0].max())
    features, ids = batch.features.clone(), batch.input_ids.clone()
    features[0, :cut] = torch.randn_like(features[0, :cut])
    ids[0, :cut] = (ids[0, :cut] + 1) % (V - 1)
    after, _ = outputs(drafter, replace(batch, features=features, input_ids=ids))
    assert torch.equal(after[0, other], logits[0, other])
    assert not torch.equal(after[0, ~other & batch.keep[0]], logits[0, ~other & batch.keep[0]])

    anchors = batch.anchors.clone()
    anchors[0, 1:] = anchors[0, 2].clone()  # every block but the first moves
    after, _ = outputs(drafter, replace(batch, anchors=anchors))
    assert torch.equal(after[0, 0], logits[0, 0])


@torch.no_grad()
def test_the_context_before_the_anchor_is_read() -> None:
    """The laws above would hold for a drafter that reads nothing at all."""
    drafter = make_drafter(None, 4, True)
    batch = make_batch(make_documents()[:1], 0)
    before, _ = outputs(drafter, batch)
    anchor = int(batch.anchors[0, 3])
    features = batch.features.clone()
    features[0, anchor - 1] += 1.0
    after, _ = outputs(drafter, replace(batch, features=features))
    assert not torch.equal(after[0, 3], before[0, 3])
    ids = batch.input_ids.clone()
    ids[0, anchor] = (ids[0, anchor] + 1) % (V - 1)
    after, _ = outputs(drafter, replace(batch, input_ids=ids))
    assert not torch.equal(after[0, 3], before[0, 3])


@torch.no_grad()
def test_a_window_hides_what_lies_behind_it() -> None:
    """One sliding layer of window 5: the slots of anchor 8 read features 4 to 7, none before."""
    drafter = make_drafter(None, 4, True, "window 5")
    drafter.layers, drafter.config.layer_types = drafter.layers[1:], ["sliding_attention"]
    batch = make_batch(make_documents()[:1], 0)
    at = batch.anchors[0].tolist().index(8)
    before, _ = outputs(drafter, batch)
    for position, seen in ((3, []), (4, [0]), (6, [0, 1, 2]), (7, [0, 1, 2, 3])):
        features = batch.features.clone()
        features[0, position] += 1.0
        after, _ = outputs(drafter, replace(batch, features=features))
        changed = (after[0, at] != before[0, at]).any(-1)
        # a slot that sees it tells the others of its block, but not within the same layer
        assert changed.nonzero().flatten().tolist() == seen, position


@torch.no_grad()
def test_a_window_from_the_anchor_hides_the_same_from_every_slot() -> None:
    """Window 4, causal, one layer: slots of anchor 8 read features 4 to 7, all of them."""
    drafter = make_drafter(None, 4, True, "causal, from the anchor")
    drafter.layers, drafter.config.layer_types = drafter.layers[1:], ["sliding_attention"]
    batch = make_batch(make_documents()[:1], 0)
    at = batch.anchors[0].tolist().index(8)
    before, _ = outputs(drafter, batch)
    for position, seen in ((3, []), (4, [0, 1, 2, 3]), (7, [0, 1, 2, 3])):
        features = batch.features.clone()
        features[0, position] += 1.0
        after, _ = outputs(drafter, replace(batch, features=features))
        changed = (after[0, at] != before[0, at]).any(-1)
        assert changed.nonzero().flatten().tolist() == seen, position


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_of_different_lengths_decode_as_each_alone(variant: str) -> None:
    drafter, lengths = make_drafter(None, 4, True, variant), [3, 11, 7]
    torch.manual_seed(3)
    features, embeddings = torch.randn(3, 11, 2 * D), torch.randn(3, 1, 4, D)
    context = drafter.context_kv(features, torch.arange(11).expand(3, 11))
    ends = torch.tensor(lengths)[:, None]
    positions = drafter.slots.positions(ends)
    span = ContextSpan(torch.zeros_like(ends), ends)
    together = drafter.backbone(embeddings, positions, context, span)
    for row, length in enumerate(lengths):
        own = [tuple(x[row : row + 1, :, :length] for x in layer) for layer in context]
        one = slice(row, row + 1)
        alone = drafter.backbone(embeddings[one], positions[one], own)
        torch.testing.assert_close(together[one], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["full", "causal", "causal, from the anchor"])
def test_which_slots_of_its_block_a_slot_sees(variant: str) -> None:
    """All of them, or those up to itself."""
    drafter = make_drafter(None, 4, True, variant)
    embeddings = torch.randn(1, 1, 4, D, requires_grad=True)
    context = drafter.context_kv(torch.randn(1, 6, 2 * D), torch.arange(6)[None])
    hidden = drafter.backbone(embeddings, torch.arange(6, 10).view(1, 1, 4), context)
    for k in range(4):
        (gradient,) = torch.autograd.grad(hidden[0, 0, k].sum(), embeddings, retain_graph=True)
        seen = k + 1 if "causal" in variant else 4
        assert (gradient[0, 0].abs().sum(-1) > 0).tolist() == [True] * seen + [False] * (4 - seen)


def test_labels_and_target_rows_line_up() -> None:
    """Fault 33: label t is x_t, and its distribution comes from the hidden state at t - 1."""
    drafter, documents = make_drafter("vanilla", 4, True), make_documents()
    batch = make_batch(documents, 30)
    states = block_states(drafter, make_head(), batch)
    A = batch.anchors.shape[1]
    everything = {}  # (row, position) -> last hidden state, straight from the documents
    for b, row in enumerate(pack_rows([len(d.input_ids) for d in documents], 30)):
        start = 0
        for i in row:
            for hidden, at in zip(documents[i].last_hidden, documents[i].label_rows, strict=True):
                everything[b, start + int(at)] = hidden
            start += len(documents[i].input_ids)
    checked = 0
    for n, k in states.supervised.nonzero().tolist():
        b, a = divmod(n, A)
        label = int(batch.anchors[b, a]) + 1 + k
        assert label < int(batch.ends[b, a])
        assert states.labels[n, k] == batch.input_ids[b, label]
        used = states.target_hidden[states.target_rows[n, k]]
        assert torch.equal(used, everything[b, label - 1])
        checked += 1
    assert checked > 80


def test_confidence_gradient_can_be_kept_from_the_backbone() -> None:
    batch = make_batch(make_documents(), 0)
    for trains in (True, False):
        drafter = make_drafter("vanilla", 4, True)
        states = block_states(drafter, make_head(), batch, confidence_trains_backbone=trains)
        states.confidence_logits.sum().backward()
        assert (drafter.fc.weight.grad is not None) is trains
        assert (drafter.markov_head.markov_w1.weight.grad is not None) is trains
        assert drafter.confidence_head.proj.weight.grad is not None
