"""`python -m dspark_train [experiment=NAME] [stages=[…]] [key=value …]`."""

import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dspark_train.config import Config
from dspark_train.noise import hear_ourselves

# a clone keeps its configuration at the top, an installed wheel inside the package
CONFIGS = next(
    folder
    for folder in (Path(__file__).parent.parent / "configs", Path(__file__).parent / "configs")
    if folder.is_dir()
)
UNKNOWN_KEY = re.compile(r"Could not override '([\w.]+)'")
QUOTED = """like 'prompt="Is 2 + 2 = 4, or not?"'"""
# numbers the job of a sweep to processes that it starts
JOB = "DSPARK_JOB"
GROUPS = tuple(group.name for group in fields(Config) if is_dataclass(group.type))


def defaults() -> DictConfig:
    """All keys with their defaults, so that YAML and command line hold only what differs.

    A setting that is a dictionary takes any key: `prompts.template.enable_thinking=false`.
    """
    plain = OmegaConf.to_container(OmegaConf.structured(Config))
    keys = OmegaConf.create(plain)
    for group in GROUPS:
        for key, value in plain[group].items():
            if isinstance(value, dict):
                OmegaConf.set_struct(keys[group][key], False)
    return keys


ConfigStore.instance().store(name="defaults", node=defaults())


def typed(settings: DictConfig) -> Config:
    """Composed YAML as frozen dataclasses.

    Raises:
        ValueError: unknown keys, wrong types, missing or contradictory values; all in one message.
    """
    schema = OmegaConf.structured(Config)
    for node in (schema, *(schema[group] for group in GROUPS)):
        OmegaConf.set_readonly(node, False)  # frozen dataclasses make read-only nodes
    problems = []
    try:
        schema = OmegaConf.merge(schema, settings)
    except OmegaConfBaseException:  # it stops at the first: find them all
        for key, value in leaves(OmegaConf.to_container(settings)):
            group, _, inner = key.partition(".")
            try:
                OmegaConf.merge(schema, {group: {inner: value} if inner else value})
            except OmegaConfBaseException as error:
                said = first_line(error)
                if "is not a ListConfig" in said:
                    said = f"expected a list, like {key}=[{value}]"
                problems.append(f"{key}={value}: {said}")
    missing = [] if problems else sorted(OmegaConf.missing_keys(schema))
    problems += [f"{key} is missing: give one" for key in missing]
    if problems:
        raise ValueError("settings:\n  " + "\n  ".join(problems))
    config = OmegaConf.to_object(schema)
    # these bring torch along, which takes seconds
    from dspark_train.stages.targets import settled
    from dspark_train.validation import validate

    validate(config)
    return settled(config)


def leaves(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted keys with their values; the groups are opened, dictionaries inside them are not."""
    for key, value in settings.items():
        if key in GROUPS and isinstance(value, Mapping):
            yield from ((f"{key}.{inner}", v) for inner, v in value.items())
        else:
            yield key, value


def first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def expected_keys(key: str) -> str:
    """What there is in place of an unknown key."""
    group, _, name = key.rpartition(".")
    of = {field.name: field.type for field in fields(Config)}.get(group, Config)
    names = [field.name for field in fields(of)] if is_dataclass(of) else []
    near = [n for n in names if n in name] + get_close_matches(name, names)
    return f"{group or 'the configuration'} has no key {name}: expected one of {near or names}"


def compose() -> list[tuple[DictConfig, list[str]]]:
    """Settings and overrides of the command line; none where it only asks to see something."""
    composed = []

    @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
    def keep(settings: DictConfig) -> None:
        # hydra would wrap what a job raises: so nothing runs in here
        composed.append((settings, list(HydraConfig.get().overrides.task)))

    os.environ["HYDRA_FULL_ERROR"] = "1"  # hand errors on instead of printing them
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DSPARK_SWEEP"] = folder  # a sweep leaves a file, which nobody reads
        try:
            keep()
        finally:
            hear_ourselves()
    return composed


def refuse_shared_folders(configs: list[Config]) -> None:
    """Refuse a sweep whose jobs would undo each other's work.

    Raises:
        ValueError: two jobs have the same folder.
    """
    for number, config in enumerate(configs):
        before = [other.run_dir for other in configs[:number]]
        if config.run_dir in before:
            raise ValueError(
                f"jobs {before.index(config.run_dir)} and {number} of this sweep share "
                f"run_dir={config.run_dir}: name them by what differs, like 'name=lr-${{train.lr}}'"
            )


def interrupt(number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a run as Ctrl-C does."""
    raise KeyboardInterrupt


def main() -> None:
    """Run the command line. Whatever goes wrong ends in one message and a status other than 0.

    Of several processes all find the same wrong settings: rank 0 says so. What happens later is
    said by the one to which it happens.
    """
    rank, running = int(os.environ.get("RANK", 0)), False
    asked_to_end = signal.signal(signal.SIGTERM, interrupt)
    try:
        jobs = compose()
        configs = [typed(settings) for settings, _ in jobs]
        refuse_shared_folders(configs)
        from dspark_train import pipeline  # after the settings are known to be right

        running = True
        if helped := os.environ.get(pipeline.STAGE):
            # Lightning started this process for one stage of one job, with the same command line
            pipeline.work(configs[int(os.environ[JOB])], helped)
            return
        for number, (config, (_, overrides)) in enumerate(zip(configs, jobs, strict=True)):
            os.environ[JOB] = str(number)
            pipeline.run(config, [item.split("=")[0].lstrip("+~") for item in overrides])
    except (HydraException, OmegaConfBaseException) as error:
        lines = [first_line(part) for part in (error, error.__cause__) if part is not None]
        if options := getattr(error, "options", None):
            lines.append(f"expected one of {', '.join(options)}")
        if unknown := UNKNOWN_KEY.match(lines[0]):
            lines[1:] = [expected_keys(unknown[1])]
        if isinstance(error, OverrideParseException):
            lines.append(f"in {error.override}: put such text in quotes inside quotes, {QUOTED}")
        sys.exit(1 if rank else "error: " + "\n  ".join(dict.fromkeys(lines)))
    except (ValueError, OSError) as error:
        who = f" (rank {rank})" if rank else ""
        sys.exit(1 if rank and not running else f"error{who}: {error}")
    except KeyboardInterrupt:
        if not rank:
            print(
                "\ninterrupted: what is finished is kept; the same command (without force) "
                "continues",
                file=sys.stderr,
            )
        sys.exit(130)
    finally:
        signal.signal(signal.SIGTERM, asked_to_end)


if __name__ == "__main__":
    main()
