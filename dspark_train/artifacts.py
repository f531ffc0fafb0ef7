"""Artifacts: what a stage leaves behind, and how the next one knows that it can trust it.

An artifact is a directory. Its files are written to a temporary name, fsynced and renamed; the
manifest comes last, so a directory without one is unfinished work. The manifest holds the settings
of the producer, the fingerprints of its inputs, size and SHA-256 of every file, counts that
reconcile with the input, and the facts which later stages read instead of being told again.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dspark_train import ranks
from dspark_train.aside import MANIFEST, UNFINISHED, finished, read_json, set_aside
from dspark_train.disk import sha256_file, write_atomically

FORMAT_VERSION = 2
# what processes other than the first have finished
OTHERS = "unfinished-*.json"
# names of what is being written: ours, and those that safetensors writes ours by
TEMPORARY = (".*.tmp", ".tmp*")
# of the manifest itself: the SHA-256 of all else in it
CHECKSUM = "manifest_sha256"
# deleted once the artifact is finished
SCRATCH = "scratch"


def fingerprint(stage: str, settings: Mapping[str, Any], inputs: Mapping[str, str]) -> str:
    """SHA-256 of everything that determines what `stage` produces."""
    identity = {
        "version": FORMAT_VERSION,
        "stage": stage,
        "settings": settings,
        "inputs": dict(inputs),
    }
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


class Artifact:
    """A finished artifact, opened for reading: `settings`, `inputs`, `facts`, `counts`, files."""

    def __init__(self, directory: Path, manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.manifest = manifest
        self.stage: str = manifest["stage"]
        self.fingerprint: str = manifest["fingerprint"]
        self.settings: dict[str, Any] = manifest["settings"]
        self.facts: dict[str, Any] = manifest["facts"]
        self.counts: dict[str, Any] = manifest["counts"]
        self.seconds: float = manifest.get("seconds", 0.0)
        self.files = {
            name: (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        }

    @classmethod
    def open(cls, directory: Path | str) -> "Artifact":
        """Open a finished artifact and check that its files are all there with the right sizes.

        Raises:
            ValueError: not an artifact, unfinished, of another format version, or a file is
                missing or truncated; the message names it.
        """
        directory = Path(directory)
        path, redo = directory / MANIFEST, f"redo the stage with force=[{directory.name}]"
        if not path.is_file():
            raise ValueError(
                f"{directory} has no {MANIFEST}: the stage that writes it must run first"
            )
        try:
            manifest = json.loads(path.read_text())
            version = manifest["format_version"]
            artifact = cls(directory, manifest) if version == FORMAT_VERSION else None
            if artifact is not None and manifest.get(CHECKSUM) != manifest_sha(manifest):
                raise ValueError("its own SHA-256 differs")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged ({error!r}): {redo}") from error
        if artifact is None:
            raise ValueError(
                f"{path} has format version {version}, this is version {FORMAT_VERSION}: {redo}"
            )
        for name, (written, _) in artifact.files.items():
            file = directory / name
            size = file.stat().st_size if file.is_file() else None
            if size != written:
                found = "is missing" if size is None else f"is truncated to {size:,} bytes"
                raise ValueError(f"{file} {found}, {written:,} were written: {redo}")
        return artifact

    def file(self, name: str) -> Path:
        """Path of a file of this artifact; its content is checked against the manifest.

        Raises:
            ValueError: unknown name, or the bytes differ from those that were written.
        """
        path = self.directory / name
        if name not in self.files:
            raise ValueError(f"{self.directory} has no file {name!r}: {sorted(self.files)}")
        if sha256_file(path) != self.files[name][1]:
            raise ValueError(
                f"{path} is damaged (its SHA-256 differs from the manifest): redo the stage with "
                f"force=[{self.directory.name}]"
            )
        return path

    def folder(self, name: str) -> Path:
        """Path of a folder of this artifact; the content of all its files is checked.

        Raises:
            ValueError: no such folder, or the bytes differ from those that were written.
        """
        inside = [file for file in self.files if file.startswith(f"{name}/")]
        if not inside:
            raise ValueError(f"{self.directory} has no folder {name!r}: {sorted(self.files)}")
        for file in inside:
            self.file(file)
        return self.directory / name

    @property
    def contents(self) -> str:
        """SHA-256 over facts and file checksums: what a later stage's result depends on."""
        state = json.dumps([self.facts, self.files], sort_keys=True, default=str)
        return hashlib.sha256(state.encode()).hexdigest()

    def names(self) -> list[str]:
        """Names of all files, sorted."""
        return list(self.files)


class ArtifactWriter:
    """Writes one artifact, continuing unfinished work of the same fingerprint.

    Nothing on disk changes before the first file is written (or `begin` is called): settings that
    a stage refuses leave what is there alone.
    """

    def __init__(
        self,
        directory: Path,
        stage: str,
        settings: dict[str, Any],
        inputs: dict[str, str],
        *,
        afresh: bool = False,
    ) -> None:
        """Look for unfinished work of the same fingerprint; with `afresh` set it aside, too."""
        self.directory = directory
        self.stage = stage
        self.settings = settings
        self.inputs = inputs
        self.fingerprint = fingerprint(stage, settings, inputs)
        self._files: dict[str, dict[str, Any]] = {}
        self._begun = False
        if not afresh and not finished(directory) and self._owns(UNFINISHED):
            self._files, self._begun = self._noted(), True

    def begin(self) -> None:
        """Make the directory this work's own; work of another kind in it is set aside."""
        if not self._begun:
            if aside := set_aside(self.directory):
                print(f"{self.stage:<10} other settings or inputs: what was there is now {aside}")
            self._begun = True
            self._save_marker()

    def begin_shared(self) -> None:
        """As `begin`, by all processes of the run, each of which may write files of its own then.

        After a `ranks.wait()` the first one finishes the artifact, with the files of all.
        """
        if ranks.first():
            self.begin()
            self._files = {name: entry for name, entry in self._files.items() if self.has(name)}
            self._save_marker()  # with what an earlier run's other processes have left
            # what was being written when a process was killed, and what is in our own notes now
            for kind in (*TEMPORARY, OTHERS):
                for path in self.directory.glob(kind):
                    path.unlink() if path.is_file() else shutil.rmtree(path)
        ranks.wait()
        self._files, self._begun = self._noted(), True

    def _owns(self, name: str) -> bool:
        state = read_json(self.directory / name)
        return state is not None and state.get("fingerprint") == self.fingerprint

    def _noted(self) -> dict[str, dict[str, Any]]:
        """Files that all processes have finished so far."""
        others = sorted(path.name for path in self.directory.glob(OTHERS))
        files: dict[str, dict[str, Any]] = {}
        for name in filter(self._owns, [UNFINISHED, *others]):
            files |= (read_json(self.directory / name) or {}).get("files", {})
        return files

    def _save_marker(self) -> None:
        state = {"fingerprint": self.fingerprint, "files": self._files}
        name = UNFINISHED if ranks.first() else OTHERS.replace("*", str(ranks.rank()))
        write_atomically(self.directory / name, json.dumps(state, indent=1).encode())

    def has(self, name: str) -> bool:
        """Whether `name` was already finished, by this run or by one that was interrupted."""
        entry = self._files.get(name)
        path = self.directory / name
        return entry is not None and path.is_file() and path.stat().st_size == entry["bytes"]

    def path(self, name: str) -> Path:
        """Where a file or folder of that name lies."""
        return self.directory / name

    @property
    def scratch(self) -> Path:
        """A folder for what only unfinished work needs; it goes when the artifact is finished."""
        return self.directory / SCRATCH

    def write(self, name: str, content: bytes | Callable[[Path], None]) -> None:
        """Write a file or a folder atomically and note sizes and SHA-256."""
        self.begin()
        write_atomically(self.directory / name, content)
        self.add(name)

    def add(self, name: str) -> None:
        """Take in a file or a folder that a library wrote into the directory."""
        path = self.directory / name
        inside = f"{name}/"
        self._files = {f: e for f, e in self._files.items() if not f.startswith(inside)}
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
        for file in files:
            entry = {"bytes": file.stat().st_size, "sha256": sha256_file(file)}
            self._files[file.relative_to(self.directory).as_posix()] = entry
        self._save_marker()

    def finish(
        self, *, counts: dict[str, Any], facts: dict[str, Any], seconds: float = 0.0
    ) -> Artifact:
        """Write the manifest, after which the artifact exists."""
        self.begin()
        files = self._files | {n: e for n, e in self._noted().items() if n not in self._files}
        manifest = {
            "format_version": FORMAT_VERSION,
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "settings": self.settings,
            "inputs": self.inputs,
            "counts": counts,
            "facts": facts,
            "seconds": round(seconds, 3),
            "files": dict(sorted(files.items())),
        }
        manifest = json.loads(json.dumps(manifest, default=str))
        manifest[CHECKSUM] = manifest_sha(manifest)
        write_atomically(self.directory / MANIFEST, json.dumps(manifest, indent=1).encode())
        tidy(self.directory)
        return Artifact.open(self.directory)


def tidy(directory: Path) -> None:
    """Remove from a finished artifact what only unfinished work needs.

    A process that is killed just behind the manifest leaves that.
    """
    for path in (directory / UNFINISHED, *directory.glob(OTHERS)):
        path.unlink(missing_ok=True)
    shutil.rmtree(directory / SCRATCH, ignore_errors=True)


def manifest_sha(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest's content, as JSON reads it, without the entry for itself."""
    content = {key: value for key, value in manifest.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def recorded_settings(directory: Path) -> dict[str, Any]:
    """What a finished artifact says it was made with; nothing where there is none to read."""
    return (read_json(directory / MANIFEST) or {}).get("settings", {})
