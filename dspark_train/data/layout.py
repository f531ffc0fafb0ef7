"""Which documents share a shard, and which of them a forward pass: decided by lengths alone.

So every process, and a run that continues an interrupted one, finds the same shards.
"""

from collections.abc import Iterable, Iterator, Sequence

from dspark_train.data.encoding import TOKEN_BYTES, row_bytes


def document_bytes(tokens: int, labels: int, *, dtype: str, hidden_size: int, taps: int) -> int:
    """Bytes that a document of so many tokens and last hidden states takes in a store."""
    features = row_bytes(dtype, hidden_size * taps, taps)
    return tokens * (TOKEN_BYTES + features) + labels * row_bytes(dtype, hidden_size, 1)


def plan_shards(lengths: Sequence[int], sizes: Iterable[int], shard_bytes: int) -> list[list[int]]:
    """Document numbers of every shard, in the order in which they are stored.

    A shard takes consecutive documents until it holds `shard_bytes`; inside, they are sorted by
    length, so that neighbours share a forward pass without much padding.
    """
    shards: list[list[int]] = [[]]
    held = 0
    for number, size in enumerate(sizes):
        if held >= shard_bytes:
            shards.append([])
            held = 0
        shards[-1].append(number)
        held += size
    return [sorted(shard, key=lambda n: lengths[n]) for shard in shards if shard]


def batches(numbers: Iterable[int], lengths: Sequence[int], tokens: int) -> Iterator[list[int]]:
    """Consecutive documents, shortest first, whose padded size stays within `tokens`.

    One document at least: with `tokens=1` every document has a pass of its own.
    """
    batch: list[int] = []
    for number in numbers:
        if batch and (len(batch) + 1) * lengths[number] > tokens:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
