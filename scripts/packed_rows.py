"""What a verify pass costs with and without its padding, side by side.

    python scripts/packed_rows.py [TARGET] [--rows 4 16] [--drafts 7] [--context 128]

Without TARGET a random model of SmolLM2-135M's sizes stands in. Verify lengths are random, from
none to all drafts; printed is the median of ratios of passes timed one after the other.
"""

import argparse
import statistics
from time import perf_counter

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dspark_train.decoding.cache import KVCache
from dspark_train.decoding.ragged import read_ragged
from dspark_train.target import Target


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("--rows", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=30, help="of the random model")
    given = parser.parse_args()
    target = Target.load(given.target) if given.target else random_target(given.layers)
    if not target.packs_rows:
        raise SystemExit(f"target {target.name} does not pack rows")
    print("rows  tokens  of padded  ms padded  ms packed  packed / padded")
    for rows in given.rows:
        print(line(target, rows, given))


def random_target(layers: int) -> Target:
    """Sizes of SmolLM2-135M, random weights."""
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
    )
    target = Target.wrap(LlamaForCausalLM(config))
    target.pack_rows()
    return target


@torch.inference_mode()
def line(target: Target, rows: int, given: argparse.Namespace) -> str:
    """Times at so many rows, in words."""
    cache = KVCache(target.num_layers, rows)
    cache.reserve(given.context + given.drafts + 1)
    read_ragged(target, cache, [[1] * given.context] * rows)
    random = torch.Generator().manual_seed(0)
    times, tokens = {True: [], False: []}, []
    for repeat in range(given.repeats + 1):
        lengths = torch.randint(0, given.drafts + 1, (rows,), generator=random)
        lengths[0] = given.drafts
        read = [[1] * (1 + int(length)) for length in lengths]
        for packs in (repeat % 2 == 0, repeat % 2 == 1):
            target.packs_rows = packs
            began = perf_counter()
            read_ragged(target, cache, read)
            seconds = perf_counter() - began
            cache.truncate([given.context] * rows)
            if repeat:  # the first ones allocate
                times[packs].append(seconds)
        tokens.append(int(lengths.sum()) + rows)
    target.packs_rows = True
    padded, packed = (1000 * statistics.median(times[kind]) for kind in (False, True))
    ratio = statistics.median(a / b for a, b in zip(times[True], times[False], strict=True))
    return (
        f"{rows:4d}  {statistics.mean(tokens):6.0f}  {rows * (given.drafts + 1):9d}"
        f"  {padded:9.1f}  {packed:9.1f}  {ratio:15.2f}"
    )


if __name__ == "__main__":
    main()
