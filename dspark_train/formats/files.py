"""The files of a checkpoint: JSON and safetensors, nothing that has to be run or unpickled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib")
WANTED = ("*.json", "*.safetensors")


def folder_of(source: str | Path) -> Path:
    """The local folder of a checkpoint; a hub id is downloaded, JSON and safetensors only.

    Raises:
        ValueError: there is none, or there are pickles or code in it.
    """
    folder = Path(source).expanduser()
    if folder.is_file():
        raise ValueError(f"checkpoint {source} is a file; expected the folder that it lies in")
    if not folder.is_dir():
        if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
            raise ValueError(
                f"checkpoint {source} does not exist; expected a folder or a hub id (owner/name)"
            )
        try:
            folder = Path(snapshot_download(str(source), allow_patterns=list(WANTED)))
        except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
            reason = str(error).strip().split("\n", 1)[0]
            raise ValueError(
                f"checkpoint {source} could not be loaded ({reason}); check the spelling, the "
                "connection and the access rights, or give a folder"
            ) from error
    for file in sorted(folder.iterdir()):
        if file.suffix in PICKLES:
            raise ValueError(
                f"checkpoint {source} has pickled weights ({file.name}), which can run code when "
                "they are read: expected safetensors only; convert it, or take the file away"
            )
        if file.suffix == ".py":
            raise ValueError(
                f"checkpoint {source} has code beside the weights ({file.name}), which is never "
                "run here: expected JSON and safetensors only; take the file away if the rest "
                "says all there is to know"
            )
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        ValueError: missing, damaged, or no object.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint {path.parent} is a folder without a {path.name}")
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(
            f"checkpoint {path.parent} could not be loaded ({path.name}: {error}); check its "
            "files, or export it again"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, expected an object")
    return content


class Tensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint, in one file or sharded; each is read when it is asked for.

    Raises:
        ValueError: no safetensors, a shard that is missing or damaged, or an index that does not
            say what the shards hold.
    """

    def __init__(self, folder: Path) -> None:
        index, files = folder / INDEX, sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(f"checkpoint {folder} has no file named {SINGLE}, nor shards of it")
        self._file: dict[str, Path] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        for path in files:
            try:
                with safe_open(path, "pt") as file:
                    for name in file.keys():  # noqa: SIM118
                        if name in self._file:
                            raise ValueError(
                                f"checkpoint {folder} has the tensor {name} twice, in "
                                f"{self._file[name].name} and {path.name}"
                            )
                        self._file[name] = path
                        self.shapes[name] = tuple(file.get_slice(name).get_shape())
            except (OSError, SafetensorError) as error:
                raise ValueError(
                    f"checkpoint {folder} could not be loaded ({path.name}: {error}); check its "
                    "files, or export it again"
                ) from error
        if index.is_file():
            said = read_json(index).get("weight_map", {})
            wrong = {n for n in {*said, *self._file} if said.get(n) != self._name(n)}
            if wrong:
                first = min(wrong)
                raise ValueError(
                    f"{index} says {first} is in {said.get(first)}, but it is in "
                    f"{self._name(first)} ({len(wrong)} such tensors): shards are missing or of "
                    "another checkpoint"
                )
        elif len(files) > 1:
            raise ValueError(f"checkpoint {folder} has {len(files)} shards without a {INDEX}")

    def _name(self, tensor: str) -> str | None:
        return self._file[tensor].name if tensor in self._file else None

    def __getitem__(self, name: str) -> torch.Tensor:
        with safe_open(self._file[name], "pt") as file:
            return file.get_tensor(name)

    def __iter__(self):
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)
