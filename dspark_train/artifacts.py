"""Artifacts: what a stage leaves behind, and how the next one knows that it can trust it.

An artifact is a directory. Its files are written to a temporary name, fsynced and renamed; the
manifest comes last, so a directory without one is unfinished work. The manifest holds the settings
of the producer, the fingerprints of its inputs, size and SHA-256 of every file, counts that
reconcile with the input, and the facts which later stages read instead of being told again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
UNFINISHED = "unfinished.json"


def fingerprint(stage: str, settings: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """SHA-256 of everything that determines what `stage` produces."""
    identity = {
        "version": FORMAT_VERSION,
        "stage": stage,
        "settings": settings,
        "inputs": dict(inputs),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def write_atomically(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Write `path` whole or not at all. `content` is the bytes, or a writer given a temporary path.

    Raises:
        ValueError: the disk is full; what was there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        if callable(content):
            content(temporary)
        else:
            temporary.write_bytes(content)
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.replace(path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        # safetensors wraps the operating system's error in one of its own
        if "No space left" in str(error) or "os error 28" in str(error):
            raise ValueError(
                f"disk full while writing {path}: finished files are kept; free some space and run "
                "the same command again to continue"
            ) from error
        raise
    # the rename itself must survive a power cut too
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def check_space(directory: Path, needed_bytes: int, what: str) -> None:
    """Refuse to start work that cannot fit.

    Raises:
        ValueError: fewer than `needed_bytes` are free where `directory` lies.
    """
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise ValueError(
            f"{what} needs about {needed_bytes / 1e9:.2f} GB in {directory}, {free / 1e9:.2f} GB "
            "are free: free some space, or set run_dir to another disk"
        )


class Artifact:
    """A finished artifact, opened for reading: `settings`, `inputs`, `facts`, `counts`, files."""

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.manifest = manifest
        self.fingerprint: str = manifest["fingerprint"]
        self.settings: dict[str, Any] = manifest["settings"]
        self.facts: dict[str, Any] = manifest["facts"]
        self.counts: dict[str, Any] = manifest["counts"]
        self.seconds: float = manifest.get("seconds", 0.0)

    @classmethod
    def open(cls, directory: Path | str) -> "Artifact":
        """Open a finished artifact and check that its files are all there with the right sizes.

        Raises:
            ValueError: not an artifact, unfinished, of another format version, or a file is
                missing or truncated; the message names it.
        """
        directory = Path(directory)
        path = directory / MANIFEST
        if not path.is_file():
            raise ValueError(
                f"{directory} has no {MANIFEST}: the stage that writes it must run first"
            )
        try:
            manifest = json.loads(path.read_text())
            version, files = manifest["format_version"], manifest["files"]
            artifact = cls(directory, manifest)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is damaged ({error!r}): redo the stage with force=[{directory.name}]"
            ) from error
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{path} has format version {version}, this is version {FORMAT_VERSION}: redo the "
                f"stage with force=[{directory.name}]"
            )
        for name, entry in files.items():
            file = directory / name
            size = file.stat().st_size if file.is_file() else None
            if size != entry["bytes"]:
                found = "is missing" if size is None else f"has {size:,} bytes"
                raise ValueError(
                    f"{file} {found}, {entry['bytes']:,} were written: redo the stage with "
                    f"force=[{directory.name}]"
                )
        return artifact

    def file(self, name: str) -> Path:
        """Path of a file of this artifact; its content is checked against the manifest.

        Raises:
            ValueError: unknown name, or the bytes differ from those that were written.
        """
        entry = self.manifest["files"].get(name)
        path = self.directory / name
        if entry is None:
            raise ValueError(f"{self.directory} has no file {name!r}: {sorted(self.names())}")
        if sha256_file(path) != entry["sha256"]:
            raise ValueError(
                f"{path} is damaged (its SHA-256 differs from the manifest): redo the stage with "
                f"force=[{self.directory.name}]"
            )
        return path

    def names(self) -> list[str]:
        """Names of all files, in the order in which they were written."""
        return list(self.manifest["files"])


class ArtifactWriter:
    """Writes one artifact, continuing unfinished work of the same fingerprint.

    Work of another fingerprint in the same directory is set aside under `<directory>.previous`
    (one generation), never deleted in place.
    """

    def __init__(
        self, directory: Path, stage: str, settings: dict[str, Any], inputs: dict[str, str]
    ) -> None:
        self.directory = directory
        self.stage = stage
        self.settings = settings
        self.inputs = inputs
        self.fingerprint = fingerprint(stage, settings, inputs)
        self._files: dict[str, dict[str, Any]] = {}
        marker = directory / UNFINISHED
        if self._fingerprint_of(marker) == self.fingerprint and not (directory / MANIFEST).exists():
            self._files = json.loads(marker.read_text())["files"]
        else:
            set_aside(directory)
            self._save_marker()

    @staticmethod
    def _fingerprint_of(path: Path) -> str | None:
        try:
            return json.loads(path.read_text())["fingerprint"]
        except (OSError, ValueError, KeyError):
            return None

    def _save_marker(self) -> None:
        state = {"fingerprint": self.fingerprint, "files": self._files}
        write_atomically(self.directory / UNFINISHED, json.dumps(state, indent=1).encode())

    def has(self, name: str) -> bool:
        """Whether `name` was already finished, by this run or by one that was interrupted."""
        entry = self._files.get(name)
        path = self.directory / name
        return entry is not None and path.is_file() and path.stat().st_size == entry["bytes"]

    def path(self, name: str) -> Path:
        """Where `name` lies; scratch files outside the artifact may live there too."""
        return self.directory / name

    def write(self, name: str, content: bytes | Callable[[Path], None]) -> None:
        """Write a file atomically and note its size and SHA-256."""
        write_atomically(self.directory / name, content)
        self.add(name)

    def add(self, name: str) -> None:
        """Take in a file that a library wrote into the directory."""
        path = self.directory / name
        self._files[name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        self._save_marker()

    def finish(
        self, *, counts: dict[str, Any], facts: dict[str, Any], seconds: float = 0.0
    ) -> Artifact:
        """Write the manifest, after which the artifact exists."""
        manifest = {
            "format_version": FORMAT_VERSION,
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
            "inputs": self.inputs,
            "counts": counts,
            "facts": facts,
            "seconds": round(seconds, 3),
            "files": self._files,
        }
        write_atomically(
            self.directory / MANIFEST, json.dumps(manifest, indent=1, default=str).encode()
        )
        (self.directory / UNFINISHED).unlink(missing_ok=True)
        return Artifact.open(self.directory)


def set_aside(directory: Path) -> None:
    """Move a directory out of the way to `<directory>.previous`, replacing an older one there."""
    if not directory.exists() or not any(directory.iterdir()):
        return
    previous = directory.with_name(f"{directory.name}.previous")
    if previous.exists():
        shutil.rmtree(previous)
    directory.rename(previous)
