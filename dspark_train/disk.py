"""Writing to disk: whole files or none, and a full disk said in words."""

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

LOCK = ".lock"
# no space, over quota, file larger than allowed
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, read in pieces."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


@contextlib.contextmanager
def full_disk_explained(path: Path) -> Iterator[None]:
    """Whatever a library makes of a full disk becomes one message that says what to do.

    Raises:
        ValueError: the disk is full; `path` is what was being written.
    """
    try:
        yield
    except Exception as error:
        number = getattr(error, "errno", None)
        # safetensors wraps the operating system's error in one of its own
        if number in FULL or any(f"os error {code})" in str(error) for code in FULL):
            raise ValueError(
                f"disk full while writing {path}: finished files are kept; free some space and run "
                "the same command again to continue"
            ) from error
        raise


@contextlib.contextmanager
def exclusive(directory: Path) -> Iterator[None]:
    """Keep a directory to this process; the operating system lets go of it when the process ends.

    Raises:
        ValueError: another process has it, whose number is named.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            raise ValueError(
                f"{directory} is being worked on by another run (process {lock.read().strip()}): "
                "wait for it, or give this one a folder of its own with name=… or run_dir=…"
            ) from error
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        try:
            yield
        finally:
            if os.listdir(directory) == [LOCK]:  # nothing was written: nothing is left
                path.unlink()
                directory.rmdir()


def commit(temporary: Path, path: Path) -> None:
    """Give a finished file or folder its name, so that it survives a power cut under it."""
    files = [temporary] if temporary.is_file() else sorted(temporary.rglob("*"))
    for part in (file for file in files if file.is_file()):
        with part.open("rb+") as handle:
            os.fsync(handle.fileno())
    if path.is_dir():
        shutil.rmtree(path)
    temporary.replace(path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)  # the rename itself
    finally:
        os.close(directory)


def write_atomically(path: Path, content: bytes | Callable[[Path], None]) -> None:
    """Write a file or a folder whole or not at all.

    Args:
        path: of the file or the folder; what was there is replaced.
        content: the bytes, or a writer that is given a temporary path.

    Raises:
        ValueError: the disk is full; what was there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with full_disk_explained(path):
            if callable(content):
                content(temporary)
            else:
                temporary.write_bytes(content)
            commit(temporary, path)
    except BaseException:  # Ctrl-C too
        if temporary.is_dir():
            shutil.rmtree(temporary)
        temporary.unlink(missing_ok=True)
        raise


def nearest_folder(directory: Path) -> Path:
    """The folder, or the nearest one above it that exists: on the same disk."""
    return next(folder for folder in (directory, *directory.absolute().parents) if folder.is_dir())


def check_space(directory: Path, needed_bytes: int, what: str) -> None:
    """Refuse to start work that cannot fit.

    Raises:
        ValueError: fewer than `needed_bytes` are free where `directory` lies or will lie.
    """
    free = shutil.disk_usage(nearest_folder(directory)).free
    if needed_bytes > free:
        raise ValueError(
            f"{what} needs about {needed_bytes / 1e9:.2f} GB in {directory}, {free / 1e9:.2f} GB "
            "are free: free some space, or set run_dir to another disk"
        )
