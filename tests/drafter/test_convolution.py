"""DFlash2's convolution: the identity at first, causal inside a block, and as defined."""

import torch

from dspark_train.drafter import DrafterConfig
from dspark_train.drafter.convolution import BlockConvolution

CONFIG = DrafterConfig(hidden_size=8, conv_kernel_size=2, conv_group_size=4)


def random_convolution() -> BlockConvolution:
    torch.manual_seed(0)
    convolution = BlockConvolution(CONFIG)
    for parameter in convolution.parameters():
        torch.nn.init.normal_(parameter)
    return convolution.requires_grad_(False)


def test_it_starts_as_the_identity() -> None:
    x = torch.randn(2, 3, 5, 8)
    assert torch.equal(BlockConvolution(CONFIG).around(torch.tanh, x), torch.tanh(x))


def test_it_is_what_the_formula_says() -> None:
    """`Σ_t (base[s, t, c] + Δ_i[s, t, ⌊c/g⌋]) x[i-t, c]`, written with loops."""
    convolution, x = random_convolution(), torch.randn(1, 1, 3, 8)
    change = convolution.kernel_projection(x[0, 0]).view(3, 2, 2, 2)

    def filtered(values: torch.Tensor, side: int) -> torch.Tensor:
        out = torch.zeros(3, 8)
        for i in range(3):
            for c in range(8):
                for t in range(min(2, i + 1)):
                    weight = convolution.base_kernel[side, t, c] + change[i, side, t, c // 4]
                    out[i, c] += weight * values[i - t, c]
        return out

    expected = filtered(torch.tanh(filtered(x[0, 0], 0)), 1)
    torch.testing.assert_close(convolution.around(torch.tanh, x)[0, 0], expected)


def test_later_slots_and_other_blocks_do_not_matter() -> None:
    convolution, x = random_convolution(), torch.randn(1, 2, 4, 8)
    changed = x.clone()
    changed[0, 0, 2:] += 1
    before, after = (convolution.around(torch.tanh, states) for states in (x, changed))
    assert torch.equal(before[0, 0, :2], after[0, 0, :2])
    assert torch.equal(before[0, 1], after[0, 1])
    assert not torch.equal(before[0, 0, 2:], after[0, 0, 2:])
