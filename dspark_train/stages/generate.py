"""One answer on the terminal: text as it comes, then the statistics."""

from dataclasses import asdict
from typing import Any

from dspark_train.config import Config
from dspark_train.decoding import TreeShape
from dspark_train.stages.decoders import open_decoder


def settings(config: Config) -> dict[str, Any]:
    """The groups of the configuration that are read here."""
    return {name: asdict(getattr(config, name)) for name in ("target", "prompts", "generate")}


def run(config: Config) -> None:
    """Stream the answer to `prompt` with the checkpoint of this run, or with `checkpoint`.

    Raises:
        ValueError: no prompt, or no checkpoint where the proposer needs one.
    """
    g = config.generate
    if not config.prompt:
        raise ValueError('prompt is empty: give one, e.g. prompt="Why is the sky blue?"')
    tree = TreeShape(g.tree_nodes, g.tree_branches) if g.tree_nodes else None
    decoder = open_decoder(config, g.proposer, g.target, tree)
    template = getattr(decoder.target.tokenizer, "chat_template", None)
    messages = [{"role": "user", "content": config.prompt}]
    target = decoder.target
    prompt = config.prompt
    if template:
        prompt = target.encode_chat(messages, **config.prompts.template)
    stream = decoder.stream(
        prompt,
        g.max_new_tokens,
        temperature=g.temperature,
        top_k=g.top_k,
        top_p=g.top_p,
        seed=g.seed,
        stop=g.stop,
        verdict=g.verdict,
    )
    for piece in stream:
        print(piece, end="", flush=True)
    stats, total = stream.result.stats, stream.result.prompt_tokens + stream.result.stats.tokens
    if stream.result.finish_reason == "length":
        full = total >= target.max_positions
        end = f"the context of {target.name} ends at {target.max_positions:,} tokens"
        asked = f"generate.max_new_tokens={g.max_new_tokens}"
        print(f"\n\n[cut: {end if full else asked}]", end="")
    print(
        f"\n\n{stats.tokens} tokens at {stats.tokens_per_second:.1f} tokens/s, τ {stats.tau:.2f}, "
        f"accepted per slot {[round(a, 2) for a in stats.acceptance_per_slot]}"
    )
