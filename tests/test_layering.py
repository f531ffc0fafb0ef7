"""The order of the house: who may import whom, and how long a file may be."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dspark_train

PACKAGE = Path(dspark_train.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
# from the bottom up; what shares a line does not know each other
LAYERS = (
    ("blocks", "disk", "ranks", "aside"),
    ("artifacts",),
    ("target",),
    ("objective", "drafter"),
    ("calibration", "formats"),
    ("decoding",),
    ("serving",),
    ("config_data", "config_decoding", "config_training"),
    ("config", "validation_bench"),
    ("validation_drafter",),
    ("data", "validation", "noise"),
    ("training",),
    ("stages",),
    ("pipeline",),
    ("__main__",),
)
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}
MAX_LINES = 300


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Full names of all modules and names that a file imports, inside functions, too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_imports_point_downwards(path: Path) -> None:
    own = part_of(path)
    if own == "__init__":
        assert not list(imports(path))
        return
    assert own in HEIGHT, f"{own} has no place in LAYERS"
    for name in imports(path):
        package, _, rest = name.partition(".")
        if package == "dspark_train" and rest not in ("", "__version__"):
            other = rest.split(".")[0]
            assert other == own or HEIGHT[other] < HEIGHT[own], f"{own} imports {name}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_only_the_target_loads_models_of_transformers(path: Path) -> None:
    found = [name for name in imports(path) if name.startswith("transformers.Auto")]
    assert part_of(path) == "target" or not found


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("dspark_train.decoding", {"lightning", "hydra", "omegaconf", "datasets", "wandb"}),
        ("dspark_train.blocks", {"lightning", "hydra", "omegaconf", "transformers"}),
        ("dspark_train.stages.generate", {"lightning", "hydra", "datasets", "wandb"}),
    ],
)
def test_what_is_not_needed_is_not_loaded(module: str, absent: set[str]) -> None:
    code = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not absent & set(loaded)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_files_stay_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_LINES, f"{path} has {lines} lines: split it"


def test_there_is_no_drawer_for_everything() -> None:
    assert not [path for path in FILES if path.stem in ("utils", "helpers", "misc", "common")]
