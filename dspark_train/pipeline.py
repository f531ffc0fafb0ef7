"""Runs stages in order, and skips those whose inputs and settings have not changed."""

import importlib
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from dspark_train import ranks
from dspark_train.artifacts import Artifact, ArtifactWriter, fingerprint, recorded_settings, tidy
from dspark_train.aside import bring_back, finished
from dspark_train.config import Config
from dspark_train.disk import exclusive, full_disk_explained
from dspark_train.formats import load_config
from dspark_train.noise import silence_libraries
from dspark_train.stages.stage import Stage

STAGES = (
    "rollout",
    "capture",
    "train",
    "heads",
    "calibrate",
    "simulate",
    "export",
    "bench",
    "bench_training",
    "bench_serving",
)
# names the stage at work to processes that it starts
STAGE = "DSPARK_STAGE"
COMMANDS = ("convert", "generate", "serve", "verify", "certify")  # leave no artifact


def run(config: Config, given: Sequence[str] = ()) -> None:
    """Run `config.stages`, each in its own folder of the run.

    Args:
        config: all settings.
        given: dotted keys of those that were asked for by name, not taken from a file.

    Raises:
        ValueError: unknown stages, or whatever a stage refuses.
    """
    known = (*STAGES, *COMMANDS)
    for key, names in (("stages", config.stages), ("force", config.force)):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"{key}={names}: {unknown} unknown, expected some of {list(known)}")
    if not config.stages:
        raise ValueError(f"stages=[] asks for nothing: expected some of {list(known)}")
    refuse_contradictions(config, given)
    stages = [name for name in STAGES if name in config.stages]
    with exclusive(Path(config.run_dir)) if stages and ranks.first() else nullcontext():
        for name in stages:
            if name != "capture" or not config.capture.plan:
                run_stage(config, name)
            elif ranks.first():
                load("plan").run(config)
    for name in COMMANDS:
        if name in config.stages and ranks.first():
            load(name).run(config)


def refuse_contradictions(config: Config, given: Sequence[str]) -> None:
    """Refuse a setting by which a stage that does not run now would have made something else.

    The target has a check of its own, by its weights, wherever it is loaded.

    Raises:
        ValueError: naming the key, what it is now and what it was.
    """
    read_now = {group for name in config.stages for group in load(name).settings(config)}
    read_now.add("target")
    made: dict[str, tuple[Any, Path]] = {}
    for name in STAGES:
        directory = Path(config.run_dir) / name
        for group, values in recorded_settings(directory).items():
            if group not in read_now and isinstance(values, dict):
                made = {f"{group}.{key}": (v, directory) for key, v in values.items()} | made
    if config.checkpoint and any(key.startswith("drafter.") for key in given):
        shape, where = load_config(config.checkpoint).to_dict(), Path(config.checkpoint)
        made |= {f"drafter.{key}": (was, where) for key, was in shape.items()}
    for key in given:
        group, _, inner = key.partition(".")
        if key in made and (now := getattr(getattr(config, group), inner, None)) != made[key][0]:
            was, directory = made[key]
            raise ValueError(
                f"{key}={now} contradicts {directory}, which was made with {key}={was}: leave the "
                f"setting out, or run the stage that makes {directory} again"
            )


def load(name: str) -> Stage:
    """The module of a stage; imported only when it runs, so that decoding needs no lightning.

    Raises:
        ValueError: it needs a package that is not installed.
    """
    try:
        stage = importlib.import_module(f"dspark_train.stages.{name}")
    except ModuleNotFoundError as error:
        raise ValueError(
            f"stage {name} needs the package {error.name}, which is not installed; it belongs to "
            "an extra, e.g. pip install 'dspark_train[serve]'"
        ) from error
    silence_libraries()
    return stage


def run_stage(config: Config, name: str) -> None:
    """Run one stage unless its artifact is there and up to date; say what happened in one line.

    Of several processes rank 0 decides, writes and speaks. The others work with it in stages that
    are `SHARED`, and wait for its end in those that are not.
    """
    if not ranks.tell(ranks.first() and is_due(config, name)):
        return
    if ranks.first() or getattr(load(name), "SHARED", False):
        os.environ[STAGE] = name
        try:
            work(config, name)
        finally:
            del os.environ[STAGE]
    ranks.wait()


def work(config: Config, name: str) -> None:
    """Run a stage that is due, or help rank 0 with it; only rank 0 finishes its artifact."""
    stage, directory, begin = load(name), Path(config.run_dir) / name, time.perf_counter()
    inputs = {upstream: open_input(config, name, upstream) for upstream in stage.inputs(config)}
    writer = ArtifactWriter(
        directory,
        name,
        stage.settings(config),
        {key: artifact.contents for key, artifact in inputs.items()},
        afresh=name in config.force,
    )
    with full_disk_explained(directory):
        outcome = stage.run(config, writer, inputs)
        if ranks.first():
            seconds = time.perf_counter() - begin
            writer.finish(counts=outcome.counts, facts=outcome.facts, seconds=seconds)
            print(f"{name:<10} {seconds:7.1f} s  {outcome.line}: {directory}")


def is_due(config: Config, name: str) -> bool:
    """Whether a stage has to run: nothing up to date is there, nor can be brought back."""
    stage, directory = load(name), Path(config.run_dir) / name
    if name == "heads" and not config.heads_apart:
        print(f"{name:<10} nothing to do: trained together with the backbone (schedule=joint)")
        return False
    upstream = {key: open_input(config, name, key).contents for key in stage.inputs(config)}
    wanted, afresh = fingerprint(name, stage.settings(config), upstream), name in config.force
    if not afresh and bring_back(directory, wanted):
        print(f"{name:<10} these settings were used before: what they gave is back in {directory}")
    if finished(directory) and not afresh:
        artifact = Artifact.open(directory)
        if artifact.fingerprint == wanted:
            tidy(directory)
            print(f"{name:<10} finished before, in {artifact.seconds:.1f} s: {directory}")
            return False
    return True


def open_input(config: Config, name: str, upstream: str) -> Artifact:
    """Open what `name` reads.

    Raises:
        ValueError: it is missing, damaged or of another stage; the message says which stage to run.
    """
    try:
        artifact = Artifact.open(Path(config.run_dir) / upstream)
    except ValueError as error:
        raise ValueError(f"stage {name} reads the stage {upstream}, but {error}") from error
    if artifact.stage != upstream:
        raise ValueError(
            f"stage {name} reads the stage {upstream}, but {artifact.directory} was written by the "
            f"stage {artifact.stage}: redo it with force=[{upstream}]"
        )
    return artifact
