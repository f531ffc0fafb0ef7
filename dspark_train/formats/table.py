"""The checkpoint layouts of the ecosystem and what each destination can carry, in two tables.

Everything that differs between formats is a column here; readers and writers look it up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from dspark_train.drafter import DrafterConfig
from dspark_train.drafter.config import CAUSAL_BLOCKS


@dataclass(frozen=True)
class Layout:
    """How one project lays a drafter out in a config.json and safetensors.

    Attributes:
        name: for messages.
        kind: "dspark" (sequential heads, every slot may propose), "dflash" or "dflash2".
        architecture: the name it is written under; `also` are names it is read under, too.
        sample_from_anchor: its block convention; a field of that name in the file goes before it.
        sizes_in: where the backbone's sizes lie, "" for the top.
        draft_in: where the draft's own fields lie, "" for the top; the top is always read.
        taps: name of the field with the tapped layers.
        tap_offset: what is written for the output of target layer 0.
        speculators: its `speculators_model_type`.
    """

    name: str
    kind: str
    architecture: str
    also: tuple[str, ...] = ()
    sample_from_anchor: bool = False
    sizes_in: str = ""
    draft_in: str = ""
    taps: str = "target_layer_ids"
    tap_offset: int = 0
    speculators: str | None = None


INNER, AUX = "transformer_layer_config", "aux_hidden_state_layer_ids"

DSPARK = Layout("DeepSpec DSpark", "dspark", "Qwen3DSparkModel", sample_from_anchor=True)
SPECFORGE = Layout(
    "SpecForge DSpark",
    "dspark",
    "DSparkDraftModel",
    sample_from_anchor=True,
    draft_in="dflash_config",
)
DFLASH = Layout("DFlash", "dflash", "DFlashDraftModel", draft_in="dflash_config")
DFLASH2 = Layout("DFlash2", "dflash2", "DFlash2DraftModel", draft_in="dflash_config")
SPECULATORS = {
    kind: Layout(
        f"speculators {kind}",
        kind,
        architecture,
        also,
        sample_from_anchor=kind == "dspark",
        sizes_in=INNER,
        taps=AUX,
        tap_offset=1,
        speculators=kind,
    )
    for kind, architecture, also in (
        ("dspark", "DSparkDraftModel", ("DSparkSpeculator",)),
        ("dflash", "DFlashDraftModel", ("DFlashSpeculator",)),
        ("dflash2", "DFlash2DraftModel", ("DFlash2Speculator",)),
    )
}
PLAIN_LAYOUTS = (DSPARK, SPECFORGE, DFLASH, DFLASH2)

# a published name -> ours; the rest of the tensors has the same names everywhere
RENAMED = {
    "candidate_selector.predecessor_codebook": "markov_head.markov_w1.weight",
    "candidate_selector.successor_codebook": "markov_head.markov_w2.weight",
    "candidate_selector.hidden_projection.weight": "markov_head.hidden_projection.weight",
}
# inherited from multimodal or partly rotated targets; a draft rotates whole heads
STRIPPED_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "interleaved")
# the target's own, which some ship and a drafter shares
SHARED = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class Destination:
    """What a piece of software can read.

    Attributes:
        layouts: of the kinds that it reads.
        heads: sequential heads of the kind "dspark" that it runs (None: without one).
        anchor_only: whether the kind "dspark" must have every slot propose.
        ships_target: whether the target's embedding and LM head belong into the checkpoint.
        reduced: whether it reads a reduced draft vocabulary.
        confidence: whether it reads the confidence head of the kind "dspark".
        windows: from where windows of sliding layers may count (`DrafterConfig.window_from`).
        causal: in which layers blocks may be causal (`DrafterConfig.causal_blocks`).
        temperatures: whether it reads a file with the temperatures of the confidence, one a slot.
    """

    name: str
    layouts: dict[str, Layout]
    heads: tuple[str | None, ...] = ()
    anchor_only: bool = False
    ships_target: bool = False
    reduced: bool = False
    confidence: bool = True
    windows: tuple[str, ...] = ()
    causal: tuple[str, ...] = ("none",)
    temperatures: bool = False

    def carries_temperatures(self, config: DrafterConfig) -> bool:
        """Whether the calibration of a drafter's confidence arrives: one number for every slot."""
        return self.temperatures and config.enable_confidence_head and config.sample_from_anchor


_PLAIN = {"dspark": DSPARK, "dflash": DFLASH, "dflash2": DFLASH2}
_ALL = ("vanilla", "gated", "rnn")
DESTINATIONS = {
    d.name: d
    for d in (
        Destination(
            "deepspec", {"dspark": DSPARK}, (*_ALL, None), anchor_only=True, ships_target=True
        ),
        Destination(
            "vllm", _PLAIN, ("vanilla",), reduced=True, windows=("slot",), causal=CAUSAL_BLOCKS
        ),
        Destination("sglang", _PLAIN, _ALL, windows=("slot",), temperatures=True),
        Destination(
            "speculators",
            SPECULATORS,
            (*_ALL, None),
            reduced=True,
            windows=("anchor",),
            causal=("none", "sliding"),
        ),
        Destination("dflash", {"dflash": DFLASH, "dflash2": DFLASH2}, windows=("slot",)),
        Destination("transformers", {"dflash": DFLASH}),
    )
}
NATIVE = "native"
FORMATS = (NATIVE, *DESTINATIONS)


def kind_of(config: DrafterConfig) -> str:
    """Which of the ecosystem's kinds a drafter is.

    Raises:
        ValueError: a mixture that only our own format has.
    """
    selects, convolves = config.markov_head_type == "selector", bool(config.conv_kernel_size)
    if selects and convolves and not config.sample_from_anchor:
        return "dflash2"
    if selects or convolves:
        raise ValueError(
            f"markov_head_type={config.markov_head_type}, conv_kernel_size="
            f"{config.conv_kernel_size}, sample_from_anchor={config.sample_from_anchor} is a "
            "mixture that only the format native has: DFlash2 is the selector with convolutions "
            "and sample_from_anchor=false"
        )
    return "dspark" if config.sample_from_anchor or config.markov_head_type else "dflash"


def refuse_uncarried(name: str, config: DrafterConfig) -> Layout | None:
    """The layout for a drafter at the destination `name`; None for our own.

    Raises:
        ValueError: the destination would draft something else; the message says what to do.
    """
    if name == NATIVE:
        return None
    destination, kind = DESTINATIONS[name], kind_of(config)
    for what, instead in _uncarried(destination, kind, config):
        others = "export.formats=[" + ", ".join(carriers(config)) + "] can"
        train = f", or train with {instead}" if instead else ""
        raise ValueError(f"export format {name} cannot carry {what}; {others}{train}")
    return destination.layouts[kind]


def carriers(config: DrafterConfig) -> list[str]:
    """The formats that carry a drafter."""
    kind = kind_of(config)
    return [NATIVE, *(d.name for d in DESTINATIONS.values() if not [*_uncarried(d, kind, config)])]


def _uncarried(d: Destination, kind: str, config: DrafterConfig) -> Iterator[tuple[str, str]]:
    """What of a drafter a destination does not carry, and settings that it would."""
    if kind not in d.layouts:
        yield f"a drafter of the kind {kind}, only {sorted(d.layouts)}", ""
    elif kind == "dspark":
        head = config.markov_head_type
        if head not in d.heads:
            known = [head for head in d.heads if head]
            what = head or "no sequential head in the layout of DSpark"
            yield f"{what}, only {known}", "drafter.markov_head_type=vanilla"
        if d.anchor_only and not config.sample_from_anchor:
            yield "sample_from_anchor=false: every slot would be off by one", ""
    if config.draft_vocab_size and not d.reduced:
        what = f"a reduced draft vocabulary (draft_vocab_size={config.draft_vocab_size})"
        yield what, "drafter.draft_vocab_size=null"
    if any(config.windows) and config.window_from not in d.windows:
        what = (
            f"sliding layers (sliding_window={config.sliding_window}) whose windows count from "
            f"window_from={config.window_from}"
        )
        known = ", ".join(d.windows)
        instead = f"drafter.window_from={known}" if known else "drafter.sliding_window=null"
        yield what, instead
    if config.causal_blocks not in d.causal:
        what = f"causal blocks (causal_blocks={config.causal_blocks})"
        yield what, "drafter.causal_blocks=none"


def what_is_left_out(name: str, config: DrafterConfig) -> list[str]:
    """What does not change the drafts but is lost at a destination, and what to do about it."""
    if name == NATIVE:
        return []
    destination, notes = DESTINATIONS[name], []
    if config.enable_confidence_head and kind_of(config) != "dspark":
        notes.append(f"{name} has no confidence head for this kind of drafter: it is left out")
    elif config.confidence_temperatures and not destination.carries_temperatures(config):
        notes.append(
            f"{name} has no place for this drafter's confidence temperatures: its confidences "
            "will be uncalibrated; do not let it choose verify lengths by them, or serve with our "
            "decoder (or sglang, where every slot proposes)"
        )
    return notes
