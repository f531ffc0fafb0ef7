"""Rows of prompt sources: files and datasets, read one by one."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def source_rows(
    source: str, dataset_split: str, key: str = "prompts.source"
) -> Iterator[tuple[int, Any]]:
    """Yield (number from 1, row); a row that cannot be read is None, blank lines are skipped.

    Args:
        source: a `.jsonl` or `.parquet` file, a folder or a dataset's name (`name:configuration`).
        dataset_split: of a dataset; files have none.
        key: the setting that named the source, for messages.

    Raises:
        ValueError: if the source does not exist or cannot be read.
    """
    path = Path(source).expanduser()
    known = path.suffix in (".jsonl", ".parquet")
    if path.is_file() and not known:
        raise ValueError(f"{key}={source}: expected a .jsonl or .parquet file")
    if not path.exists() and (known or source.startswith(("/", ".", "~"))):
        raise ValueError(f"{key}={source} does not exist; expected a file or a dataset")
    if not path.is_file():
        yield from enumerate(_dataset_rows(source, dataset_split, key), 1)
        return
    if path.suffix == ".parquet":
        yield from enumerate(_parquet_rows(path, key), 1)
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError:
                    yield number, None


def _parquet_rows(path: Path, key: str) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{key}={path} is not a readable Parquet file: {error}") from error


def _dataset_rows(source: str, dataset_split: str, key: str) -> Iterator[Any]:
    import datasets

    name, _, configuration = source.partition(":")
    try:
        # streaming: neither a second copy on disk nor all rows in memory
        yield from datasets.load_dataset(
            name, configuration or None, split=dataset_split, streaming=True
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = str(error).strip().split("\n", 1)[0]
        raise ValueError(
            f"{key}={source} (split {dataset_split}) could not be loaded "
            f"({type(error).__name__}: {reason}); check the name and the connection, or give a "
            ".jsonl or .parquet file"
        ) from error
