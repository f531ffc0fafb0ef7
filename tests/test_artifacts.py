"""Artifacts: written whole or not at all, continued, set aside, and refused when damaged."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dspark_train import artifacts
from dspark_train.artifacts import Artifact, ArtifactWriter
from dspark_train.aside import bring_back
from dspark_train.disk import check_space, full_disk_explained, write_atomically

LETTERS = ("a", "b", "c")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "stage"


def writer(place: Path, settings: int = 1, **options: bool) -> ArtifactWriter:
    return ArtifactWriter(place, "stage", {"value": settings}, {"before": "abc"}, **options)


def finish(place: Path, settings: int = 1, **options: bool) -> Artifact:
    """An artifact of three files and a folder, as much of it as is missing."""
    work = writer(place, settings, **options)
    for letter in LETTERS:
        if not work.has(letter):
            work.write(letter, (letter * 100 + str(settings)).encode())
    work.write("folder", lambda path: (path.mkdir(), (path / "d").write_text("d"))[0])
    return work.finish(counts={"kept": 3}, facts={"letters": list(LETTERS)}, seconds=1.5)


def test_what_is_written_is_found_again(place: Path) -> None:
    finish(place)
    artifact = Artifact.open(place)
    assert artifact.names() == [*LETTERS, "folder/d"]
    assert artifact.file("b").read_text() == "b" * 100 + "1"
    assert artifact.folder("folder") == place / "folder"
    assert (artifact.facts, artifact.counts) == ({"letters": list(LETTERS)}, {"kept": 3})
    assert (artifact.stage, artifact.seconds) == ("stage", 1.5)
    assert sorted(path.name for path in place.iterdir()) == [*LETTERS, "folder", "manifest.json"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, b"old")

    def half(temporary: Path) -> None:
        temporary.write_bytes(b"ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, half)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_replaces_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "folder"

    def one(name: str) -> Callable[[Path], None]:
        return lambda folder: (folder.mkdir(), (folder / name).write_text(name))[0]

    write_atomically(path, one("a"))
    write_atomically(path, one("b"))
    assert [file.name for file in path.iterdir()] == ["b"]
    assert list(tmp_path.iterdir()) == [path]


def test_unfinished_work_is_no_artifact_and_is_continued(place: Path) -> None:
    work = writer(place)
    work.write("a", b"from before")
    with pytest.raises(ValueError, match=r"stage has no manifest\.json.*must run first"):
        Artifact.open(place)
    again = writer(place)
    assert again.has("a")
    assert not again.has("b")
    assert finish(place).file("a").read_bytes() == b"from before"


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    """Under our name for it, or under the one that safetensors makes up inside of ours."""
    place = tmp_path / "capture"
    ArtifactWriter(place, "capture", {}, {}).write("first", b"1")
    (place / ".second.tmp").write_bytes(b"2")
    (place / ".tmpBJtXvT").write_bytes(b"22")
    (place / ".drafter.tmp").mkdir()
    again = ArtifactWriter(place, "capture", {}, {})
    again.begin_shared()
    assert again.has("first")
    assert {path.name for path in place.iterdir()} == {"first", artifacts.UNFINISHED}


def test_a_file_that_changed_size_since_is_written_again(place: Path) -> None:
    writer(place).write("a", b"from before")
    (place / "a").write_bytes(b"from")
    assert not writer(place).has("a")


def test_nothing_moves_before_the_first_file(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings that a stage refuses must not cost what is finished, nor say that it moved."""
    finish(place)
    work = writer(place, settings=2)
    assert not work.has("a")
    assert Artifact.open(place).settings == {"value": 1}
    assert not capsys.readouterr().out
    work.write("a", b"new")
    assert capsys.readouterr().out.endswith("was there is now " + f"{place}.previous\n")
    assert Artifact.open(place.with_name("stage.previous")).settings == {"value": 1}


def test_other_work_is_set_aside_and_comes_back(place: Path) -> None:
    first = finish(place)
    writer(place, settings=2).write("a", b"unfinished")
    # a second change of mind moves the unfinished work, not the finished one
    writer(place, settings=3).write("a", b"also unfinished")
    aside = place.with_name("stage.previous"), place.with_name("stage.unfinished")
    assert Artifact.open(aside[0]).fingerprint == first.fingerprint
    assert (aside[1] / "a").read_bytes() == b"unfinished"
    assert bring_back(place, first.fingerprint)
    assert Artifact.open(place).fingerprint == first.fingerprint
    assert (aside[1] / "a").read_bytes() == b"also unfinished"
    assert not bring_back(place, first.fingerprint)


def test_unfinished_work_comes_back_too(place: Path) -> None:
    writer(place, settings=2).write("a", b"unfinished")
    finish(place, settings=1)
    assert bring_back(place, writer(place, settings=2).fingerprint)
    assert writer(place, settings=2).has("a")
    assert Artifact.open(place.with_name("stage.previous")).settings == {"value": 1}


def test_afresh_starts_over(place: Path) -> None:
    writer(place).write("a", b"from before")
    assert not writer(place, afresh=True).has("a")
    assert finish(place, afresh=True).file("a").read_text() == "a" * 100 + "1"


def test_scratch_goes_when_the_artifact_is_finished(place: Path) -> None:
    work = writer(place)
    work.begin()
    work.scratch.mkdir()
    (work.scratch / "big").write_text("x")
    finish(place)
    assert not work.scratch.exists()


def damage(place: Path, change: str) -> None:
    path, manifest = place / "b", place / "manifest.json"
    state = json.loads(manifest.read_text())
    match change:
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case "empty":
            path.write_bytes(b"")
        case "missing":
            path.unlink()
        case "flipped":
            path.write_bytes(path.read_bytes()[:-1] + b"?")
        case "manifest cut":
            manifest.write_text(manifest.read_text()[:-30])
        case "manifest empty":
            manifest.write_text("")
        case "manifest list":
            manifest.write_text("[]")
        case "manifest binary":
            manifest.write_bytes(b"\xff\xfe\x00")
        case "no facts":
            del state["facts"]
            manifest.write_text(json.dumps(state))
        case "files list":
            state["files"] = ["b"]
            manifest.write_text(json.dumps(state))
        case "version":
            state = {"format_version": 99}
            manifest.write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("truncated", r"stage/b is truncated to 100 bytes, 101 were written: redo .*force=\[stage"),
        ("empty", r"stage/b is truncated to 0 bytes"),
        ("missing", r"stage/b is missing, 101 were written: redo"),
        ("flipped", r"stage/b is damaged \(its SHA-256 differs from the manifest\): redo"),
        ("manifest cut", r"stage/manifest\.json is damaged .*redo the stage with force=\[stage\]"),
        ("manifest empty", r"stage/manifest\.json is damaged"),
        ("manifest list", r"stage/manifest\.json is damaged"),
        ("manifest binary", r"stage/manifest\.json is damaged"),
        ("no facts", r"stage/manifest\.json is damaged \(KeyError\('facts'\)\)"),
        ("files list", r"stage/manifest\.json is damaged"),
        ("version", r"manifest\.json has format version 99, this is version 2: redo"),
    ],
)
def test_damage_is_refused_by_name(place: Path, change: str, message: str) -> None:
    finish(place)
    damage(place, change)
    with pytest.raises(ValueError, match=message):
        Artifact.open(place).file("b")


def test_damage_in_a_folder_is_refused(place: Path) -> None:
    finish(place)
    (place / "folder" / "d").write_text("e")
    with pytest.raises(ValueError, match=r"folder/d is damaged"):
        Artifact.open(place).folder("folder")


def test_unknown_names_are_refused_with_the_known_ones(place: Path) -> None:
    artifact = finish(place)
    with pytest.raises(ValueError, match=r"has no file 'z': \['a', 'b', 'c', 'folder/d'\]"):
        artifact.file("z")
    with pytest.raises(ValueError, match="has no folder 'z'"):
        artifact.folder("z")


@pytest.mark.parametrize("call", ["fsync", "write"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_finished_files_and_the_work_continues(
    place: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    writer(place).write("a", b"from before")

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        if call == "fsync":
            patch.setattr(os, "fsync", full)
        else:
            patch.setattr(Path, "write_bytes", full)
        with pytest.raises(ValueError, match=r"disk full while writing .*stage/b: finished files"):
            writer(place).write("b", b"new")
    assert not list(place.glob(".*"))
    artifact = finish(place)
    assert artifact.file("a").read_bytes() == b"from before"
    assert artifact.file("b").read_text().startswith("bbb")


def write_large(path: Path) -> None:
    """Write a megabyte where only a hundred kilobytes are allowed."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    write_atomically(path, lambda file: save_file({"a": torch.zeros(250_000)}, file))


def test_a_file_that_may_not_grow_is_explained(tmp_path: Path) -> None:
    """The real error of the operating system, through a library that wraps it."""
    code = (
        "import sys, pathlib, tests.test_artifacts as t; t.write_large(pathlib.Path(sys.argv[1]))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "file")], capture_output=True, text=True
    )
    assert "ValueError: disk full while writing" in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    with pytest.raises(PermissionError), full_disk_explained(tmp_path):
        raise PermissionError(errno.EACCES, "denied")


def test_too_little_space_is_refused_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    check_space(tmp_path / "not" / "yet", 10**9, "it")
    with pytest.raises(ValueError, match=r"it needs about 2\.50 GB in .*yet, 1\.00 GB are free"):
        check_space(tmp_path / "not" / "yet", 25 * 10**8, "it")
    assert not (tmp_path / "not").exists()


def test_the_fingerprint_is_of_settings_inputs_and_stage() -> None:
    base = ("s", {"a": 1, "b": 2}, {"x": "1"})
    assert artifacts.fingerprint(*base) == artifacts.fingerprint("s", {"b": 2, "a": 1}, {"x": "1"})
    others = [("t", *base[1:]), ("s", {"a": 2, "b": 2}, base[2]), (*base[:2], {"x": "2"})]
    assert len({artifacts.fingerprint(*one) for one in (base, *others)}) == 4
