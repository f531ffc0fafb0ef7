"""Lightning's view of a feature store: one deterministic, resumable schedule of batches."""

import hashlib
import signal
from collections.abc import Iterator, Sequence

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from dspark_train.config import TrainConfig
from dspark_train.data.ahead import one_ahead
from dspark_train.data.batch import Batch, collate
from dspark_train.data.online import OnlineFeatures
from dspark_train.data.store import FeatureStore

Features = FeatureStore | OnlineFeatures

# documents of like length meet in a batch: sort within windows of this many batches
BUCKET_BATCHES = 16


def plan_epoch(
    numbers: Sequence[int], lengths: Sequence[int], batch: int, *, seed: int, epoch: int
) -> list[list[int]]:
    """Batches of document numbers for one epoch, the same for everyone who knows (seed, epoch)."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(numbers), generator=generator).tolist()
    shuffled = [numbers[i] for i in order]
    window = batch * BUCKET_BATCHES
    batches = []
    for start in range(0, len(shuffled), window):
        near = sorted(shuffled[start : start + window], key=lambda n: lengths[n])
        batches += [near[i : i + batch] for i in range(0, len(near), batch)]
    return [batches[i] for i in torch.randperm(len(batches), generator=generator).tolist()]


def split_validation(identities: Sequence[str], share: float) -> tuple[list[int], list[int]]:
    """Document numbers for training and validation, split by the identity of their conversation.

    At least one conversation is kept for validation if `share` is positive.
    """
    if share == 0 or len(set(identities)) < 2:
        return list(range(len(identities))), []
    ranked = sorted(set(identities), key=lambda name: hashlib.sha256(name.encode()).digest())
    held = set(ranked[: max(1, round(share * len(ranked)))])
    numbers = range(len(identities))
    return (
        [n for n in numbers if identities[n] not in held],
        [n for n in numbers if identities[n] in held],
    )


class Batches(Dataset):
    """Batch number i of a fixed schedule of (epoch, document numbers)."""

    def __init__(
        self, store: Features, schedule: list[tuple[int, list[int]]], settings: TrainConfig
    ) -> None:
        self.store, self.schedule, self.settings = store, schedule, settings
        self.online = isinstance(store, OnlineFeatures)

    def __len__(self) -> int:
        return len(self.schedule)

    def __getitem__(self, index: int) -> Batch:
        epoch, numbers = self.schedule[index]
        return collate(
            self.store.documents(numbers),
            numbers,
            anchors=self.settings.anchors,
            row_tokens=self.settings.row_tokens,
            seed=self.settings.seed,
            epoch=epoch,
        )


class From:
    """Sampler of the indices `start…total-1` that reports the total as its length."""

    def __init__(self, total: int) -> None:
        self.total, self.start = total, 0

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.total))


def ignore_interrupt(_: int) -> None:
    """Ctrl-C reaches every process; loading workers leave the answer to their parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Loader(DataLoader):
    """Batches of a schedule in order; online ones are made while the one before is trained on."""

    def __init__(self, batches: Batches, workers: int) -> None:
        # a target is not sent to loading workers: it works on a thread of this process
        self.online = batches.online
        super().__init__(
            batches,
            batch_size=None,
            sampler=From(len(batches)),
            num_workers=0 if self.online else workers,
            worker_init_fn=ignore_interrupt,
        )

    def __iter__(self) -> Iterator[Batch]:
        loaded = super().__iter__()
        return one_ahead(loaded) if self.online else loaded


class ResumableLoader(Loader):
    """Continues after the last batch it delivered when Lightning restores its state."""

    delivered = 0

    def __iter__(self) -> Iterator[Batch]:
        self.delivered = self.sampler.start
        for batch in super().__iter__():
            self.delivered += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"delivered": self.delivered}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.sampler.start = state["delivered"]


class FeatureData(LightningDataModule):
    """Training and validation batches of a feature store.

    All epochs form one schedule, which Lightning sees as a single epoch: a checkpoint taken at any
    step names the place to continue by one number.

    Raises:
        ValueError: nothing is left to train on.
    """

    def __init__(self, store: Features, settings: TrainConfig, epochs: int) -> None:
        super().__init__()
        self.store, self.settings = store, settings
        train, held = split_validation(store.identities, settings.validation)
        if not train:
            raise ValueError(
                f"{store.directory} has no document to train on ({len(held)} for validation): "
                "give more prompts, or lower train.validation"
            )
        plan = [
            (epoch, batch)
            for epoch in range(epochs)
            for batch in plan_epoch(
                train, store.lengths, settings.batch_documents, seed=settings.seed, epoch=epoch
            )
        ]
        self.train_batches = Batches(store, plan, settings)
        # validation draws the anchors of epoch -1 every time: its numbers are comparable
        size = settings.batch_documents
        order = sorted(held, key=lambda n: store.lengths[n])
        self.validation_batches = Batches(
            store, [(-1, order[i : i + size]) for i in range(0, len(order), size)], settings
        )
        self.batches_per_epoch = len(plan) // epochs

    def train_dataloader(self) -> ResumableLoader:
        return ResumableLoader(self.train_batches, self.settings.workers)

    def val_dataloader(self) -> Loader:
        return Loader(self.validation_batches, self.settings.workers)
