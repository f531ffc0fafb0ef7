"""The decoder that commands work with: the run's own export, or a checkpoint that is given."""

from pathlib import Path

from dspark_train.artifacts import MANIFEST, Artifact
from dspark_train.config import Config
from dspark_train.decoding import SpeculativeDecoder, TreeShape
from dspark_train.formats import load_config
from dspark_train.stages.targets import device, load_target, require_same_target


def checkpoint_of(config: Config, proposer: str) -> str | None:
    """Where the drafter of `proposer` lies, None for a proposer without one.

    Raises:
        ValueError: no checkpoint is given, and the run has not exported one, or it is damaged.
    """
    if not proposer.startswith("drafter"):
        return None
    if config.checkpoint is not None:
        return config.checkpoint
    export = Path(config.run_dir) / "export"
    if not (export / MANIFEST).is_file():
        raise ValueError(
            f"{export / 'checkpoint'} does not exist: run the stages up to export with "
            f"run_dir={config.run_dir}, or give checkpoint=FOLDER"
        )
    return str(Artifact.open(export).folder("checkpoint"))


def open_decoder(
    config: Config, proposer: str, target: str | None, tree: TreeShape | None = None
) -> SpeculativeDecoder:
    """The decoder of `proposer`, on the target that its checkpoint knows.

    Args:
        proposer, tree: as `SpeculativeDecoder.from_pretrained` takes them.
        target: another name for the target that the checkpoint records.

    Raises:
        ValueError: as `checkpoint_of`, or a target other than that of the checkpoint.
    """
    checkpoint = checkpoint_of(config, proposer)
    decoder = SpeculativeDecoder.from_pretrained(
        checkpoint,
        target=target if checkpoint else load_target(config),
        proposer=proposer,
        tree=tree,
        dtype=config.target.dtype,
        device=str(device(config)),
    )
    if checkpoint:
        require_same_target(decoder.target, load_config(checkpoint).target, checkpoint)
    return decoder
