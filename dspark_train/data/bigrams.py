"""What follows what in the responses, as the two thin factors of a Markov head.

`B[a, b] = log(1 + n(a, b) / p(b))` is, up to a constant in each row a, the log-odds of token b
after token a against b anywhere, smoothed by one token drawn from p (n counts pairs, p is the share
of b). Its best approximation of rank R, rows weighted by their use, is a truncated SVD.
"""

from collections.abc import Sequence

import torch

from dspark_train.data.datamodule import Features
from dspark_train.data.spread import spread

# more documents than that change nothing that rank R can hold
DOCUMENTS = 20_000
# the backbone guesses what follows, too: a head of half the log-odds leaves it something to do
SHARE = 0.5
EXTRA, ITERATIONS = 32, 6
# documents that are counted at once
TOGETHER = 500


def bigram_factors(
    store: Features, documents: Sequence[int], vocabulary: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factors `W1` and `W2` `[V, R]` of half the log-odds of bigrams: `B[a] / 2 ≈ W2 W1[a]`.

    Args:
        store: the captured rollouts; pairs that end in a supervised token are counted.
        documents: numbers of those that count, at most `DOCUMENTS` of them, evenly spread.
        vocabulary: V.
        rank: R; where it is more than there are pairs to tell apart, the rest is zero.
    """
    taken = spread(documents, DOCUMENTS)
    pairs, counts, new = torch.zeros(0, dtype=torch.int64), torch.zeros(0), []
    for i, number in enumerate(taken, start=1):
        input_ids, mask = store.tokens(number)
        ids, at = input_ids.long(), mask.bool().nonzero()[:, 0]
        at = at[at > 0]
        new.append(ids[at - 1] * vocabulary + ids[at])
        if i % TOGETHER == 0 or i == len(taken):
            pairs, places = torch.cat((pairs, *new)).unique(return_inverse=True)
            weights = torch.cat((counts, torch.ones(len(places) - len(counts))))
            counts = torch.zeros(len(pairs)).index_add_(0, places, weights)
            new.clear()
    before, after = pairs // vocabulary, pairs % vocabulary
    uses = torch.zeros(vocabulary).index_add_(0, before, counts)
    shares = torch.zeros(vocabulary).index_add_(0, after, counts) / counts.sum()
    weighted = torch.log1p(counts / shares[after]) * uses[before].sqrt()
    matrix = torch.sparse_coo_tensor(
        torch.stack((before, after)), weighted, (vocabulary, vocabulary), check_invariants=False
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        wanted = min(rank + EXTRA, vocabulary)
        left, sizes, right = torch.svd_lowrank(matrix.coalesce(), q=wanted, niter=ITERATIONS)
    left, right = left[:, :rank] * sizes[:rank].sqrt(), right[:, :rank] * sizes[:rank].sqrt()
    first = torch.where(uses > 0, uses, torch.inf).rsqrt()[:, None] * left
    return tuple(torch.nn.functional.pad(x, (0, rank - x.shape[1])) for x in (first, SHARE * right))
