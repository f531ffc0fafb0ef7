"""Our exports, loaded and run by speculators' own code, slot by slot.

It wants other versions than ours, so it lives in an environment of its own, which
`scripts/speculators_environment` makes; without it these tests are skipped.
"""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from dspark_train.blocks import ContextSpan
from dspark_train.drafter import Drafter
from dspark_train.formats import write
from dspark_train.target import TargetHead
from tests import golden_tensors
from tests.formats.test_writing import read

PLACE = Path(os.environ.get("DSPARK_SPECULATORS", "~/.cache/dspark_train/speculators"))
PYTHON = PLACE.expanduser() / "bin/python"
READER = Path(__file__).with_name("speculators_reader.py")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not PYTHON.exists(),
        reason=f"no environment of speculators at {PYTHON}: scripts/speculators_environment",
    ),
]


def in_speculators(
    tmp_path: Path, drafter: Drafter, head: TargetHead
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Inputs that were given, and what speculators' model of our export makes of them."""
    torch.manual_seed(0)
    S, D, M = 24, drafter.config.hidden_size, len(drafter.config.target_layer_ids)
    drafter.config.target = None  # it would fetch the target's weights
    write(tmp_path / "export", "speculators", drafter, head, architectures=["Qwen3ForCausalLM"])
    given = {
        "input_ids": torch.randint(0, 95, (S,)),
        "features": torch.randn(S, M * D),
        "anchors": torch.tensor([3, 9, 14]),
        "embedding": head.embedding.weight.data.contiguous(),
        "head": head.projection.weight.data.contiguous(),
    }
    if drafter.d2t is not None:
        given["d2t"] = drafter.d2t
    save_file(given, tmp_path / "in.safetensors")
    run = subprocess.run(
        [PYTHON, READER, tmp_path / "export", tmp_path / "in.safetensors", tmp_path / "out.st"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": "", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return given, load_file(tmp_path / "out.st")


@torch.no_grad()
def ours(
    drafter: Drafter, head: TargetHead, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states `[A, P, D]` of the proposing slots and the tokens `[A, P]` before each."""
    ids, anchors = given["input_ids"][None], given["anchors"][None]
    slots, S = drafter.slots, ids.shape[1]
    context = drafter.context_kv(given["features"][None], torch.arange(S)[None])
    inputs = slots.inputs(ids.gather(1, anchors), drafter.config.mask_token_id)
    span = ContextSpan(torch.zeros_like(anchors), anchors)
    hidden = drafter.backbone(head.embed(inputs), slots.positions(anchors), context, span)
    before = slots.predecessor_positions(anchors)
    return hidden[0, :, slots.proposing], ids[0][before[0]]


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dspark(tmp_path: Path, kind: str) -> None:
    drafter, head = read(f"deepspec-dspark-{kind}")
    given, theirs = in_speculators(tmp_path, drafter, head)
    hidden, previous = ours(drafter, head, given)
    torch.testing.assert_close(theirs["hidden"], hidden, **CLOSE)
    with torch.no_grad():
        latents, embeddings = drafter.markov_head.latents(hidden, previous)
        logits = head.logits(hidden) + drafter.markov_head.markov_w2(latents)
        confidence = drafter.confidence_head.logits(hidden, embeddings)
    torch.testing.assert_close(theirs["logits"], logits, **CLOSE)
    torch.testing.assert_close(theirs["confidence"], confidence, **CLOSE)


def test_dflash(tmp_path: Path) -> None:
    drafter, head = read("zlab-dflash")
    given, theirs = in_speculators(tmp_path, drafter, head)
    hidden, _ = ours(drafter, head, given)
    torch.testing.assert_close(theirs["hidden"][:, 1:], hidden, **CLOSE)
    torch.testing.assert_close(theirs["unary"][:, 1:], head.logits(hidden).detach(), **CLOSE)


def test_dflash2(tmp_path: Path) -> None:
    drafter, head = read("zlab-dflash2")
    given, theirs = in_speculators(tmp_path, drafter, head)
    hidden, previous = ours(drafter, head, given)
    torch.testing.assert_close(theirs["hidden"][:, 1:], hidden, **CLOSE)
    with torch.no_grad():
        latents, _ = drafter.markov_head.latents(hidden, previous)
        scores = drafter.markov_head.candidates(head.logits(hidden))
        scores = scores + drafter.markov_head.markov_w2(latents)
    expected = torch.full_like(scores, float("-inf")).scatter(
        -1, theirs["candidates"][:, 1:], theirs["scores"][:, 1:]
    )
    torch.testing.assert_close(scores, expected, **CLOSE)


def test_a_reduced_vocabulary(tmp_path: Path) -> None:
    config = read("deepspec-dspark-vanilla")[0].config
    config.draft_vocab_size = 7
    _, head, _ = golden_tensors.load("dspark_vanilla")
    torch.manual_seed(1)
    drafter, ids = Drafter(config).eval(), torch.tensor([0, 2, 3, 50, 51, 90, 95])
    drafter.draft_only(ids)
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    given, theirs = in_speculators(tmp_path, drafter, head)
    hidden, previous = ours(drafter, head, given)
    with torch.no_grad():
        latents, _ = drafter.markov_head.latents(hidden, previous)
        unary = F.linear(hidden, head.projection.weight[ids])
        logits = unary + drafter.markov_head.markov_w2(latents)
    torch.testing.assert_close(theirs["logits"], logits, **CLOSE)
    assert torch.equal(theirs["d2t"] + torch.arange(7), ids)
