"""A published checkpoint of any known format -> the formats that are asked for."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from dspark_train.config import Config
from dspark_train.disk import write_atomically
from dspark_train.formats import (
    load_config,
    load_drafter,
    refuse_uncarried,
    what_is_left_out,
    write,
)
from dspark_train.formats.card import Story, card
from dspark_train.formats.check import reload
from dspark_train.stages.export import compare
from dspark_train.stages.targets import device
from dspark_train.target import Target
from dspark_train.target.layers import validate_taps
from dspark_train.target.licence import licence_of

CHECK_PROMPT = "Once upon a time there was a small model that guessed"


def settings(config: Config) -> dict[str, Any]:
    """The groups of the configuration that are read here."""
    return {name: asdict(getattr(config, name)) for name in ("convert", "export")}


def run(config: Config) -> None:
    """Read `source`, write `output` (a folder in it per format, where several are asked for).

    Raises:
        ValueError: nothing to read or nowhere to write, or whatever reader and writer refuse.
    """
    source, formats = config.source, config.export.formats
    if not source or not config.output:
        raise ValueError(
            f"source={source}, output={config.output}: convert needs both, the checkpoint to read "
            "and the folder to make"
        )
    folders = {name: Path(config.output) / (name if len(formats) > 1 else "") for name in formats}
    for folder in folders.values():
        if folder.exists():
            raise ValueError(f"output {folder} exists already: name one that does not")
    shape = load_config(source)
    for name in formats:
        refuse_uncarried(name, shape)
    target = None
    if config.convert.target:
        target = Target.load(
            config.convert.target, dtype=config.target.dtype, device=str(device(config))
        )
    head = target.head if target else None
    dtype = getattr(torch, config.convert.dtype) if config.convert.dtype else None
    drafter = load_drafter(source, dtype, head)
    architectures = []
    if target is not None:
        validate_taps(drafter.config.target_layer_ids, target.num_layers)
        drafter.config.num_target_layers = target.num_layers
        drafter.config.target = {**target.fingerprint(), "head": target.head.facts}
        architectures = [type(target.model).__name__]
    for name, folder in folders.items():
        recorded = (drafter.config.target or {}).get("name")
        story = Story(data={"converted from": source}, licence=licence_of(recorded or ""))
        said = card(name, drafter.config, story)

        def build(place: Path, name: str = name, said: str = said) -> None:
            write(place, name, drafter, head, architectures=architectures)
            (place / "README.md").write_text(said)

        try:
            write_atomically(folder, build)
        except OSError as error:
            raise ValueError(f"output {folder} cannot be written ({error.strerror})") from error
        if target is None:
            reload(folder, name, drafter, head)
            checked = "compared; give convert.target= to decode with it, too"
        else:
            compare(folder, name, drafter, target, CHECK_PROMPT)
            checked = "compared, decoded with"
        print(f"convert    {source} -> {folder} ({name}), read back, {checked}")
        for note in what_is_left_out(name, drafter.config):
            print(f"convert    {note}")
