"""From a checkpoint folder (or a hub id) to a drafter, with errors that say what to do."""

from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError

from dspark_train.drafter.config import DrafterConfig
from dspark_train.drafter.drafter import Drafter

LOADING_ERRORS = (OSError, ValueError, TypeError, KeyError, RuntimeError, SafetensorError)
LOADING_ERRORS += (StrictDataclassError,)


def load_config(checkpoint: str | Path) -> DrafterConfig:
    """The configuration of a drafter checkpoint.

    Raises:
        ValueError: there is none, it is damaged, or it belongs to another kind of model.
    """
    folder = Path(checkpoint)
    # transformers would take the defaults for what is missing
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"checkpoint {checkpoint} is a folder without a config.json")
    if not folder.is_dir() and str(checkpoint).count("/") != 1:
        raise ValueError(
            f"checkpoint {checkpoint} does not exist; expected a folder or a hub id (owner/name)"
        )
    try:
        fields, _ = DrafterConfig.get_config_dict(checkpoint)
        kind = fields.get("model_type")
        if kind == DrafterConfig.model_type:
            return DrafterConfig.from_dict(fields)
    except LOADING_ERRORS as error:
        raise ValueError(_explain(checkpoint, error)) from error
    raise ValueError(
        f"checkpoint {checkpoint} is not a drafter: its config.json says model_type={kind!r}, "
        f"expected {DrafterConfig.model_type!r}"
    )


def load_drafter(checkpoint: str | Path, dtype: torch.dtype | None = None) -> Drafter:
    """A drafter with every weight that it has, none of them made up.

    Args:
        checkpoint: folder or hub id.
        dtype: of the weights; None takes that of the checkpoint.

    Raises:
        ValueError: missing, damaged or foreign files, or weights that do not fit the configuration.
    """
    config = load_config(checkpoint)
    try:
        drafter, report = Drafter.from_pretrained(
            checkpoint,
            config=config,
            dtype=dtype or "auto",
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except LOADING_ERRORS as error:
        raise ValueError(_explain(checkpoint, error)) from error
    for key in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if wrong := sorted(report[key]):
            first = wrong[0] if isinstance(wrong[0], str) else wrong[0][0]
            raise ValueError(
                f"the weights of checkpoint {checkpoint} do not fit its config.json: "
                f"{len(wrong)} {key.removesuffix('_keys')}, such as {first}; its files are "
                "incomplete or belong to different drafters"
            )
    for parameter in drafter.parameters():
        # as mapped from a file they lie at odd addresses, where kernels sum in another order
        parameter.data = parameter.data.clone()
    return drafter


def _explain(checkpoint: str | Path, error: Exception) -> str:
    first_line = str(error).strip().split("\n", 1)[0]
    where = "check its files, or export it again"
    if not Path(checkpoint).is_dir():
        where = "check the spelling, the connection and the access rights, or give a folder"
    return f"checkpoint {checkpoint} could not be loaded ({first_line}); {where}"
