"""GGUF weights inside an installed Python package, converted once to a safetensors folder.

Some packages on the package registry carry the weights of a small model, which makes a real target
available where no model hub is. The package itself is never imported: it may depend on a runtime
that is not installed.
"""

import os
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from dspark_train.disk import full_disk_explained

# Part of the folder's name: raise it when the conversion changes what it writes.
CONVERSION_VERSION = 2
SPECIAL_TOKENS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
TOKENIZER_FIELDS = (
    "tokenizer.ggml.pre",
    *(f"tokenizer.ggml.{name}_token_id" for name in SPECIAL_TOKENS.values()),
)


def default_cache_dir() -> Path:
    """`$DSPARK_CACHE`, or `~/.cache/dspark_train`."""
    return Path(os.environ.get("DSPARK_CACHE") or Path.home() / ".cache" / "dspark_train")


def package_folder(distribution: str, cache_dir: str | Path | None = None) -> Path:
    """The converted folder of a package's model, converting it if it is not there yet.

    Args:
        distribution: name of the package, as pip knows it.
        cache_dir: parent of the converted folders; default `default_cache_dir()`.

    Raises:
        ValueError: if the package or the GGUF reader is not installed, or if the package does not
            hold exactly one GGUF file.
    """
    gguf, version = find_gguf(distribution)
    parent = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()
    folder = parent / f"{distribution}-{version}-{gguf.stem}-v{CONVERSION_VERSION}"
    if not folder.is_dir():
        _convert(gguf, folder)
    return folder


def find_gguf(distribution: str) -> tuple[Path, str]:
    """Path of the one GGUF file of an installed package, and the package's version.

    Raises:
        ValueError: if the package is not installed or holds no or several GGUF files.
    """
    advice = f"install it with `pip install --no-deps {distribution} gguf`"
    try:
        package = metadata.distribution(distribution)
    except (metadata.PackageNotFoundError, ValueError) as error:
        raise ValueError(f"package {distribution!r} is not installed; {advice}") from error
    found = [Path(str(package.locate_file(f))) for f in package.files or () if f.suffix == ".gguf"]
    if len(found) != 1 or not found[0].is_file():
        raise ValueError(
            f"package {distribution!r} should hold one GGUF file, found "
            f"{[str(f) for f in found]}; {advice}"
        )
    return found[0], package.version


def _convert(gguf: Path, folder: Path) -> None:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError("reading GGUF weights needs `pip install --no-deps gguf`") from error
    fields = GGUFReader(gguf).fields
    described = {name: fields[name].contents() for name in TOKENIZER_FIELDS if name in fields}
    packed = getattr(transformers, "GgufConfig", None)
    # Releases that have this class keep the weights packed, which cannot be saved, unless told.
    unpack = {"quantization_config": packed(dequantize=True)} if packed else {}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, **unpack
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    mend_tokenizer(tokenizer, described, model.config.max_position_embeddings)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        full_disk_explained(folder),
        tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary,
    ):
        written = Path(temporary) / folder.name
        model.save_pretrained(written)
        tokenizer.save_pretrained(written)
        try:
            written.rename(folder)
        except OSError:
            # Another process converted the same package meanwhile.
            if not folder.is_dir():
                raise


def mend_tokenizer(
    tokenizer: PreTrainedTokenizerBase, described: Mapping[str, Any], max_length: int
) -> None:
    """Put back what the conversion of a GGUF tokenizer loses, in place.

    Args:
        tokenizer: as transformers read it, with a byte-level pre-tokenizer.
        described: the file's `tokenizer.ggml.*` entries. Some releases of transformers get the
            special tokens wrong. The pre-tokenizer "smollm" splits every digit off before the
            byte-level rule, which matters for spaces in front of numbers.
        max_length: longest input of the model.
    """
    tokenizer.model_max_length = max_length
    for ours, theirs in SPECIAL_TOKENS.items():
        index = described.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is not None:
            setattr(tokenizer, f"{ours}_token", tokenizer.convert_ids_to_tokens(int(index)))
    if described.get("tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
