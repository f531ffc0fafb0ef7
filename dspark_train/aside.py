"""Which work a directory holds, and what happens to it when other work takes its place.

Work of other settings in the same directory is set aside, never deleted: a finished artifact under
`<directory>.previous`, an unfinished one under `<directory>.unfinished` (one generation of each).
"""

import json
import shutil
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"


def finished(directory: Path) -> bool:
    """Whether a directory holds a finished artifact (its files may be damaged)."""
    return (directory / MANIFEST).exists()


def set_aside(directory: Path) -> Path | None:
    """Move a directory out of the way, replacing an older one there; where it lies now, if any."""
    if not directory.exists() or not any(directory.iterdir()):
        return None
    kind = "previous" if finished(directory) else "unfinished"
    aside = directory.with_name(f"{directory.name}.{kind}")
    _move(directory, aside)
    return aside


def bring_back(directory: Path, wanted: str) -> bool:
    """Bring back set-aside work of the fingerprint `wanted`, in exchange for what is there.

    Returns whether there was such work. Does nothing where the directory itself holds it.
    """

    def holds(place: Path) -> bool:
        state = read_json(place / (MANIFEST if finished(place) else UNFINISHED))
        return state is not None and state.get("fingerprint") == wanted

    if holds(directory):
        return False
    for kind in ("previous", "unfinished"):
        aside = directory.with_name(f"{directory.name}.{kind}")
        if holds(aside):
            moving = directory.with_name(f"{directory.name}.returning")
            _move(aside, moving)
            set_aside(directory)
            _move(moving, directory)
            return True
    return False


def _move(source: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    source.rename(target)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if there is none that can be read."""
    try:
        state = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return state if isinstance(state, dict) else None
