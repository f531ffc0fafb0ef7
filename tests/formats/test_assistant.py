"""transformers' own generate, assisted by our DFlash export."""

from pathlib import Path

import pytest
import torch

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.formats import write
from dspark_train.formats.assistant import DFlashAssistant
from tests.random_drafter import make_drafter

PROMPT = [1, 4, 2, 0, 3]


@pytest.fixture
def target(random_target):
    return random_target(vocab_size=11, num_layers=3, seed=3)


@pytest.mark.parametrize("block_size", [2, 4])
def test_generate_with_our_export_gives_what_our_decoder_gives(
    target, tmp_path: Path, block_size: int
) -> None:
    """Greedy, token by token; and it calls the assistant as often as ours does rounds."""
    drafter = make_drafter(target, block_size, False, None)
    write(tmp_path / "export", "transformers", drafter)
    ours = SpeculativeDecoder.from_pretrained(tmp_path / "export", target)
    expected = ours.generate(PROMPT, 30, eos_ids=())
    assistant, drafts = DFlashAssistant.load(tmp_path / "export"), []
    forward = assistant.forward

    def counted(**given: torch.Tensor):
        drafts.append(given["noise_embeds"].shape[1])
        return forward(**given)

    assistant.forward = counted
    output = target.model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        assistant_model=assistant,
        speculation_type="dflash",
        do_sample=False,
        max_new_tokens=30,
        pad_token_id=0,
    )
    assert output[0, len(PROMPT) :].tolist() == expected.tokens
    assert set(drafts) == {block_size}
    # its last round may draft one token that ours knows it could not commit
    assert abs(len(drafts) - expected.stats.rounds) <= 1
    assert expected.stats.rounds < 29


def test_only_plain_dflash_is_taken(target, tmp_path: Path) -> None:
    make_drafter(target, 4, True, "vanilla").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="transformers cannot carry a drafter of the kind dspark"):
        DFlashAssistant.load(tmp_path)
