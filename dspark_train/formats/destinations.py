"""What each destination can carry, in one table, and what a drafter is in its words."""

from collections.abc import Iterator
from dataclasses import dataclass

from dspark_train.drafter import DrafterConfig
from dspark_train.drafter.config import CAUSAL_BLOCKS
from dspark_train.formats import gemma4
from dspark_train.formats.table import (
    DFLASH,
    DFLASH2,
    DSPARK,
    DSPARK_GEMMA4,
    GEMMA4,
    QWEN3,
    SPECULATORS,
    Layout,
)


@dataclass(frozen=True)
class Destination:
    """What a piece of software can read.

    Attributes:
        layouts: of the kinds that it reads.
        heads: sequential heads of the kind "dspark" that it runs (None: without one).
        gemma4: layout for the kind "dspark" with Gemma 4's layers, None: it does not read them.
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
    gemma4: Layout | None = None
    anchor_only: bool = False
    ships_target: bool = False
    reduced: bool = False
    confidence: bool = True
    windows: tuple[str, ...] = ()
    causal: tuple[str, ...] = ("none",)
    temperatures: bool = False

    def layout(self, config: DrafterConfig) -> Layout | None:
        """The layout for a drafter, None where there is none."""
        kind = kind_of(config)
        if family_of(config) == GEMMA4:
            return self.gemma4 if kind == "dspark" else None
        return self.layouts.get(kind)

    def ships(self, layout: Layout) -> bool:
        """Whether the target's embedding and LM head belong into a checkpoint of that layout."""
        return self.ships_target or layout.family == GEMMA4

    def temperatures_of(self, config: DrafterConfig) -> list | None:
        """The temperatures of a drafter's confidence that arrive, None where none do.

        There must be one for every slot, fitted without shifts of single slots.
        """
        carries = self.temperatures and config.enable_confidence_head and config.sample_from_anchor
        return config.temperatures_elsewhere if carries else None


_PLAIN = {"dspark": DSPARK, "dflash": DFLASH, "dflash2": DFLASH2}
_ALL = ("vanilla", "gated", "rnn")
DESTINATIONS = {
    d.name: d
    for d in (
        Destination(
            "deepspec",
            {"dspark": DSPARK},
            (*_ALL, None),
            gemma4=DSPARK_GEMMA4,
            anchor_only=True,
            ships_target=True,
        ),
        Destination(
            "vllm",
            _PLAIN,
            ("vanilla",),
            gemma4=DSPARK_GEMMA4,
            reduced=True,
            windows=("slot",),
            causal=CAUSAL_BLOCKS,
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


def family_of(config: DrafterConfig) -> str:
    """Whose layers a drafter has.

    Raises:
        ValueError: a mixture that only our own format has.
    """
    found = {key: getattr(config, key) for key in gemma4.LAYERS}
    if found == gemma4.LAYERS:
        return GEMMA4
    if any(found.values()) or config.keys_are_values:
        raise ValueError(
            f"keys_are_values={config.keys_are_values}, "
            f"{', '.join(f'{key}={value}' for key, value in found.items())} is a mixture that only "
            f"the format native has: Gemma 4's layers have {gemma4.LAYERS}, Qwen3's none of them"
        )
    return QWEN3


def refuse_uncarried(name: str, config: DrafterConfig) -> Layout | None:
    """The layout for a drafter at the destination `name`; None for our own.

    Raises:
        ValueError: the destination would draft something else; the message says what to do.
    """
    if name == NATIVE:
        return None
    destination = DESTINATIONS[name]
    for what, instead in _uncarried(destination, config):
        others = "export.formats=[" + ", ".join(carriers(config)) + "] can"
        train = f", or train with {instead}" if instead else ""
        raise ValueError(f"export format {name} cannot carry {what}; {others}{train}")
    return destination.layout(config)


def carriers(config: DrafterConfig) -> list[str]:
    """The formats that carry a drafter."""
    return [NATIVE, *(d.name for d in DESTINATIONS.values() if not [*_uncarried(d, config)])]


def _uncarried(d: Destination, config: DrafterConfig) -> Iterator[tuple[str, str]]:
    """What of a drafter a destination does not carry, and settings that it would."""
    kind, gemma4 = kind_of(config), family_of(config) == GEMMA4
    if gemma4 and d.layout(config) is None:
        yield f"the layers of Gemma 4 in a drafter of the kind {kind}", "drafter=dspark"
    elif kind not in d.layouts:
        yield f"a drafter of the kind {kind}, only {sorted(d.layouts)}", ""
    elif kind == "dspark":
        head = config.markov_head_type
        if head not in d.heads:
            known = [head for head in d.heads if head]
            what = head or "no sequential head in the layout of DSpark"
            yield f"{what}, only {known}", "drafter.markov_head_type=vanilla"
        if (d.anchor_only or gemma4) and not config.sample_from_anchor:
            yield "sample_from_anchor=false: every slot would be off by one", ""
    if config.draft_vocab_size and (gemma4 or not d.reduced):
        what = f"a reduced draft vocabulary (draft_vocab_size={config.draft_vocab_size})"
        yield what, "drafter.draft_vocab_size=null"
    windows = () if gemma4 else d.windows
    if any(config.windows) and config.window_from not in windows:
        what = (
            f"sliding layers (sliding_window={config.sliding_window}) whose windows count from "
            f"window_from={config.window_from}"
        )
        known = ", ".join(windows)
        instead = f"drafter.window_from={known}" if known else "drafter.sliding_window=null"
        yield what, instead
    if config.causal_blocks not in (d.causal[:1] if gemma4 else d.causal):
        what = f"causal blocks (causal_blocks={config.causal_blocks})"
        yield what, "drafter.causal_blocks=none"


def what_is_left_out(name: str, config: DrafterConfig) -> list[str]:
    """What does not change the drafts but is lost at a destination, and what to do about it."""
    if name == NATIVE:
        return []
    destination = DESTINATIONS[name]
    if config.enable_confidence_head and kind_of(config) != "dspark":
        return [f"{name} has no confidence head for this kind of drafter: it is left out"]
    shifted = any(config.confidence_shifts or [])
    arrives = destination.temperatures_of(config)
    if config.confidence_temperatures and not arrives:
        takes = shifted and destination.temperatures
        fitted = ", which were fitted with confidence_shifts," if takes else ""
        sglang = " or sglang" if DESTINATIONS["sglang"].temperatures_of(config) else ""
        return [
            f"{name} has no place for this drafter's confidence temperatures{fitted}: its "
            "confidences will be uncalibrated; do not let it choose verify lengths by them, or "
            f"serve with our decoder{sglang}"
        ]
    if shifted:
        temperatures = ", and temperatures that were fitted without those of single slots"
        return [
            f"{name} has no place for what the confidences of single slots are shifted by "
            "(confidence_shifts): it gets the shift that all share"
            + (temperatures if arrives else "")
        ]
    return []
