"""Memory does not grow with the number of requests."""

import gc
from typing import Any

import pytest
import torch

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.proposers import BlockProposer
from tests.random_drafter import make_drafter


def held() -> int:
    """Bytes of all tensors that are alive."""
    gc.collect()
    found = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter)]
    dense = [x for x in found if not x.is_mkldnn]  # packed weights have no storage to ask for
    return sum(storage.nbytes() for storage in {x.untyped_storage() for x in dense})


def growth(decoder: SpeculativeDecoder) -> int:
    """Bytes that 100 requests of all kinds leave behind."""

    def one(seed: int) -> None:
        prompt = [seed % 5, 1, 4, seed % 3]
        decoder.generate(prompt, 6, temperature=float(seed % 2), seed=seed, logprobs=1)

    for seed in range(8):  # caches and buffers get their size
        one(seed)
    before = held()
    for seed in range(50):
        one(seed)
    several = [decoder.request([1, 2, seed % 5], 6, seed=seed) for seed in range(50)]
    decoder.run(several, rows=8)
    del several
    one(0)  # `run` lets the cache of one request go
    return held() - before


def test_100_requests_leave_nothing_behind(random_target) -> None:
    target = random_target()
    assert growth(SpeculativeDecoder(target, BlockProposer(make_drafter(target), target.head))) == 0


def test_a_leak_is_found(random_target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposer that keeps the features of every pass."""
    target, kept = random_target(), []
    proposer = BlockProposer(make_drafter(target), target.head)
    observe = proposer.observe

    def keep(first: int, requests: Any, features: torch.Tensor, counts: list) -> None:
        kept.append(features[:, :1].clone())
        observe(first, requests, features, counts)

    monkeypatch.setattr(proposer, "observe", keep)
    assert growth(SpeculativeDecoder(target, proposer)) > 0
