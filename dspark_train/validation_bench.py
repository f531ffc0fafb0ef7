"""What can be known of a bench's settings before it runs."""

from collections.abc import Iterator
from typing import Any

from dspark_train.config_decoding import BenchConfig
from dspark_train.decoding.proposers.tree import MOST_NODES

# those of stages/bench_decoders.py; the guesses of some are counted, as in lookup:4
DECODERS = ("plain", "lookup", "causal", "dflash", "dspark", "tree", "transformers")
DECODERS += ("transformers_compiled", "transformers_lookup", "transformers_assistant")
DECODERS += ("transformers_dflash",)
COUNTED = ("lookup", "causal", "tree", "transformers_lookup", "transformers_assistant")


def bench_checks(b: BenchConfig) -> Iterator[tuple[bool, str, Any, str]]:
    """Whether each is right, the key, its value, what is expected."""
    temperatures = bool(b.temperatures) and min(b.temperatures) >= 0
    temperatures = temperatures and len(set(b.temperatures)) == len(b.temperatures)
    expected = "at least one, none below 0, each once"
    yield temperatures, "bench.temperatures", b.temperatures, expected
    sizes = bool(b.batches) and min(b.batches) > 0 and len(set(b.batches)) == len(b.batches)
    yield sizes, "bench.batches", b.batches, "at least one, all positive, each once"
    yield b.threads is None or b.threads > 0, "bench.threads", b.threads, "positive, or null"
    split = [name.partition(":") for name in b.decoders]
    known = all(
        kind in DECODERS and (not colon or (kind in COUNTED and _counts(count)))
        for kind, colon, count in split
    )
    expected = f"plain and some of {DECODERS}, each once; {COUNTED} may count guesses (lookup:4)"
    right = known and "plain" in b.decoders and len(set(b.decoders)) == len(b.decoders)
    yield right, "bench.decoders", b.decoders, expected
    needed = {"causal", "transformers_assistant"} & {kind for kind, _, _ in split}
    expected = f"the name of a smaller model with the target's vocabulary, for {sorted(needed)}"
    yield bool(b.assistant) or not needed, "bench.assistant", b.assistant, expected
    nodes = [
        name
        for name, (kind, _, count) in zip(b.decoders, split, strict=True)
        if kind == "tree" and _counts(count) and int(count) > MOST_NODES
    ]
    expected = f"trees of at most {MOST_NODES} nodes"
    yield not nodes, "bench.decoders", nodes, expected


def _counts(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) > 0
