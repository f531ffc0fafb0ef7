"""Drafters that the pipeline trains besides DSpark: DFlash2, and one with fewer draft tokens."""

from pathlib import Path

import pytest
import torch

from dspark_train.artifacts import Artifact
from dspark_train.config import Config, DrafterSettings
from dspark_train.config_training import TrainConfig
from dspark_train.data.bigrams import bigram_factors
from dspark_train.data.datamodule import split_validation
from dspark_train.data.store import FeatureStore
from dspark_train.data.vocabulary import frequent_tokens
from dspark_train.decoding import SpeculativeDecoder
from dspark_train.drafter import Drafter, DrafterConfig, load_drafter
from dspark_train.stages.train import new_drafter
from dspark_train.target import Target
from tests.tiny_pipeline import Run, refused

PROMPT = [{"role": "user", "content": "please mend the red door"}]


def same_as_plain(target: Target, checkpoint: Path) -> None:
    plain = SpeculativeDecoder.from_pretrained(target=target, proposer="plain")
    decoder = SpeculativeDecoder.from_pretrained(checkpoint, target)
    assert decoder.generate(PROMPT, 24).tokens == plain.generate(PROMPT, 24).tokens


@pytest.mark.slow
def test_dflash2_is_trained_and_exported_like_any_other(
    tiny_run_finished: Run, tiny_target: Target, tmp_path: Path
) -> None:
    """Identity at the start, all of it moved by training, exact when decoding."""
    given = ["drafter=dflash2", "objective=dflash", "drafter.conv_group_size=8"]
    given += ["drafter.selector_top_k=4", "export.formats=[native,dflash,speculators]"]
    ended = tiny_run_finished("stages=[train,calibrate,export]", *given)
    assert ended.status == 0, ended.err
    export = Artifact.open(tmp_path / "run/export")
    trained = load_drafter(export.folder("checkpoint"))
    torch.manual_seed(0)
    fresh = Drafter(DrafterConfig.from_dict(trained.config.to_dict()))
    plain = Drafter(
        DrafterConfig.from_dict(
            {**trained.config.to_dict(), "conv_kernel_size": None, "markov_head_type": None}
        )
    )
    plain.load_state_dict(fresh.state_dict(), strict=False)
    width, taps = trained.config.hidden_size, len(trained.config.target_layer_ids)
    context = [torch.randn(1, 5, taps * width), torch.arange(5)[None]]
    block = [torch.randn(1, 2, trained.config.block_size, width)]
    block.append(trained.slots.positions(torch.tensor([[5, 5]])))
    hidden = [m.backbone(*block, m.context_kv(*context)) for m in (fresh, plain, trained)]
    assert torch.equal(hidden[0], hidden[1])
    for name, parameter in fresh.named_parameters():
        if "_conv." in name or name.startswith("markov_head"):
            assert not torch.equal(parameter, trained.get_parameter(name)), name
    for place in export.facts["formats"].values():
        same_as_plain(tiny_target, export.directory / place)


@pytest.mark.slow
def test_a_reduced_vocabulary_is_that_of_the_rollouts(
    tiny_run_finished: Run, tiny_target: Target, tmp_path: Path
) -> None:
    """The most frequent tokens, the share of them on record, and exact decoding all the same."""
    given = ["drafter.draft_vocab_size=24", "export.formats=[native,vllm,speculators]"]
    ended = tiny_run_finished("stages=[train,calibrate,export]", *given)
    assert ended.status == 0, ended.err
    run = tmp_path / "run"
    store = FeatureStore(Artifact.open(run / "capture"))
    counts = torch.zeros(tiny_target.vocab_size, dtype=torch.int64)
    for number in range(len(store)):
        document = store.document(number)
        for token in document.input_ids[document.loss_mask.bool()].tolist():
            counts[token] += 1
    fact = Artifact.open(run / "train").facts["draft_vocabulary"]
    best = counts.sort(descending=True).values[:24].sum() / counts.sum()
    assert fact == {"size": 24, "share": pytest.approx(best.item(), abs=1e-5)}
    assert 0.3 < fact["share"] < 1
    assert f"{100 * fact['share']:.2f} % of the responses" in ended.out
    export = Artifact.open(run / "export")
    ids = load_drafter(export.folder("checkpoint")).draft_ids
    assert torch.equal(ids, frequent_tokens(store, 24, tiny_target.vocab_size)[0])
    assert torch.equal(ids, ids.unique())
    assert counts[ids].min() >= counts.scatter(0, ids, 0).max()
    for place in export.facts["formats"].values():
        same_as_plain(tiny_target, export.directory / place)


def test_more_draft_tokens_than_there_are(tiny_run_finished: Run) -> None:
    ended = tiny_run_finished("stages=[train]", "drafter.draft_vocab_size=4000")
    refused(ended, "draft_vocab_size=4000")


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("start", ["bigrams", "zero"])
@pytest.mark.parametrize("size", [None, 24])
def test_the_markov_head_begins_with_the_bigrams(
    finished_run: Path, tiny_target: Target, kind: str, start: str, size: int | None
) -> None:
    """Of the documents that are trained on; heads that are no product of two factors begin at 0."""
    capture = Artifact.open(finished_run / "capture")
    store = FeatureStore(capture)
    settings = DrafterSettings(
        num_hidden_layers=1, markov_head_type=kind, markov_rank=8, draft_vocab_size=size
    )
    train = TrainConfig(validation=0.3, markov_from=start)
    config = Config(drafter=settings, train=train)
    drafter, _ = new_drafter(config, tiny_target, store, capture.facts)
    first, second = (getattr(drafter.markov_head, f"markov_w{i}").weight for i in (1, 2))
    if start == "zero" or kind == "rnn":
        assert not second.any()
        assert first.std() > 0.01
        return
    documents, held = split_validation(store.identities, 0.3)
    expected = bigram_factors(store, documents, tiny_target.vocab_size, 8)
    assert held
    assert torch.equal(first, expected[0])
    assert torch.equal(second, expected[1] if size is None else expected[1][drafter.draft_ids])
    assert second.any()
