"""One filter for both sides, keyed numbers, and a draw that never leaves the support."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dspark_train.decoding.sampling import (
    SamplingSettings,
    draw,
    draw_rows,
    most_likely,
    usable_vocabulary,
    warp,
)

SETTINGS = [
    SamplingSettings(1.0),
    SamplingSettings(0.7),
    SamplingSettings(1.3, top_k=5),
    SamplingSettings(0.7, top_p=0.8),
    SamplingSettings(1.0, top_p=0.999),
    SamplingSettings(0.9, min_p=0.1),
    SamplingSettings(0.7, top_k=20, top_p=0.9, min_p=0.02),
    # fault kind 9: nothing may mask everything
    SamplingSettings(1.0, top_k=1, top_p=0.8),
    SamplingSettings(1.0, top_k=1000000, top_p=0.01),
]
LAST = math.nextafter(1.0, 0.0)


def by_transformers(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(settings.temperature))])
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        warpers.append(MinPLogitsWarper(settings.min_p))
    return warpers(None, logits.float()).softmax(-1)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("vocabulary", [7, 300, 5000])
def test_warp_equals_transformers(settings, vocabulary):
    logits = 4 * torch.randn(16, vocabulary, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(warp(logits, settings), by_transformers(logits, settings))


@pytest.mark.parametrize("settings", SETTINGS)
def test_ties_keep_as_many_tokens_as_in_transformers(settings):
    """bf16 logits hold many ties (fault kinds 9, 10). Which of them stay, its sort leaves open."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(0, 4, (64, 40), generator=generator).to(torch.bfloat16)
    # off the exact fractions that tied tokens sum up to, where rounding decides
    settings = replace(settings, top_p=min(1.0, settings.top_p * 1.003))
    ours, theirs = warp(logits, settings), by_transformers(logits, settings)
    torch.testing.assert_close(ours.sort(-1).values, theirs.sort(-1).values)


def test_of_equal_logits_at_the_border_the_lower_ids_stay():
    logits = torch.tensor([[0.0, 1.0, 0.0, 0.0, 0.0]])
    kept = warp(logits, SamplingSettings(1.0, top_p=0.5)) > 0
    assert kept.tolist() == [[True, True, False, False, False]]


def test_a_flat_distribution_needs_more_than_the_head_of_the_ranking():
    logits = torch.stack((torch.zeros(10_000), torch.linspace(0, 0.1, 10_000)))
    settings = SamplingSettings(1.0, top_p=0.9)
    ours, theirs = warp(logits, settings), by_transformers(logits, settings)
    assert (ours[0] > 0).sum() == pytest.approx(9000, abs=2)
    assert (ours[1] > 0).sum() == pytest.approx((theirs[1] > 0).sum(), abs=2)


def test_warp_takes_any_leading_shape_and_greedy_is_one_hot():
    logits = torch.randn(2, 3, 11)
    assert warp(logits, SamplingSettings(1.0, top_p=0.5)).shape == logits.shape
    greedy = warp(logits, SamplingSettings(0.0, top_k=3))
    assert torch.equal(greedy.argmax(-1), logits.argmax(-1))
    assert torch.equal(greedy.sum(-1), torch.ones(2, 3))
    assert (greedy == 1).sum() == 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_largest_logits_the_lowest_id_is_taken(dtype):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randint(0, 5, (40, 1000), generator=generator).to(dtype)
    assert torch.equal(most_likely(logits), (logits == 4).int().argmax(-1))


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": 1e-40},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": 2.0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingSettings(**wrong)


@pytest.mark.parametrize("size", [3, 256, 257, 1000])
def test_draw_never_leaves_the_support(size):
    """At u = 0 and just below 1 too (fault kind 6)."""
    generator = torch.Generator().manual_seed(size)
    for trial in range(50):
        probs = torch.rand(size, generator=generator)
        probs[torch.rand(size, generator=generator) < 0.7] = 0
        probs[trial % size] = 1e-12
        for u in (0.0, 5e-324, 0.3, 0.999999, LAST):
            assert probs[draw(probs, u)] > 0
    single = torch.zeros(size)
    single[size // 2] = 1e-30
    assert {draw(single, u) for u in (0.0, 0.5, LAST)} == {size // 2}


def test_draw_inverts_the_cumulative_distribution():
    probs = torch.tensor([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    borders = {0.0: 1, 0.2499: 1, 0.25: 3, 0.7499: 3, 0.75: 4, LAST: 4}
    assert {u: draw(probs, u) for u in borders} == borders
    probs = torch.rand(4, 1000, generator=torch.Generator().manual_seed(0))
    for u in np.linspace(0, 0.999, 37):
        exact = (probs.double().cumsum(-1) / probs.double().sum(-1, keepdim=True) <= u).sum(-1)
        assert torch.equal(draw_rows(probs, torch.full((4,), u, dtype=torch.float64)), exact)


@pytest.mark.parametrize(
    "wrong", [{"seed": "x"}, {"seed": 1.5}, {"temperature": "hot"}, {"top_p": None}, {"top_k": "5"}]
)
def test_settings_of_another_type_are_refused_by_name(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=f"{name}={value!r}, expected a"):
        SamplingSettings(**wrong)


@pytest.mark.parametrize("bad", [0.0, float("nan"), float("inf")])
def test_draw_refuses_rows_without_a_distribution(bad):
    with pytest.raises(ValueError, match="cannot draw"):
        draw(torch.full((5,), bad), 0.5)


def test_usable_vocabulary_stops_at_the_tokenizer(tiny_target):
    tokens = len(tiny_target.tokenizer)
    assert usable_vocabulary(tiny_target.tokenizer, 128) == tokens < 128
    assert usable_vocabulary(tiny_target.tokenizer, 10) == 10
    assert usable_vocabulary(None, 128) == 128
