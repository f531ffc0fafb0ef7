"""How the numbers of a store are written: as they are, or in eight bits with scales.

In eight bits every row (token) has one float32 scale for each tapped layer: `values ≈ stored ·
scale`, with the scale such that the row's largest magnitude in that layer meets the largest number
of the format. Layers differ in size by orders of magnitude and a few positions carry huge values
(attention sinks), so neither may set the scale of the others.
"""

from collections.abc import Iterator

import torch

STORED = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SCALE_BYTES = 4
TOKEN_BYTES = 5  # input_ids int32, loss_mask uint8


def is_scaled(dtype: str) -> bool:
    """Whether `dtype` is stored with scales."""
    return STORED[dtype] in LARGEST


def encode(
    values: torch.Tensor, dtype: str, groups: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Numbers `[T, G·D]` as they are stored.

    Args:
        values: floating point, finite.
        dtype: one of `STORED`.
        groups: G, equal parts of a row with a scale each (the tapped layers).

    Returns:
        `[T, G·D]` in the stored dtype, and the scales float32 `[T, G]` or None.
    """
    kind = STORED[dtype]
    if kind not in LARGEST:
        return values.to(kind), None
    parts = values.float().unflatten(-1, (groups, -1))
    largest = parts.abs().amax(-1)
    # a row of zeros keeps a scale of 1; the smallest normal number keeps 1/scale finite
    scales = torch.where(largest > 0, largest / LARGEST[kind], 1.0).clamp(min=1e-37)
    scaled = parts / scales[..., None]
    if kind is torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-LARGEST[kind], LARGEST[kind]).to(kind).flatten(-2), scales


def decode(stored: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    """What `encode` wrote: itself where there are no scales, else bfloat16 `[T, G·D]`."""
    if scales is None:
        return stored
    parts = stored.float().unflatten(-1, (scales.shape[-1], -1))
    return (parts * scales[..., None]).flatten(-2).bfloat16()


def row_bytes(dtype: str, width: int, groups: int) -> int:
    """Bytes of one row of `width` numbers in `groups` groups, scales included."""
    return STORED[dtype].itemsize * width + (SCALE_BYTES * groups if is_scaled(dtype) else 0)


def token_bytes(dtype: str, hidden_size: int, taps: int, supervised: float) -> float:
    """Bytes per token of a store, without headers.

    Args:
        dtype: one of `STORED`.
        hidden_size, taps: D and M.
        supervised: share of the tokens that a last hidden state is stored for.
    """
    hidden = row_bytes(dtype, hidden_size, 1)
    return TOKEN_BYTES + row_bytes(dtype, hidden_size * taps, taps) + supervised * hidden


def tensors_of(
    dtype: str, name: str, rows: int, width: int, groups: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Empty tensors that hold `rows` encoded rows: `name`, and `name_scales` where there are."""
    yield name, torch.empty(rows, width, dtype=STORED[dtype])
    if is_scaled(dtype):
        yield f"{name}_scales", torch.empty(rows, groups)
