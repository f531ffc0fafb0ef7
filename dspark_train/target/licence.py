"""The licence of a target, where its files say it."""

import re
from importlib import metadata
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from dspark_train.target.loading import PACKAGE_PREFIX


def licence_of(name: str) -> str | None:
    """What the package, the folder or the cached hub page of a target says; None: nothing.

    Nothing is downloaded for it.
    """
    if name.startswith(PACKAGE_PREFIX):
        try:
            about = metadata.metadata(name.removeprefix(PACKAGE_PREFIX))
        except metadata.PackageNotFoundError:
            return None
        return about.get("License-Expression") or about.get("License")
    page: str | Path | None = Path(name).expanduser() / "README.md"
    if not page.is_file():
        cached = try_to_load_from_cache(name, "README.md") if name.count("/") == 1 else None
        page = Path(cached) if isinstance(cached, str) else None
    if page is None:
        return None
    found = re.search(r"^license:\s*(\S+)", page.read_text(errors="replace"), re.MULTILINE)
    return found[1] if found else None
