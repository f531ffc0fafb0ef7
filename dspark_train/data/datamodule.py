"""Lightning's view of a feature store: one deterministic, resumable schedule of batches."""

import hashlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset

from dspark_train import ranks
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


@dataclass(frozen=True)
class Shares:
    """How the documents of one optimiser step are shared out.

    Every process gets the same number of micro-batches, whatever it has to put into them, so that
    all of them step together: what is left over stays empty. Which documents form a step does not
    depend on any of this.

    Attributes:
        processes: that share a step.
        micro_batches: of one process for one step.
    """

    processes: int
    micro_batches: int

    @classmethod
    def of(cls, batch_documents: int, micro_documents: int, processes: int) -> "Shares":
        """Of `batch_documents`, at most `micro_documents` (0: any number) in a micro-batch."""
        share = -(-batch_documents // processes)
        return cls(processes, -(-share // (micro_documents or share)))

    def micro_batch(self, documents: Sequence[int], rank: int, number: int) -> list[int]:
        """Documents of one micro-batch of one process; maybe none."""
        own = documents[rank :: self.processes]
        size = -(-len(own) // self.micro_batches)
        return list(own[number * size : (number + 1) * size])


class Batches(Dataset):
    """Micro-batches of one process, for a fixed schedule of steps: (epoch, document numbers)."""

    def __init__(
        self,
        store: Features,
        schedule: list[tuple[int, list[int]]],
        settings: TrainConfig,
        shares: Shares,
        rank: int = 0,
    ) -> None:
        self.store, self.schedule, self.settings = store, schedule, settings
        self.shares, self.rank = shares, rank
        self.online = isinstance(store, OnlineFeatures)

    def __len__(self) -> int:
        return len(self.schedule) * self.shares.micro_batches

    def documents(self, index: int) -> list[int]:
        """Numbers of the documents that micro-batch `index` is made of."""
        step, number = divmod(index, self.shares.micro_batches)
        return self.shares.micro_batch(self.schedule[step][1], self.rank, number)

    def __getitem__(self, index: int) -> Batch:
        epoch, step = self.schedule[index // self.shares.micro_batches]
        numbers = self.documents(index)
        # gradients meet in every process: who has no document takes one, without any anchor
        shown = numbers or [min(step, key=lambda n: self.store.lengths[n])]
        return collate(
            self.store.documents(shown),
            shown,
            anchors=self.settings.anchors if numbers else 0,
            row_tokens=self.settings.row_tokens,
            seed=self.settings.seed,
            epoch=epoch,
        )


def ignore_signals(_: int) -> None:
    """Signals reach every process of a group; loading workers leave the answer to their parent."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


class Loader(DataLoader):
    """Micro-batches in order, from number `start` on; its length is what remains.

    Online ones are made while the one before is trained on, unless the target is sharded.
    """

    def __init__(self, batches: Batches, workers: int, start: int = 0) -> None:
        # a target is not sent to loading workers: it works on a thread of this process
        self.online = batches.online
        super().__init__(
            batches,
            batch_size=None,
            sampler=range(start, len(batches)),
            num_workers=0 if self.online else workers,
            worker_init_fn=ignore_signals,
        )

    def __iter__(self) -> Iterator[Batch]:
        loaded = super().__iter__()
        return one_ahead(loaded) if self.online and self.dataset.store.ahead else loaded


class FeatureData(LightningDataModule):
    """Training and validation batches of a feature store, for one of `processes`.

    All epochs form one schedule of optimiser steps, which Lightning sees as a single epoch.
    `start` is the step at which training continues. The schedule depends on the settings alone, so
    that any number of processes makes the same steps.

    Raises:
        ValueError: nothing is left to train on.
    """

    def __init__(
        self, store: Features, settings: TrainConfig, epochs: int, processes: int = 1
    ) -> None:
        super().__init__()
        self.store, self.settings, self.start = store, settings, 0
        train, self.held = split_validation(store.identities, settings.validation)
        if not train:
            raise ValueError(
                f"{store.directory} has no document to train on ({len(self.held)} for validation): "
                "give more prompts, or lower train.validation"
            )
        size = settings.batch_documents
        self.shares = Shares.of(size, settings.micro_documents, processes)
        self.schedule = [
            (epoch, batch)
            for epoch in range(epochs)
            for batch in plan_epoch(train, store.lengths, size, seed=settings.seed, epoch=epoch)
        ]
        self.steps, self.steps_per_epoch = len(self.schedule), len(self.schedule) // epochs
        # validation draws the anchors of epoch -1 every time: its numbers are comparable
        order = sorted(self.held, key=lambda n: store.lengths[n])
        self.validation = [(-1, order[i : i + size]) for i in range(0, len(order), size)]

    def batches(self, schedule: list[tuple[int, list[int]]]) -> Batches:
        """This process's micro-batches of a schedule."""
        return Batches(self.store, schedule, self.settings, self.shares, ranks.rank())

    def train_dataloader(self) -> Loader:
        start = self.start * self.shares.micro_batches
        return Loader(self.batches(self.schedule), self.settings.workers, start)

    def validation_loader(self) -> Loader:
        return Loader(self.batches(self.validation), self.settings.workers)

    def prompts(self, count: int) -> list[list[int]]:
        """Token ids of at most `count` prompts of validation documents."""
        found = []
        for number in self.held[:count]:
            ids, mask = self.store.tokens(number)
            found.append(ids[: int(mask.bool().int().argmax())].tolist())
        return found
