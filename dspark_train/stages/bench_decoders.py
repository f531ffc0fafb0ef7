"""What the bench decodes with, by name: ours with each proposer, and transformers' modes.

    plain, lookup[:N], causal[:N], dflash, dspark, tree[:N]   ours
    transformers, transformers_compiled, transformers_lookup[:N],
    transformers_assistant[:N], transformers_dflash           `generate` of transformers

N is how many tokens are guessed ahead, of a tree how many nodes it has. transformers decodes on its
weights as it loads them; with `bench.transformers_packed` every mode comes a second time on weights
packed as ours are.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import CompileConfig

from dspark_train.config import Config
from dspark_train.decoding import SpeculativeDecoder, TreeShape
from dspark_train.decoding.loading import load_proposer
from dspark_train.decoding.proposers import CausalProposer, LookupProposer, Proposer
from dspark_train.decoding.sampling import usable_vocabulary
from dspark_train.decoding.stats import DecodingStats
from dspark_train.formats.assistant import DFlashAssistant
from dspark_train.stages.targets import load_target
from dspark_train.target import Target
from dspark_train.target.cpu import pack_linears, weight_bytes

# new tokens and statistics of every prompt of a batch
Answers = list[tuple[list[int], DecodingStats]]


@dataclass(frozen=True)
class Decoder:
    """One contestant.

    Attributes:
        name: of its rows.
        decode: from (prompts, temperature, one seed a prompt) to their answers.
        batches: it takes several prompts at a time.
        memory: bytes of its drafter and of caches per position, once it has decoded.
        ours: our decoder behind it, None for transformers.
    """

    name: str
    decode: Callable[[list[list[int]], float, list[int]], Answers]
    batches: bool = True
    memory: Callable[[], dict[str, int]] = dict
    ours: SpeculativeDecoder | None = None


def make_decoders(config: Config, target: Target, checkpoint: str) -> list[Decoder]:
    """The contestants of `bench.decoders`, in that order.

    Raises:
        ValueError: a checkpoint or an assistant that does not fit the target, or a drafter that
            transformers cannot decode with.
    """
    b = config.bench
    ours_named = [name for name in b.decoders if not name.startswith("transformers")]
    decoders = []
    for name in ours_named:
        proposer = make_proposer(config, target, checkpoint, *split_name(name))
        if proposer is not None:
            decoders.append(ours(name, target, proposer, b.max_new_tokens))
    theirs = [name for name in b.decoders if name not in ours_named]
    if theirs:
        stock = load_target(config, stock=True)
        decoders += transformers_modes(config, stock, checkpoint, theirs)
    if theirs and b.transformers_packed:
        packed = load_target(config, stock=True)
        packed.pack()
        pack_linears(packed.model)  # its own LM head, too
        modes = transformers_modes(config, packed, checkpoint, theirs, " packed")
        decoders += modes
    return decoders


def split_name(name: str) -> tuple[str, int | None]:
    """`lookup:4` to ("lookup", 4); without a number None."""
    kind, _, number = name.partition(":")
    return kind, int(number) if number else None


def make_proposer(
    config: Config, target: Target, checkpoint: str, kind: str, count: int | None
) -> Proposer | None:
    """What guesses ahead; None for heads that the drafter does not have."""
    if kind == "lookup":
        return LookupProposer(count or 8)
    if kind == "causal":
        vocabulary = usable_vocabulary(target.tokenizer, target.vocab_size)
        return CausalProposer(assistant(config, target), vocabulary, count or 5)
    if kind == "dflash":
        if config.bench.dflash is not None:
            return load_proposer("drafter", config.bench.dflash, target)
        return load_proposer("drafter-no-heads", checkpoint, target)
    if kind == "tree":
        return load_proposer("drafter", checkpoint, target, TreeShape(count or 16))
    if kind == "dspark":
        proposer = load_proposer("drafter", checkpoint, target)
        # without heads it would be the row dflash again
        return None if proposer.markov is None else proposer
    return load_proposer("plain", None, target)


def assistant(config: Config, target: Target, *, pack: bool = True) -> Target:
    """The smaller causal model that `bench.assistant` names.

    Raises:
        ValueError: its tokens have other ids than the target's.
    """
    loaded = Target.load(
        config.bench.assistant,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(target.device),
        pack=pack and target.packed,
    )
    ours, theirs = ordinary_tokens(target), ordinary_tokens(loaded)
    if None not in (ours, theirs) and ours != theirs:
        raise ValueError(
            f"bench.assistant={config.bench.assistant} has another vocabulary than target "
            f"{target.name} ({len(theirs)} and {len(ours)} tokens): give a model with the same "
            "tokenizer"
        )
    return loaded


def ordinary_tokens(model: Target) -> dict[str, int] | None:
    """Tokens and their ids, without special ones, which may differ in a family of models."""
    if model.tokenizer is None:
        return None
    added = model.tokenizer.get_added_vocab()
    vocabulary = model.tokenizer.get_vocab().items()
    return {token: number for token, number in vocabulary if token not in added}


def ours(name: str, target: Target, proposer: Proposer, max_new_tokens: int) -> Decoder:
    """Our decoder: `generate` for one prompt, `run` for several."""
    decoder = SpeculativeDecoder(target, proposer)

    def decode(prompts: list[list[int]], temperature: float, seeds: list[int]) -> Answers:
        sampler = {"temperature": temperature}
        if len(prompts) == 1:
            (prompt,), (seed,) = prompts, seeds
            results = [decoder.generate(prompt, max_new_tokens, seed=seed, **sampler)]
        else:
            requests = [
                decoder.request(prompt, max_new_tokens, seed=seed, **sampler)
                for prompt, seed in zip(prompts, seeds, strict=True)
            ]
            results = decoder.run(requests, rows=len(requests))
        return [(result.tokens, result.stats) for result in results]

    def memory() -> dict[str, int]:
        decoder.generate([0], 1)  # batches have caches of their own, which are gone by now
        model = getattr(proposer, "drafter", None) or getattr(proposer, "model", None)
        weights = 0 if model is None else weight_bytes(getattr(model, "model", model))
        caches = {"target": decoder.engine.cache, "drafter": getattr(proposer, "cache", None)}
        return {"drafter_bytes": weights} | {
            f"{whose}_cache_bytes_per_token": 0
            if cache is None
            else cache.nbytes // (cache.capacity * cache.num_rows)
            for whose, cache in caches.items()
        }

    return Decoder(name, decode, memory=memory, ours=decoder)


def transformers_modes(
    config: Config, target: Target, checkpoint: str, names: list[str], suffix: str = ""
) -> Iterator[Decoder]:
    """`generate` of transformers on `target`, in each of its modes that is named."""
    tokens = config.bench.max_new_tokens
    for name in names:
        kind, count = split_name(name)
        mode: dict[str, Any] = {}
        if kind == "transformers_compiled":
            mode = {"cache_implementation": "static", "compile_config": compile_config()}
        elif kind == "transformers_lookup":
            mode = {"prompt_lookup_num_tokens": count or 10}
        elif kind == "transformers_assistant":
            model = assistant(config, target).model
            if count is not None:
                model.generation_config.num_assistant_tokens = count
                model.generation_config.num_assistant_tokens_schedule = "constant"
            mode = {"assistant_model": model}
        elif kind == "transformers_dflash":
            drafter = dflash_assistant(config, target, checkpoint)
            drafter.to(target.device)
            if target.packed:
                pack_linears(drafter)
            mode = {"assistant_model": drafter, "speculation_type": "dflash"}
        assisted = kind not in ("transformers", "transformers_compiled")
        yield transformers_generate(name + suffix, target, tokens, mode, assisted)


def compile_config() -> CompileConfig:
    """Compile with a static cache, on CPUs too, which transformers would not by itself."""
    config = CompileConfig(mode="default", fullgraph=False)
    config._compile_all_devices = True
    return config


def dflash_assistant(config: Config, target: Target, checkpoint: str) -> DFlashAssistant:
    """The drafter of transformers_dflash.

    Raises:
        ValueError: it has heads, for which transformers has no place.
    """
    given = config.bench.dflash or checkpoint
    try:
        return DFlashAssistant.load(given, target.dtype)
    except ValueError as error:
        raise ValueError(
            f"bench.decoders: transformers_dflash cannot take {given}; name a checkpoint of plain "
            f"DFlash in bench.dflash ({error})"
        ) from error


def transformers_generate(
    name: str, target: Target, max_new_tokens: int, mode: dict[str, Any], assisted: bool
) -> Decoder:
    """`generate` of transformers with the arguments of a mode; an assisted one takes one prompt.

    What it spends where cannot be told apart; its passes over the target are counted.
    """
    passes = [0]
    pad = target.eos_ids[0] if target.eos_ids else 0

    def count(*_: Any) -> None:
        passes[0] += 1

    def decode(prompts: list[list[int]], temperature: float, seeds: list[int]) -> Answers:
        torch.manual_seed(seeds[0])
        sampler = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=target.device)
        shown = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        passes[0] = 0
        handle = target.model.register_forward_hook(count) if assisted else None
        try:
            output = target.model.generate(
                ids,
                attention_mask=shown.to(target.device),
                max_new_tokens=max_new_tokens,
                pad_token_id=pad,
                **(sampler if temperature > 0 else {"do_sample": False}),
                **mode,
            )
        finally:
            if handle is not None:
                handle.remove()
        return [counted(row[width:].tolist()) for row in output]

    def counted(tokens: list[int]) -> tuple[list[int], DecodingStats]:
        ends = [i for i, token in enumerate(tokens) if token in target.eos_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        # plain: the first token comes from the prefill, as in our statistics; an assisted prefill
        # may give several
        steps = passes[0] if assisted else len(tokens) - 1
        committed = len(tokens) if assisted else steps
        stats = DecodingStats(requests=1, rounds=steps, tokens=len(tokens), committed=committed)
        stats.histogram = [] if assisted else [steps]
        return tokens, stats

    return Decoder(name, decode, batches=not assisted)
