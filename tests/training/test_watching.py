"""What is watched, and what stops a training by name."""

import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark_train.data.batch import Batch
from dspark_train.data.datamodule import Batches
from dspark_train.drafter import Drafter
from dspark_train.target import Target
from dspark_train.training.fit import BEST, LAST
from dspark_train.training.module import DrafterTraining
from dspark_train.training.validation import decoder
from tests.training.test_fit import Fit, fit, losses, one_thread, rows, same, stop_at

__all__ = ["fit", "one_thread"]


def column(directory: Path, key: str) -> list[float]:
    return [float(row[key]) for row in rows(directory) if row.get(key)]


def test_everything_is_logged(fit: Fit, tmp_path: Path) -> None:
    numbers, _ = fit("a", epochs=2)
    with (tmp_path / "a" / "logs" / "metrics.csv").open() as file:
        names = set(csv.DictReader(file).fieldnames)
    per_slot = {f"acceptance_{k}" for k in range(4)} | {f"confidence_error_{k}" for k in range(4)}
    assert names >= {f"train/{name}" for name in per_slot | {"loss", "tau", "label_entropy"}}
    assert names >= {f"validation/{name}" for name in per_slot | {"loss", "tau", "label_entropy"}}
    assert names >= {f"validation/confidence_auc_{k}" for k in range(3)}
    assert names >= {
        "lr",
        "train/gradient_norm",
        "train/anchors_per_document",
        "train/supervised_per_document",
        "machine/tokens_per_second",
        "machine/peak_gb",
    }
    # 16 anchors are drawn at most, each has at most 4 slots
    anchors = column(tmp_path / "a", "train/anchors_per_document")
    supervised = column(tmp_path / "a", "train/supervised_per_document")
    assert all(a <= 16 for a in anchors)
    assert all(a <= s <= 4 * a for a, s in zip(anchors, supervised, strict=True))
    assert not [key for key in numbers["metrics"] if key.startswith("machine/")]
    assert len(column(tmp_path / "a", "validation/tau")) == 2


def test_validation_every_n_steps_and_at_the_end(fit: Fit, tmp_path: Path) -> None:
    numbers, _ = fit("a", epochs=3, validate_steps=4)
    at = [int(row["step"]) + 1 for row in rows(tmp_path / "a") if row["validation/tau"]]
    assert at == [
        *range(4, numbers["steps"] + 1, 4),
        *([numbers["steps"]] * (numbers["steps"] % 4 > 0)),
    ]


def test_the_best_weights_are_kept(fit: Fit, tmp_path: Path) -> None:
    """Fault 53: the longest accepted length decides; too large steps spoil what was learned."""
    numbers, kept = fit("a", validate_steps=1, lr=0.1, clip=0.0, warmup=0.9, epochs=2)
    taus = column(tmp_path / "a", "validation/tau")
    best = max(range(len(taus)), key=lambda i: taus[i])
    assert numbers["kept_step"] == best + 1
    assert numbers["metrics"]["validation/tau"] == pytest.approx(taus[best], abs=1e-6)
    last, final = fit("b", validate_steps=1, lr=0.1, clip=0.0, warmup=0.9, epochs=2, keep="last")
    assert last["kept_step"] == last["steps"]
    assert same(kept, final) is (best + 1 == last["steps"])
    again, _ = fit("c", validate_steps=1, lr=0.1, clip=0.0, warmup=0.9, epochs=2)
    assert again == numbers


def test_decoding_validates_with_real_rounds(fit: Fit, tiny_target: Target, tmp_path: Path) -> None:
    seen = []

    def decode(prompts: list[list[int]]) -> Any:
        seen.append(prompts)
        return decoder(tiny_target, prompts, 12)

    numbers, drafter = fit("a", epochs=2, decode_validation=2, decode=decode)
    assert len(seen) == 1
    assert len(seen[0]) == 2
    assert all(prompt for prompt in seen[0])
    decoded = column(tmp_path / "a", "validation/decoded_tau")
    assert len(decoded) == 2
    assert all(1.0 <= tau <= 5.0 for tau in decoded)
    assert numbers["metrics"]["validation/decoded_tau"] == pytest.approx(max(decoded), abs=1e-6)
    # what was kept decodes as was said
    assert decoder(tiny_target, seen[0], 12)(drafter) == pytest.approx(max(decoded), abs=1e-9)


def test_an_average_of_the_weights_is_what_counts(fit: Fit) -> None:
    """The average moves by 1 - decay towards the weights after every step."""
    history: list[torch.Tensor] = []
    step = DrafterTraining.optimizer_step

    def watched(self: DrafterTraining, *args: Any, **more: Any) -> None:
        step(self, *args, **more)
        history.append(self.loss.drafter.fc.weight.detach().clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DrafterTraining, "optimizer_step", watched)
        _, averaged = fit("a", ema=0.5, keep="last", epochs=2)
    expected = fit.first.fc.weight.detach()
    for number, weight in enumerate(history, 1):
        decay = min(0.5, number / (number + 9))
        expected = decay * expected + (1 - decay) * weight
    torch.testing.assert_close(averaged.fc.weight.detach(), expected)
    _, plain = fit("b", keep="last", epochs=2)
    assert torch.equal(plain.fc.weight.detach(), history[-1])


@pytest.mark.parametrize(
    "train",
    [
        {"checkpoint_activations": True},
        pytest.param({"compile": True}, marks=pytest.mark.slow),
    ],
)
def test_memory_and_compilation_change_nothing(fit: Fit, train: dict[str, Any]) -> None:
    _, plain = fit("a", epochs=1, optimiser="muon")
    _, other = fit("b", epochs=1, optimiser="muon", **train)
    for name, tensor in plain.state_dict().items():
        torch.testing.assert_close(other.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    _, plain = fit("c", epochs=1)
    _, other = fit("d", epochs=1, **train)
    assert apart(plain, other, fit.first) < 1e-3


def test_what_is_checkpointed_is_float32(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 48, under bf16 compute."""

    def stop() -> None:
        raise RuntimeError("stop")

    stop_at(monkeypatch, 3, stop)
    with pytest.raises(RuntimeError, match="stop"):
        fit("a", precision="bf16-mixed", checkpoint_minutes=1e-9)
    state = torch.load(tmp_path / "a" / "scratch" / LAST, weights_only=True)
    moments = [v for s in state["optimiser"]["state"].values() for v in s.values()]
    assert len(moments) > 10
    assert {t.dtype for t in [*moments, *state["model"].values()]} == {torch.float32}
    assert state["progress"]["step"] == 3


def test_a_damaged_checkpoint_is_named(
    fit: Fit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise RuntimeError("stop")

    with monkeypatch.context() as patch:
        stop_at(patch, 2, stop)
        with pytest.raises(RuntimeError, match="stop"):
            fit("a", checkpoint_minutes=1e-9)
    path = tmp_path / "a" / "scratch" / LAST
    state = torch.load(path, weights_only=True)
    state["model"].popitem()  # a drafter that another version trained
    torch.save(state, path)
    with pytest.raises(ValueError, match=r"not one that can be continued.*force=\[a\]"):
        fit("a")
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"last\.ckpt is damaged.*force=\[a\]"):
        fit("a")
    assert not (path.parent / BEST).exists()


def spoil(monkeypatch: pytest.MonkeyPatch, number: int, **changes: Any) -> None:
    """Change a field of micro-batch `number`."""
    get = Batches.__getitem__

    def spoiled(self: Batches, index: int) -> Batch:
        batch = get(self, index)
        if index != number or self.schedule[0][0] < 0:
            return batch
        return replace(batch, **{k: change(getattr(batch, k)) for k, change in changes.items()})

    monkeypatch.setattr(Batches, "__getitem__", spoiled)


def test_features_that_are_not_finite_stop_with_their_row(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 47."""

    def with_nan(features: torch.Tensor) -> torch.Tensor:
        features = features.clone()
        features[2, 0, 0] = float("inf")
        return features

    spoil(monkeypatch, 2, features=with_nan)
    with pytest.raises(
        ValueError, match=r"loss of step 2 is nan: the features of row 2 .*capture again"
    ):
        fit("a")


def test_all_masked_data_stops(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault 34: zero loss is not learning."""
    get = Batches.__getitem__
    monkeypatch.setattr(
        Batches, "__getitem__", lambda self, i: replace(b := get(self, i), keep=b.keep & False)
    )
    with pytest.raises(ValueError, match=r"none of \d+ steps had a block with a supervised token"):
        fit("a")


def test_weights_at_rest_are_named(fit: Fit) -> None:
    with pytest.raises(
        ValueError, match=r"parameters have not moved in \d+ steps, fc\.weight among"
    ):
        fit("a", lr=1e-30)


def test_a_confidence_head_without_a_loss_stays(fit: Fit) -> None:
    """It is not trained, instead of trained by nothing."""
    _, drafter = fit("a", epochs=1, objective={"confidence": 0.0})
    first = fit.first.confidence_head.state_dict()
    assert all(torch.equal(t, first[k]) for k, t in drafter.confidence_head.state_dict().items())


def apart(one: Drafter, other: Drafter, first: Drafter) -> float:
    """How far two trainings of `first` by Adam end apart, in units of how far they came.

    Of whole tensors: Adam divides by the size of each element's gradient, and so makes rounding
    larger where that is small. Steps by Muon are compared element by element.
    """
    before, theirs = first.state_dict(), other.state_dict()
    return max(
        float((tensor - theirs[name]).norm() / (tensor - before[name]).norm().clamp(min=1e-6))
        for name, tensor in one.state_dict().items()
        if tensor.is_floating_point()
    )


def test_a_small_fault_sets_trainings_apart(fit: Fit) -> None:
    """One per cent of the loss's decay is five times what the tests allow."""
    _, one = fit("a", keep="last")
    _, other = fit("b", keep="last", objective={"loss_decay": 4.04})
    assert apart(one, other, fit.first) > 5e-3
    assert apart(one, one, fit.first) == 0


def test_steps_do_not_depend_on_micro_batches(fit: Fit, tmp_path: Path) -> None:
    """Fault 52: the last, smaller step of an epoch counts whole."""
    _, whole = fit("whole", keep="last")
    _, even = fit("even", keep="last", optimiser="muon")
    for size in (1, 3):
        _, parts = fit(f"even{size}", keep="last", optimiser="muon", micro_documents=size)
        for name, tensor in even.state_dict().items():
            torch.testing.assert_close(parts.state_dict()[name], tensor, rtol=0, atol=2e-6)
        _, parts = fit(f"parts{size}", keep="last", micro_documents=size)
        assert apart(whole, parts, fit.first) < 1e-3
        for (_, a), (_, b) in zip(
            losses(tmp_path / "whole"), losses(tmp_path / f"parts{size}"), strict=True
        ):
            assert a == pytest.approx(b, rel=1e-6)
