"""Configuration: what is written in YAML composes, what is wrong is refused by name."""

import sys
from dataclasses import FrozenInstanceError, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException

from dspark_train.__main__ import CONFIGS, GROUPS, main, typed
from dspark_train.config import Config
from dspark_train.pipeline import COMMANDS, STAGES
from dspark_train.stages.targets import settled

YAML = sorted(path for path in CONFIGS.rglob("*.yaml") if path.parent != CONFIGS)


@cache
def configured(*overrides: str) -> Config:
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return typed(compose("config", list(overrides)))


def choice(path: Path) -> str:
    group = path.parent.relative_to(CONFIGS).as_posix()
    return f"{group}={path.stem}"


def keys() -> list[str]:
    names = []
    for top in fields(Config):
        inner = fields(top.type) if is_dataclass(top.type) else ()
        names += [f"{top.name}.{key.name}" for key in inner] or [top.name]
    return names


@pytest.mark.parametrize("path", YAML, ids=choice)
def test_every_file_composes_and_says_something(path: Path) -> None:
    config = configured(choice(path))
    assert isinstance(config, Config)
    if path.parent.name == "experiment":
        assert path.read_text().startswith("# @package _global_\n")
        assert config.name == path.stem
    elif path.stem != "csv":
        others = [other for other in YAML if other.parent == path.parent and other != path]
        assert all(configured(choice(other)) != config for other in others)


def test_dictionaries_take_keys_of_their_own() -> None:
    """As the README gives them, with and without Hydra's plus."""
    thinking = {"enable_thinking": False}
    assert configured("prompts.template={enable_thinking: false}").prompts.template == thinking
    assert configured("prompts.template.enable_thinking=false").prompts.template == thinking
    assert configured("prompts.columns.prompt=question").prompts.columns == {"prompt": "question"}
    assert configured("train.lr_parts={fc: 1e-3}").train.lr_parts == {"fc": 1e-3}
    for plus in ("", "+"):
        assert configured(f"{plus}train.trainer.devices=1").train.trainer == {"devices": 1}
    with pytest.raises(ConfigCompositionException):
        configured("train.speed=1")


def test_help_is_short_and_names_everything(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["dspark_train", "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    said = capsys.readouterr().out
    assert len(said.splitlines()) < 40, said
    names = {path.parent.name for path in YAML} | {path.stem for path in YAML}
    assert not {name for name in (*names, *STAGES, *COMMANDS) if name not in said}
    assert said.count("python -m dspark_train ") == 4
    assert "Powered by Hydra" not in said


def test_groups_are_those_of_the_dataclasses() -> None:
    groups = {path.parent.name for path in YAML} - {"experiment"}
    assert groups <= set(GROUPS)


def test_the_default_is_the_whole_pipeline() -> None:
    config = configured()
    assert config.stages == ["rollout", "capture", "train", "heads", "calibrate", "export", "bench"]
    assert config.run_dir == "runs/default"
    assert configured("name=mine").run_dir == "runs/mine"


def value(config: Config, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_every_key_can_be_overridden() -> None:
    default = configured()
    texts = {key: str(value(default, key)).replace("'", "") or "''" for key in keys()}
    given = [f"{key}={'null' if text == 'None' else text}" for key, text in texts.items()]
    assert configured(*given) == default


def test_every_key_checks_its_type_and_all_are_named() -> None:
    default = configured()
    null_lists = ("capture.taps", "drafter.layer_types", "prompts.categories")

    def wrong(key: str) -> str:
        listed = isinstance(value(default, key), dict | list) or key in null_lists
        return "3" if listed else "[{a: 1}]"

    with pytest.raises(ValueError, match="settings:") as caught:
        configured(*(f"{key}={wrong(key)}" for key in keys()))
    named = [line.split("=")[0].strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(named) == sorted(keys())


def test_settings_are_frozen() -> None:
    config = configured()
    with pytest.raises(FrozenInstanceError):
        config.name = "other"
    with pytest.raises(FrozenInstanceError):
        config.train.lr = 1.0


def test_all_problems_come_in_one_message() -> None:
    with pytest.raises(ValueError, match="settings:") as caught:
        configured(
            "drafter.block_size=1",
            "drafter.sample_from_anchor=false",
            "train.lr=-1",
            "schedule=both",
            "bench.temperatures=[]",
            "rollout.top_p=0",
        )
    lines = str(caught.value).splitlines()
    assert lines[0] == "settings:"
    named = [line.split("=")[0].strip() for line in lines[1:]]
    assert sorted(named) == [
        "bench.temperatures",
        "drafter.block_size",
        "rollout.top_p",
        "schedule",
        "train.lr",
    ]
    assert all(": expected " in line for line in lines[1:])


def test_all_wrong_types_come_in_one_message() -> None:
    with pytest.raises(ValueError, match="settings:") as caught:
        configured("train.lr=fast", "rollout.top_k=1.5", "+nonsense=1", "train.betas=[a]")
    named = {line.split("=")[0].strip() for line in str(caught.value).splitlines()[1:]}
    assert named == {"train.lr", "rollout.top_k", "nonsense", "train.betas"}


def test_unknown_keys_are_refused() -> None:
    for override in ("+train.speed=1", "+speed=1", "+target.colour=red"):
        with pytest.raises(ValueError, match=override.strip("+").split("=")[0]):
            configured(override)


def test_a_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match=r"target\.name is missing"):
        configured("target.name=???")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["target.dtype=int8"], "target.dtype=int8: expected one of"),
        (["prompts.calibration=0.5", "prompts.held_out=0.5"], "prompts.calibration"),
        (["prompts.source=''"], "prompts.source=: expected"),
        (["capture.taps=[3,1]"], r"capture.taps=\[3, 1\]: expected"),
        (["capture.taps=[]"], r"capture.taps=\[\]: expected"),
        (["drafter.markov_head_type=best"], "drafter.markov_head_type=best"),
        (["drafter.num_attention_heads=4", "drafter.num_key_value_heads=3"], "a divisor of"),
        (["drafter.head_dim=7"], "drafter.head_dim=7: expected an even number"),
        (["drafter.mask_token_id=-1"], "drafter.mask_token_id=-1"),
        (["drafter=dflash", "schedule=staged"], "expected joint where the drafter has no heads"),
        (["train.attention=dense"], "train.attention=dense: expected one of"),
        (["drafter.sliding_window=3"], "expected at least block_size=7"),
        (["objective.kl=-1"], "objective.kl=-1.0: expected at least 0"),
        (["objective.ce=0", "objective.tv=0"], "one of them positive"),
        (["train.betas=[0.9]"], r"train.betas=\[0.9\]: expected two"),
        (["train.workers=-1"], "train.workers=-1: expected at least 0"),
        (["logger.wandb=always"], "logger.wandb=always: expected offline, online or null"),
        (["bench.temperatures=[-1]"], r"bench.temperatures=\[-1"),
        (["generate.proposer=oracle"], "generate.proposer=oracle: expected one of"),
    ],
)
def test_what_contradicts_itself_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        configured(*overrides)


@pytest.mark.parametrize(
    ("fast", "dtype", "precision"),
    [(torch.bfloat16, "bfloat16", "bf16-mixed"), (torch.float32, "float32", "32-true")],
)
def test_auto_is_settled_before_anything_is_recorded(
    monkeypatch: pytest.MonkeyPatch, fast: torch.dtype, dtype: str, precision: str
) -> None:
    monkeypatch.setattr("dspark_train.stages.targets.fast_dtype", lambda device: fast)
    given = configured("experiment=quickstart", "target.dtype=float16", "train.precision=16-mixed")
    assert settled(given) == given
    target, train = replace(given.target, dtype="auto"), replace(given.train, precision="auto")
    config = settled(replace(given, target=target, train=train))
    assert (config.target.dtype, config.train.precision) == (dtype, precision)
