"""A pass without its padding gives what the padded one gives, in the cache too."""

import pytest
import torch

from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.proposers import BlockProposer
from dspark_train.decoding.ragged import read_ragged
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.scheduler import Fixed
from dspark_train.target import Target
from dspark_train.target.packing import Packing
from tests.families import FAMILIES, make
from tests.random_drafter import make_drafter

READ = [[[1, 2, 3, 4], [4], [2, 2]], [[3], [1, 0, 2, 4, 4], [0, 1]], [[1, 1], [2], [3]]]


def test_there_and_back() -> None:
    packing = Packing([2, 1, 3], torch.device("cpu"))
    padded = torch.arange(9).view(3, 3)
    packed = packing.pack(padded)
    assert packed.tolist() == [[0, 1, 3, 6, 7, 8]]
    assert packing.unpack(packed).tolist() == [[0, 1, 1], [3, 3, 3], [6, 7, 8]]
    heads = packed[:, None, :, None].expand(1, 2, 6, 4)
    assert torch.equal(packing.unpack_heads(heads)[:, 1, :, 3], packing.unpack(packed))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_pass_is_the_padded_one(family) -> None:
    def outputs(packs: bool):
        target, seen = Target.wrap(make(family, 5)), []
        if packs:
            target.pack_rows()
            padded = target.recurrent or family in ("gemma2", "gpt_oss")
            assert target.packs_rows == (not padded)
        cache, found = KVCache.of(target, 3), []
        target._decoder.register_forward_pre_hook(
            lambda *given: seen.append(given[2]["input_ids"].numel()), with_kwargs=True
        )
        for read in READ:
            output = read_ragged(target, cache, read, (0, 2))
            width, counts = output.last_hidden.shape[1], [len(tokens) for tokens in read]
            lengths = zip(cache.active_lengths, counts, strict=True)
            cache.truncate([length - width + count for length, count in lengths])
            for row, count in enumerate(counts):
                found += [output.last_hidden[row, :count], output.features[row, :count]]
        for layer in cache.layers:
            for row, length in enumerate(cache.lengths):
                found += layer.held(row, length)
        return found, seen, target.packs_rows

    (padded, computed, _), (packed, fewer, packs) = outputs(False), outputs(True)
    for one, other in zip(padded, packed, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    # the first pass reads into empty rows, which most families do without a mask
    assert fewer[1:] == ([8, 4] if packs else [15, 6]) == (fewer if packs else computed)[1:]


class Uneven(Fixed):
    """Every request another length, another one in every round."""

    turn = 0

    def limits(self, requests) -> list[int]:
        self.turn += 1
        return [(self.turn + 2 * i) % 5 for i in range(len(requests))]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_requests_get_the_same_tokens(random_target, temperature) -> None:
    outputs = []
    for packs in (False, True):
        target = random_target()
        if packs:
            target.pack_rows()
        proposer = BlockProposer(make_drafter(target, 4), target.head)
        engine = Engine(target, proposer, rows=4, scheduler=Uneven())
        batch = [Request([1, 2], SamplingSettings(temperature, seed=i), 20 + i) for i in range(4)]
        engine.add(batch)
        while engine.requests:
            engine.step()
            engine.take_finished()
        outputs.append([request.new_tokens for request in batch])
    assert outputs[0] == outputs[1]
    assert len({tuple(tokens[:20]) for tokens in outputs[0]}) == (4 if temperature else 1)
