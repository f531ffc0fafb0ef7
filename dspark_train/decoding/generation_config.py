"""transformers' `GenerationConfig` as arguments of our own `generate`."""

from typing import Any

from transformers import GenerationConfig, NoRepeatNGramLogitsProcessor

# what does not change which tokens come, or is somebody else's business
_IGNORED = {
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "decoder_start_token_id",
    "output_attentions",
    "output_hidden_states",
    "output_scores",
    "output_logits",
    "return_dict_in_generate",
    "transformers_version",
    "length_penalty",  # of beams
    "early_stopping",  # of beams
    "remove_invalid_values",
    "renormalize_logits",
    "disable_compile",
    "is_assistant",
    "num_assistant_tokens",
    "num_assistant_tokens_schedule",
    "assistant_confidence_threshold",
    "assistant_lookbehind",
    "target_lookbehind",
    "max_matching_ngram_size",
}
_READ = {
    "max_new_tokens",
    "min_new_tokens",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "suppress_tokens",
    "begin_suppress_tokens",
    "sequence_bias",
    "eos_token_id",
    "stop_strings",
}
# values that mean: off
_OFF: dict[str, Any] = {
    "num_beams": 1,
    "num_return_sequences": 1,
    "min_length": 0,
    "encoder_repetition_penalty": 1.0,
    "encoder_no_repeat_ngram_size": 0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "diversity_penalty": 0.0,
    "num_beam_groups": 1,
    "guidance_scale": 1.0,
}
_DEFAULT_TOP_K = 50  # of transformers, where a config leaves it open


def from_generation_config(config: GenerationConfig) -> dict[str, Any]:
    """Keyword arguments for `generate`, `stream` and `request` that mean the same.

    Raises:
        ValueError: naming every field that is set and that we do not support.
    """
    given = {
        key: value
        for key, value in config.to_dict().items()
        if value is not None and not key.startswith("_") and key not in _IGNORED
    }
    unsupported = {
        key: value
        for key, value in given.items()
        if key not in _READ and value is not False and _OFF.get(key) != value
    }
    if unsupported:
        raise ValueError(
            f"generation config: {unsupported} not supported; leave it out, or give a logits "
            "processor that does the same (processors=)"
        )
    found: dict[str, Any] = {"temperature": 0.0}
    if given.get("do_sample"):
        names = ("temperature", "top_p", "min_p", "typical_p")
        found = {"temperature": 1.0, "top_k": given.get("top_k", _DEFAULT_TOP_K)}
        found |= {name: given[name] for name in names if name in given}
    renamed = {
        "max_new_tokens": "max_new_tokens",
        "min_new_tokens": "min_tokens",
        "repetition_penalty": "repetition_penalty",
        "bad_words_ids": "bad_words",
        "begin_suppress_tokens": "suppress_at_begin",
        "stop_strings": "stop",
    }
    found |= {ours: given[theirs] for theirs, ours in renamed.items() if theirs in given}
    if "eos_token_id" in given:
        eos = given["eos_token_id"]
        found["eos_ids"] = [eos] if isinstance(eos, int) else list(eos)
    bias = _single_biases(given.get("sequence_bias") or {})
    bias |= dict.fromkeys(given.get("suppress_tokens") or (), float("-inf"))
    if bias:
        found["logit_bias"] = bias
    if given.get("no_repeat_ngram_size"):
        found["processors"] = [NoRepeatNGramLogitsProcessor(given["no_repeat_ngram_size"])]
    return found


def _single_biases(sequence_bias: Any) -> dict[int, float]:
    pairs = sequence_bias.items() if isinstance(sequence_bias, dict) else sequence_bias
    found = {}
    for sequence, bias in pairs:
        if len(sequence) != 1:
            raise ValueError(
                f"generation config: sequence_bias for {tuple(sequence)} not supported, only for "
                "single tokens; give SequenceBiasLogitsProcessor in processors="
            )
        found[int(sequence[0])] = float(bias)
    return found
