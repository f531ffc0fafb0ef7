"""Text as it comes: whole characters, nothing that may still become a stop string."""

import random

import pytest
from tokenizers import ByteLevelBPETokenizer, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark_train.decoding.text import TextStream

TEXT = "Naïve café, 你好世界 🤖👩‍🚀 done.\n\nEnd of it all"


@pytest.fixture(scope="module")
def by_bytes() -> PreTrainedTokenizerFast:
    """Byte-level: most characters outside ASCII take several tokens."""
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(["end of it all, done"], vocab_size=280)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer._tokenizer, eos_token="<eos>")


@pytest.fixture(scope="module")
def by_words() -> PreTrainedTokenizerFast:
    """Joins words by a space when it decodes, none before the first."""
    words = {w: i for i, w in enumerate(["▁end", "▁of", "▁all", "ow", "s", "<s>"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>")


def pieces_of(
    tokenizer, ids: list[int], stop: tuple[str, ...] = ()
) -> tuple[list[str], TextStream]:
    stream, pieces = TextStream(tokenizer, stop), []
    for token in ids:
        stopped = stream.push(token)
        pieces.append(stream.take())
        if stopped:
            break
    return [*pieces, stream.finish()], stream


def test_pieces_are_whole_characters_and_sum_to_the_text(by_bytes):
    ids = by_bytes(TEXT)["input_ids"]
    assert len(ids) > len(TEXT)
    pieces, stream = pieces_of(by_bytes, ids)
    assert "".join(pieces) == stream.text == TEXT
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert pieces[0] == "N"


def test_random_ids_sum_to_what_decoding_at_once_gives(by_bytes, by_words):
    """Half characters at the end come out too, as replacement characters."""
    rng = random.Random(0)
    for tokenizer in (by_bytes, by_words):
        for _ in range(100):
            ids = [rng.randrange(len(tokenizer)) for _ in range(rng.randrange(1, 12))]
            pieces, stream = pieces_of(tokenizer, ids)
            expected = tokenizer.decode(ids, skip_special_tokens=True)
            assert "".join(pieces) == stream.text == expected


def test_spaces_between_words_survive_special_tokens(by_words):
    pieces, _ = pieces_of(by_words, [0, 1, 2, 3, 4, 5, 0])
    assert "".join(pieces) == "end of allows end"


@pytest.mark.parametrize("stop", ["世界", "done", "\n\n", "N", "🤖", "it all"])
def test_the_text_ends_before_a_stop_string(by_bytes, stop):
    pieces, stream = pieces_of(by_bytes, by_bytes(TEXT)["input_ids"], (stop, "never"))
    assert "".join(pieces) == stream.text == TEXT[: TEXT.index(stop)]
    assert stream.stopped


def test_the_earliest_of_several_stop_strings_counts(by_bytes):
    _, stream = pieces_of(by_bytes, by_bytes("abcdef")["input_ids"], ("cd", "bc"))
    assert stream.text == "a"


def test_what_may_become_a_stop_string_is_held_back(by_bytes):
    pieces, stream = pieces_of(by_bytes, by_bytes("xEND yEN")["input_ids"], ("END!",))
    assert pieces[:2] == ["x", ""]
    assert "".join(pieces) == stream.text == "xEND yEN"
    assert not stream.stopped


def test_the_window_that_is_decoded_stays_short(by_bytes):
    stream, longest = TextStream(by_bytes), 0
    decode = by_bytes.decode

    class Counting:
        def decode(self, ids, **options):
            nonlocal longest
            longest = max(longest, len(ids))
            return decode(ids, **options)

    stream.tokenizer = Counting()
    for token in by_bytes(TEXT * 20)["input_ids"]:
        stream.push(token)
    assert longest < 16
