"""`python -m dspark_train [experiment=NAME] [stages=[…]] [key=value …]`."""

import sys
from dataclasses import fields, is_dataclass
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from dspark_train.config import Config, validate

# a clone keeps its configuration at the top, an installed wheel inside the package
CONFIGS = next(
    folder
    for folder in (Path(__file__).parent.parent / "configs", Path(__file__).parent / "configs")
    if folder.is_dir()
)

# all keys with their defaults, so that YAML and command line hold only what differs
ConfigStore.instance().store(
    name="defaults", node=OmegaConf.to_container(OmegaConf.structured(Config))
)


def typed(settings: DictConfig) -> Config:
    """Composed YAML as frozen dataclasses.

    Raises:
        ValueError: unknown keys, wrong types, missing or contradictory values.
    """
    schema = OmegaConf.structured(Config)
    for node in (
        schema,
        *(schema[group.name] for group in fields(Config) if is_dataclass(group.type)),
    ):
        OmegaConf.set_readonly(node, False)  # frozen dataclasses make read-only nodes
    try:
        config = OmegaConf.to_object(OmegaConf.merge(schema, settings))
    except OmegaConfBaseException as error:
        raise ValueError(
            f"settings: {str(error).splitlines()[0]} (key {error.full_key})"
        ) from error
    validate(config)
    return config


@hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name="config")
def main(settings: DictConfig) -> None:
    try:
        config = typed(settings)
        from dspark_train.pipeline import run  # after the settings are known to be right

        run(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print(
            "\ninterrupted: what is finished is kept; the same command continues", file=sys.stderr
        )
        sys.exit(130)


if __name__ == "__main__":
    main()
