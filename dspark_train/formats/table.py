"""The checkpoint layouts of the ecosystem, in one table.

Everything that differs between formats is a column here or in `destinations.py`; readers and
writers look it up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QWEN3, GEMMA4 = "qwen3", "gemma4"


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
        family: whose layers the backbone has, QWEN3 or GEMMA4.
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
    family: str = QWEN3


INNER, AUX = "transformer_layer_config", "aux_hidden_state_layer_ids"

DSPARK = Layout("DeepSpec DSpark", "dspark", "Qwen3DSparkModel", sample_from_anchor=True)
DSPARK_GEMMA4 = Layout(
    "DeepSpec DSpark of Gemma 4",
    "dspark",
    "Gemma4DSparkModel",
    sample_from_anchor=True,
    family=GEMMA4,
)
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
PLAIN_LAYOUTS = (DSPARK, DSPARK_GEMMA4, SPECFORGE, DFLASH, DFLASH2)

# a published name -> ours; the rest of the tensors has the same names everywhere
RENAMED = {
    "candidate_selector.predecessor_codebook": "markov_head.markov_w1.weight",
    "candidate_selector.successor_codebook": "markov_head.markov_w2.weight",
    "candidate_selector.hidden_projection.weight": "markov_head.hidden_projection.weight",
}
# inherited from multimodal or partly rotated targets; a draft rotates whole heads
STRIPPED_ROPE = ("partial_rotary_factor", "mrope_section", "mrope_interleaved", "interleaved")


def without_inherited(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings as a draft has them; those of the proportional kind need their share."""
    needed = STRIPPED_ROPE[:1] if rope.get("rope_type") == "proportional" else ()
    return {key: value for key, value in rope.items() if key not in STRIPPED_ROPE or key in needed}


# the target's own, which some ship and a drafter shares
SHARED = ("embed_tokens.weight", "lm_head.weight")
