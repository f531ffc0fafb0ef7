"""Runs stages in order, and skips those whose inputs and settings have not changed."""

import importlib
import time
from pathlib import Path

from dspark_train.artifacts import MANIFEST, Artifact, ArtifactWriter, fingerprint, set_aside
from dspark_train.config import Config
from dspark_train.stages.stage import Stage

STAGES = ("rollout", "capture", "train", "heads", "calibrate", "export", "bench")
COMMANDS = ("generate",)  # leave no artifact


def run(config: Config) -> None:
    """Run `config.stages`, each in its own folder of the run.

    Raises:
        ValueError: unknown stages, or whatever a stage refuses.
    """
    known = (*STAGES, *COMMANDS)
    for key, names in (("stages", config.stages), ("force", config.force)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{key}={names}: {unknown} unknown, expected some of {list(known)}")
    if not config.stages:
        raise ValueError(f"stages=[] asks for nothing: expected some of {list(known)}")
    for name in STAGES:
        if name in config.stages:
            run_stage(config, name)
    for name in COMMANDS:
        if name in config.stages:
            load(name).run(config)


def load(name: str) -> Stage:
    """The module of a stage; imported only when it runs, so that decoding needs no lightning."""
    return importlib.import_module(f"dspark_train.stages.{name}")


def run_stage(config: Config, name: str) -> None:
    """Run one stage unless its artifact is there and up to date; say what happened in one line."""
    stage, directory = load(name), Path(config.run_dir) / name
    if name == "heads" and config.schedule == "joint":
        print(f"{name:<10} nothing to do: trained together with the backbone (schedule=joint)")
        return
    inputs = {upstream: open_input(config, name, upstream) for upstream in stage.inputs(config)}
    settings = stage.settings(config)
    upstream = {key: artifact.fingerprint for key, artifact in inputs.items()}
    if name in config.force:
        set_aside(directory)
    elif (directory / MANIFEST).exists():
        artifact = Artifact.open(directory)
        if artifact.fingerprint == fingerprint(name, settings, upstream):
            print(f"{name:<10} finished before, in {artifact.seconds:.1f} s: {directory}")
            return
        print(
            f"{name:<10} its settings or inputs changed: the old one goes to {directory}.previous"
        )
    begin = time.perf_counter()
    writer = ArtifactWriter(directory, name, settings, upstream)
    outcome = stage.run(config, writer, inputs)
    seconds = time.perf_counter() - begin
    writer.finish(counts=outcome.counts, facts=outcome.facts, seconds=seconds)
    print(f"{name:<10} {seconds:7.1f} s  {outcome.line}: {directory}")


def open_input(config: Config, name: str, upstream: str) -> Artifact:
    """Open what `name` reads.

    Raises:
        ValueError: it is missing or damaged; the message says which stage to run.
    """
    try:
        return Artifact.open(Path(config.run_dir) / upstream)
    except ValueError as error:
        raise ValueError(f"stage {name} reads the stage {upstream}, but {error}") from error
