"""From a checkpoint to a decoder, and what is refused on the way."""

import pytest

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.target.cpu import fast_dtype
from tests.random_drafter import make_drafter

PROMPT = [1, 4, 2]


@pytest.fixture
def target(random_target):
    return random_target(vocab_size=5, seed=5)


@pytest.fixture
def checkpoint(target, save_target, tmp_path):
    """A drafter checkpoint which records where its target is."""
    drafter = make_drafter(target)
    drafter.config.target = {"name": str(save_target(target))}
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def test_a_checkpoint_names_its_target(checkpoint, target):
    decoder = SpeculativeDecoder.from_pretrained(checkpoint, dtype="float32")
    in_memory = SpeculativeDecoder.with_drafter(target, make_drafter(target))
    for settings in ({}, {"temperature": 1.0, "seed": 2}):
        expected = in_memory.generate(PROMPT, 12, **settings)
        result = decoder.generate(PROMPT, 12, **settings)
        assert result.tokens == expected.tokens
        assert result.stats.histogram == expected.stats.histogram


@pytest.mark.parametrize("proposer", ["drafter", "drafter-no-heads", "lookup", "plain"])
def test_every_proposer_by_name(checkpoint, target, proposer):
    decoder = SpeculativeDecoder.from_pretrained(checkpoint, target, proposer=proposer)
    plain = SpeculativeDecoder.from_pretrained(target=target, proposer="plain")
    assert decoder.target is target
    assert decoder.generate(PROMPT, 12).tokens == plain.generate(PROMPT, 12).tokens


def test_the_drafter_takes_the_dtype_of_its_target(checkpoint):
    decoder = SpeculativeDecoder.from_pretrained(checkpoint)
    assert decoder.target.dtype == decoder.proposer.drafter.dtype
    assert decoder.target.dtype == fast_dtype(decoder.target.device)


def test_a_drafter_of_another_target_is_refused_with_both_sides(checkpoint, random_target):
    other = random_target(vocab_size=6, num_layers=4)
    with pytest.raises(ValueError, match=r"vocabulary rows 5 != 6, number of target layers 3 != 4"):
        SpeculativeDecoder.from_pretrained(checkpoint, other)
    with pytest.raises(ValueError, match="target random"):
        SpeculativeDecoder.with_drafter(random_target(hidden_size=8), make_drafter(other))


def test_what_is_missing_is_named(target, tmp_path):
    with pytest.raises(ValueError, match="proposer='medusa', expected one of"):
        SpeculativeDecoder.from_pretrained(target=target, proposer="medusa")
    with pytest.raises(ValueError, match="needs a checkpoint"):
        SpeculativeDecoder.from_pretrained(target=target)
    make_drafter(target).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="does not name its target"):
        SpeculativeDecoder.from_pretrained(tmp_path)
