"""Everything that determines the shape and the conventions of a drafter."""

from typing import Any

from transformers import PreTrainedConfig

from dspark_train.blocks import BlockSlots, Sight

FULL, SLIDING = "full_attention", "sliding_attention"
MARKOV_HEADS = ("vanilla", "gated", "rnn", "selector")
WINDOW_FROM = ("slot", "anchor")
CAUSAL_BLOCKS = ("none", "sliding", "all")
# what float32 holds, with room to spare
LARGEST = 1e30
# numbers per proposal, and whether they are divided by
CALIBRATION = {
    "confidence_temperatures": True,
    "unshifted_temperatures": True,
    "confidence_shifts": False,
}


class DrafterConfig(PreTrainedConfig):
    """Configuration of a drafter. DSpark and DFlash are settings of it, not classes.

    Sizes (`hidden_size` … `rope_parameters`) mean what they mean for the target, whose embedding
    and LM head the drafter shares. `target_layer_ids` are 0-based: i is the output of target layer
    i. `sample_from_anchor` chooses the block convention (`blocks/slots.py`). `markov_head_type` is
    None, "vanilla", "gated", "rnn", or DFlash2's "selector" of the `selector_top_k` best.
    `conv_kernel_size` taps of DFlash2's convolutions over groups of `conv_group_size` channels,
    None without. `draft_vocab_size` tokens can be drafted (the buffer `d2t` says which), None: all.
    `layer_types` says which layers are "sliding_attention"; without it all layers slide if there
    is a `sliding_window`, else none. Their slots see that many positions up to their own and their
    block (`window_from` "slot"), or before the anchor ("anchor", as in speculators). In layers that
    `causal_blocks` names ("none", "sliding", "all") slots do not see later slots of their block.
    Gemma's layers have `sandwich_norms` (norms after the sublayers too, and a scalar per layer), a
    `value_norm` without weights, an `attention_scale` of 1 (None: 1/sqrt(head_dim)), and values
    that are the projected keys (`keys_are_values`).
    `confidence_shifts` are added to the confidence logits of each proposal, which are then divided
    by `confidence_temperatures`; decoders that add no shifts divide by `unshifted_temperatures`.
    `target` identifies the target the drafter was trained for.

    Raises:
        ValueError: contradictory settings, all of them named in one message.
    """

    model_type = "dspark_drafter"

    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 16
    hidden_act: str = "silu"
    attention_bias: bool = False
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    vocab_size: int = 128
    tie_word_embeddings: bool = False
    is_causal: bool = False

    block_size: int = 7
    sample_from_anchor: bool = True
    mask_token_id: int = 0
    target_layer_ids: list | None = None
    num_target_layers: int | None = 4
    markov_head_type: str | None = "vanilla"
    markov_rank: int = 16
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    confidence_temperatures: list | None = None
    confidence_shifts: list | None = None
    unshifted_temperatures: list | None = None
    target: dict | None = None
    conv_kernel_size: int | None = None
    conv_group_size: int = 16
    selector_top_k: int = 16
    draft_vocab_size: int | None = None
    layer_types: list | None = None
    sliding_window: int | None = None
    window_from: str = "slot"
    causal_blocks: str = "none"
    sandwich_norms: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    attention_scale: float | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        if self.rope_parameters is None:
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10_000.0}
        if self.sliding_window is not None and self.layer_types is None:
            self.layer_types = [SLIDING] * self.num_hidden_layers
        if self.target_layer_ids is None:
            self.target_layer_ids = [1]
        super().__post_init__(**kwargs)
        if problems := self._problems():
            raise ValueError("drafter config: " + "; ".join(problems))

    @property
    def slots(self) -> BlockSlots:
        return BlockSlots(self.block_size, self.sample_from_anchor)

    @property
    def windows(self) -> list[int | None]:
        """Window per layer, None: none."""
        types = self.layer_types or [FULL] * self.num_hidden_layers
        return [self.sliding_window if kind == SLIDING else None for kind in types]

    @property
    def sights(self) -> list[Sight]:
        """What slots see, per layer."""
        causal = {"none": False, "all": True}
        return [
            Sight(
                window,
                from_anchor=window is not None and self.window_from == "anchor",
                causal=causal.get(self.causal_blocks, window is not None),
            )
            for window in self.windows
        ]

    @property
    def draft_vocabulary(self) -> int:
        """Tokens that can be drafted."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def temperatures_elsewhere(self) -> list | None:
        """Temperatures of the confidence for decoders that do not add `confidence_shifts`."""
        shifted = any(self.confidence_shifts or [])
        return self.unshifted_temperatures if shifted else self.confidence_temperatures

    def _problems(self) -> list[str]:
        problems = []
        try:
            proposals = self.slots.num_proposals
        except ValueError as error:
            return [str(error)]
        if self.markov_head_type not in (None, *MARKOV_HEADS):
            problems.append(
                f"markov_head_type={self.markov_head_type!r}, expected null or one of "
                f"{MARKOV_HEADS}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            problems.append(
                f"mask_token_id={self.mask_token_id} is outside the vocabulary of "
                f"{self.vocab_size} tokens"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            problems.append(
                f"num_attention_heads={self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.conv_kernel_size and self.sandwich_norms:
            problems.append(
                f"conv_kernel_size={self.conv_kernel_size} with sandwich_norms=True, expected one "
                "of them: where a convolution would stand among those norms is not known"
            )
        if self.attention_scale is not None and self.attention_scale <= 0:
            problems.append(f"attention_scale={self.attention_scale}, expected a positive number")
        if self.conv_kernel_size and self.hidden_size % self.conv_group_size:
            problems.append(
                f"conv_group_size={self.conv_group_size} does not divide "
                f"hidden_size={self.hidden_size}"
            )
        if self.markov_head_type == "selector" and self.selector_top_k < 1:
            problems.append(f"selector_top_k={self.selector_top_k}, expected at least 1")
        if self.draft_vocab_size is not None and not 0 < self.draft_vocab_size <= self.vocab_size:
            problems.append(
                f"draft_vocab_size={self.draft_vocab_size}, expected 1 to {self.vocab_size} or null"
            )
        problems += window_problems(
            self.layer_types,
            self.sliding_window,
            self.num_hidden_layers,
            self.block_size if self.window_from == "slot" else 1,
        )
        for key, known in (("window_from", WINDOW_FROM), ("causal_blocks", CAUSAL_BLOCKS)):
            if getattr(self, key) not in known:
                problems.append(f"{key}={getattr(self, key)!r}, expected one of {known}")
        taps = self.target_layer_ids
        layers = self.num_target_layers
        behind = layers is not None and taps[-1:] >= [layers - 1]
        if not taps or taps != sorted(set(taps)) or taps[0] < 0 or behind:
            last = "" if layers is None else f" ({layers - 1})"
            problems.append(
                f"target_layer_ids={taps} must be sorted, distinct, at least 0 and before the last "
                f"layer{last} of the target"
            )
        for key, positive in CALIBRATION.items():
            numbers = getattr(self, key)
            if numbers is not None and not _per_proposal(numbers, proposals, positive):
                problems.append(
                    f"{key}={numbers!r}, expected {proposals} {'positive ' * positive}numbers, one "
                    "per proposal"
                )
        return problems


def _per_proposal(numbers: Any, proposals: int, positive: bool) -> bool:
    """Whether these are finite numbers, one for each proposal."""
    return (
        isinstance(numbers, list | tuple)
        and len(numbers) == proposals
        and all(type(n) in (int, float) and abs(n) < LARGEST for n in numbers)
        and (not positive or min(numbers) > 0)
    )


def window_problems(
    layer_types: list[str] | None, window: int | None, num_layers: int, least: int
) -> list[str]:
    """What is wrong with a drafter's sliding layers, in words; windows have `least` positions."""
    problems, types = [], layer_types or []
    if layer_types is not None and (len(types) != num_layers or set(types) - {FULL, SLIDING}):
        problems.append(
            f"layer_types={types}, expected {FULL!r} or {SLIDING!r} for each of {num_layers} layers"
        )
    slides = SLIDING in types
    if slides != (window is not None):
        wanted = "a number where layer_types has a sliding layer, null where it has none"
        problems.append(f"sliding_window={window}, expected {wanted}")
    elif slides and window < least:
        why = f" block_size={least}: a block sees itself" if least > 1 else f" {least}"
        problems.append(f"sliding_window={window}, expected at least{why}")
    return problems
