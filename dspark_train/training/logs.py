"""Where metrics go: CSV always, wandb and TensorBoard by configuration."""

import contextlib
import csv
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger

from dspark_train.config import LoggerConfig
from dspark_train.disk import write_atomically

FOLDER, METRICS = "logs", "metrics.csv"
LOSS = "train/loss"


def loggers(settings: LoggerConfig, directory: Path, name: str) -> list[Logger]:
    """Loggers that write below `directory`.

    Raises:
        ValueError: TensorBoard or wandb is asked for and cannot be used.
    """
    chosen: list[Logger] = [CSVLogger(directory, name=FOLDER, version="")]
    if settings.wandb:
        chosen.append(_wandb(settings, directory, name))
    if settings.tensorboard:
        try:
            chosen.append(TensorBoardLogger(directory, name="tensorboard", version=""))
        except ModuleNotFoundError as error:
            raise ValueError(
                "logger.tensorboard=true needs a package: pip install tensorboard"
            ) from error
    return chosen


def _wandb(settings: LoggerConfig, directory: Path, name: str) -> Logger:
    import wandb

    wandb.setup(wandb.Settings(silent=True, mode=settings.wandb))
    if settings.wandb == "online" and not wandb.api.api_key:
        raise ValueError(
            "logger.wandb=online needs a login: run `wandb login` first, or take logger.wandb="
            "offline and upload later with `wandb sync`"
        )
    return WandbLogger(
        name=name,
        project=settings.project,
        save_dir=directory,
        offline=settings.wandb == "offline",
    )


def close(settings: LoggerConfig) -> None:
    """End the run of wandb, which would go on in the next stage."""
    if settings.wandb:
        import wandb

        wandb.finish()


@contextlib.contextmanager
def whole_metrics(directory: Path, earlier: Path, resumed: bool) -> Iterator[None]:
    """Within the context a CSV logger writes; afterwards its file has what came before, too.

    The logger starts a new file. When training was interrupted, the rows before the step at which
    it continues, kept in `earlier` meanwhile, are put in front.
    """
    metrics = directory / FOLDER / METRICS
    if not resumed:
        earlier.unlink(missing_ok=True)
        metrics.unlink(missing_ok=True)
    elif metrics.is_file():
        _join(earlier, metrics, earlier)
        metrics.unlink()
    try:
        yield
    finally:
        if earlier.is_file():
            _join(earlier, metrics, metrics)
            earlier.unlink()


def _join(first: Path, second: Path, result: Path) -> None:
    """Rows of `first` before the first training step of `second`, then those of `second`."""
    new, old = _rows(second), _rows(first)
    begin = min((int(row["step"]) for row in new if row.get(LOSS)), default=None)
    rows = [row for row in old if begin is None or int(row["step"]) < begin] + new
    columns = sorted({key for row in rows for key in row})

    def write(path: Path) -> None:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=columns)
            writer.writeheader()
            writer.writerows(rows)

    write_atomically(result, write)


def _rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
