"""The target: a frozen causal language model whose distribution is kept."""

import inspect
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Cache, DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from dspark_train.target.chat import encode_chat, eos_ids
from dspark_train.target.cpu import GROUPED, can_pack, pack_linears
from dspark_train.target.fingerprint import config_sha, weights_sha
from dspark_train.target.head import TargetHead
from dspark_train.target.joining import join_linears
from dspark_train.target.layers import validate_taps
from dspark_train.target.loading import load_model, load_tokenizer, resolve
from dspark_train.target.mixers import announced, find_mixers, kept_by_layers
from dspark_train.target.packing import PackedCache, Packing, gives, trial
from dspark_train.target.support import (
    probe,
    probe_rows,
    probe_states,
    refuse_unsupported,
    sliding_window,
)
from dspark_train.target.taps import decoder_layers, tapped

# what is kept of a pass is kept by hooks on the model: two threads would find each other's
ONE_PASS = threading.RLock()


@dataclass(frozen=True)
class TargetOutput:
    """What one forward pass of the target gives.

    Attributes:
        last_hidden: output of the final norm [B, S, D], what the LM head reads.
        features: outputs of the tapped layers, concatenated [B, S, M·D], or None without taps.
            They are not normalised.
    """

    last_hidden: torch.Tensor
    features: torch.Tensor | None


class Target:
    """A frozen causal language model, with taps on its layers.

    Attributes:
        model: the transformers model, in evaluation mode, without gradients.
        tokenizer: its tokenizer, or None for a model wrapped without one.
        head: embedding and LM head as a drafter shares them.
        name, revision: where the model came from.
        layers: of its decoder.
        num_layers, hidden_size: of its decoder.
        packed, sharded: whether its weights are laid out for a CPU (`pack`), or shared out over
            processes (`sharding.shard`).
        vocab_size: rows of the LM head (may exceed the tokenizer).
        max_positions: longest context; `sys.maxsize` if the family has no limit.
        eos_ids: token ids that end a response; may be empty.
        sliding_window: positions that tokens of sliding layers see, their own included; or None.
        masks_by_layer_type: `forward` takes a mask for each type of layer.
        packs_rows: `forward` leaves padding out of everything but attention; see `pack_rows`.
        kept: what each layer leaves behind for later tokens.
        recurrent: some layers keep a state, which only the last pass can be taken back from.
        graphs, compiles: decoders run their rounds at fixed shapes, recorded as graphs on CUDA
            (`decoding/recording.py`), and compiled.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        name: str,
        revision: str | None = None,
    ) -> None:
        """Freeze `model` and check that it is one we can draft for.

        Raises:
            ValueError: if it is not causal, has layers that cannot be cached, or an unknown head.
        """
        refuse_unsupported(name, model.config)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.revision = revision
        self.packed = self.packs_rows = self.sharded = self.graphs = self.compiles = False
        self._weights_sha: str | None = None
        self.head = TargetHead(model)
        self._decoder: nn.Module = model.get_decoder()
        probe(name, model, self._decoder, self.head)
        self.sliding_window, self.masks_by_layer_type = sliding_window(
            name, model.config, self._decoder
        )
        config = model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        self.vocab_size = self.head.vocab_size
        self.max_positions: int = getattr(config, "max_position_embeddings", None) or sys.maxsize
        self.kept = kept_by_layers(name, model.config)
        self._mixers = find_mixers(name, model, self._decoder, self.kept)
        self.recurrent = bool(self._mixers)
        self.eos_ids = eos_ids(model, tokenizer)
        self.layers = decoder_layers(name, self._decoder, self.num_layers)
        # The keyword was renamed between transformers releases.
        parameters = inspect.signature(self._decoder.forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        if self.recurrent:
            probe_states(name, model, self._decoder, self._cache_keyword)
        else:
            probe_rows(name, model, self.forward)

    @classmethod
    def load(
        cls,
        name: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str = "cpu",
        attn_implementation: str = "auto",
        cache_dir: str | Path | None = None,
        pack: bool = True,
        graphs: bool = False,
        compile: bool = False,
    ) -> "Target":
        """Load a target by name.

        Args:
            name: a hub id, a local folder, or `package:<distribution>` for GGUF weights inside an
                installed Python package, which are converted once.
            revision: branch, tag or commit on the hub.
            dtype: of the weights, by torch's name; "auto": bfloat16 where the hardware multiplies
                it, else float32.
            device: torch device.
            attn_implementation: transformers' name of the attention kernel; "auto": sdpa, or
                eager for families that sdpa cannot compute.
            cache_dir: where converted package weights are kept; default `$DSPARK_CACHE`, then
                `~/.cache/dspark_train`.
            pack: lay out weights on a CPU for fast short passes, see `Target.pack`.
            graphs: decode at fixed shapes, on CUDA as recorded graphs.
            compile: the same, with what runs at a shape compiled when it is first met.

        Raises:
            ValueError: naming what is missing or not supported, and what to do.
        """
        source = resolve(name, cache_dir)
        model = load_model(
            name,
            source,
            revision=revision,
            dtype=dtype,
            device=device,
            attn_implementation=attn_implementation,
        )
        target = cls(model, load_tokenizer(name, source, revision=revision), name, revision)
        if pack and can_pack(target.dtype, target.device):
            target.pack()
        elif pack and target.device.type == "cpu":
            target.pack_rows()
        target.graphs, target.compiles = graphs or compile, compile
        return target

    @classmethod
    def wrap(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "in-memory",
    ) -> "Target":
        """Make a target of a model that is already in memory; the model gets frozen."""
        return cls(model, tokenizer, name)

    def pack(self) -> None:
        """Make passes over few tokens faster on a CPU (see `target/cpu.py`), for good.

        The decoder's dense weights are replaced; those of the LM head, which drafters share, stay
        beside their packed copy. Numbers may change in the last bits.
        """
        self._weights_sha = weights_sha(self.model)
        ids = torch.tensor([[0, 1, 0], [1, 0, 0]], device=self.device)
        join_linears(self._decoder, lambda: self._decoder(input_ids=ids, use_cache=False)[0])
        pack_linears(self._decoder)
        self.head.pack()
        self.packed = True
        self.pack_rows()

    def pack_rows(self) -> None:
        """Let passes over rows of different lengths go without their padding, where that works.

        The attention must be "sdpa" and let itself be replaced, and the family must hand on what it
        does not know to its attention; passes of two short rows tell.
        """
        config = self.model.config.get_text_config()
        if config._attn_implementation != "sdpa":
            return
        cache = partial(DynamicCache, config=self.model.config) if self.recurrent else DynamicCache
        expected = trial(self.forward, cache, self.device)
        config._attn_implementation = GROUPED
        if not gives(expected, self.forward, cache, self.device):  # it knows "sdpa" by its name
            config._attn_implementation = "sdpa"
        elif not self.recurrent:  # to a recurrent layer rows one after another would be one text
            self.packs_rows = True
            self.packs_rows = gives(expected, self.forward, cache, self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.model.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.model.device

    def fingerprint(self) -> dict[str, str | None]:
        """Identify the target: `name`, `revision`, `config_sha`, `weights_sha`."""
        return {
            "name": self.name,
            "revision": self.revision,
            "config_sha": config_sha(self.model),
            "weights_sha": self._weights_sha or weights_sha(self.model),
        }

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        *,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | dict[str, torch.Tensor | None] | None = None,
        cache: Cache | None = None,
        taps: Sequence[int] = (),
        counts: Sequence[int] | None = None,
    ) -> TargetOutput:
        """Run the decoder without the LM head.

        Args:
            input_ids: [B, S].
            position_ids: [B, S]; default: continuing the cache.
            attention_mask: [B, L] of ones and zeros, or [B, 1, S, L] bool (True = attend) or
                float (added to the scores); where `masks_by_layer_type`, one of these per type.
            cache: transformers' cache, appended to in place.
            taps: layers whose outputs are wanted, ascending.
            counts: tokens of each row that count, the longest S; what lies behind them is padding,
                and so are its outputs. None: all of them.

        Raises:
            ValueError: if `taps` are not layers of this target.
        """
        layers = validate_taps(taps, self.num_layers) if taps else ()
        told = nullcontext() if cache is None else announced(self._mixers, cache)
        packing, more = None, {}
        uneven = counts is not None and min(counts) < max(counts)
        if self.packs_rows and uneven and cache is not None and attention_mask is not None:
            packing = Packing(counts, input_ids.device)
            input_ids, position_ids = packing.pack(input_ids), packing.pack(position_ids)
            cache, more = PackedCache(cache, packing), {"packing": packing}
        with ONE_PASS, tapped(self.layers, layers) as captured, told:
            outputs = self._decoder(
                input_ids=input_ids,
                position_ids=position_ids,
                attention_mask=self._additive_if_eager(attention_mask),
                use_cache=cache is not None,
                **{self._cache_keyword: cache},
                **more,
            )
        features = torch.cat([captured[i] for i in layers], dim=-1) if layers else None
        if packing is None:
            return TargetOutput(outputs[0], features)
        unpacked = None if features is None else packing.unpack(features)
        return TargetOutput(packing.unpack(outputs[0]), unpacked)

    def encode_chat(self, messages: Sequence[dict[str, str]], **template_args: Any) -> list[int]:
        """Token ids of a conversation with the start of the assistant's turn.

        `template_args` go to the chat template, e.g. `enable_thinking=False`.

        Raises:
            ValueError: if the target has no chat template or the template refuses the messages.
        """
        return encode_chat(self.name, self.tokenizer, messages, **template_args)

    def _additive_if_eager(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        # Eager attention adds the mask to the scores, where True would count as 1.
        config = self.model.config.get_text_config()
        eager = getattr(config, "_attn_implementation", None) == "eager"
        pairs = isinstance(mask, torch.Tensor) and mask.dim() == 4 and mask.dtype == torch.bool
        if not (eager and pairs):
            return mask
        lowest = torch.finfo(self.dtype).min
        return torch.zeros_like(mask, dtype=self.dtype).masked_fill(~mask, lowest)
