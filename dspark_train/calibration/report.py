"""How well products of confidences tell what becomes of drafts, slot by slot."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from sklearn.metrics import roc_auc_score

from dspark_train.calibration.alternatives import isotonic, platt
from dspark_train.calibration.ece import BINS, expected_calibration_error
from dspark_train.calibration.scaling import Scaling
from dspark_train.calibration.sts import fit_temperatures
from dspark_train.calibration.traces import Traces

DRAWS = 200


@dataclass(frozen=True)
class Scores:
    """Of one slot, over `rounds` rounds that tell about it.

    Attributes:
        ece: expected calibration error of the cumulative product.
        noise: what a perfectly calibrated product would show on so many rounds.
        auc: chance that a prefix which stands has a higher product than one which falls; None
            where all outcomes agree.
        brier: mean squared error.
        predicted, observed: mean product, and how often the prefix stands.
    """

    rounds: int
    ece: float
    noise: float
    auc: float | None
    brier: float
    predicted: float
    observed: float


def scores(product: torch.Tensor, passed: torch.Tensor) -> Scores:
    """Scores of products `[N]` against outcomes `[N]`, N at least 1."""
    product, outcome = product.double(), passed.double()
    mixed = 0 < float(outcome.mean()) < 1
    return Scores(
        rounds=len(product),
        ece=_rounded(expected_calibration_error(product, outcome)),
        noise=_rounded(sampling_noise(product)),
        auc=_rounded(roc_auc_score(passed.numpy(), product.numpy())) if mixed else None,
        brier=_rounded((product - outcome).square().mean()),
        predicted=_rounded(product.mean()),
        observed=_rounded(outcome.mean()),
    )


def sampling_noise(product: torch.Tensor) -> float:
    """Mean calibration error of outcomes that are drawn from the products `[N]` themselves."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.rand(DRAWS, len(product), generator=generator, dtype=torch.float64) < product
    return sum(float(expected_calibration_error(product, draw)) for draw in draws) / DRAWS


def report(fit: Traces, fresh: Traces, scaling: Scaling, shared: Scaling) -> list[dict[str, Any]]:
    """Per slot, `Scores` on `fresh` before and after scaling, and of the alternatives.

    Args:
        fit: rounds that the scaling was fitted on, and the alternatives are.
        fresh: rounds of other conversations.
        scaling: of P proposals.
        shared: the same without shifts of single slots.

    Returns:
        One entry a slot: `slot`, `temperature`, and `before`, `after`, `shared`, `sts`
        (temperatures without a shift, as published), `isotonic`, `platt` as dictionaries of scores;
        without scores where one of the halves never reached the slot.
    """
    none = Scaling.none(len(scaling.temperatures))
    published = Scaling.of(fit_temperatures(fit.logits, fit.accepted, fit.known))
    ways = {"before": none, "after": scaling, "shared": shared, "sts": published}
    found = {name: way.products(fresh.logits) for name, way in ways.items()}
    raw_fit, entries = none.products(fit.logits), []
    for k, temperature in enumerate(scaling.temperatures.tolist()):
        entry: dict[str, Any] = {"slot": k, "temperature": _rounded(temperature)}
        reached, seen = fit.known > k, fresh.known > k
        if reached.any() and seen.any():
            passed, known = (
                fresh.accepted[seen] > k,
                (raw_fit[reached, k], fit.accepted[reached] > k),
            )
            products = {name: product[seen, k] for name, product in found.items()}
            for name, make in (("isotonic", isotonic), ("platt", platt)):
                products[name] = make(*known)(products["before"])
            entry |= {name: asdict(scores(p, passed)) for name, p in products.items()}
        entries.append(entry)
    return entries


def reliability(product: torch.Tensor, passed: torch.Tensor) -> list[tuple[float, float, int]]:
    """Per bin that is not empty: mean product, how often the prefix stands, rounds."""
    bins = (product * BINS).long().clamp(max=BINS - 1)
    rows = []
    for b in bins.unique().tolist():
        inside = bins == b
        rows.append(
            (
                float(product[inside].double().mean()),
                float(passed[inside].double().mean()),
                int(inside.sum()),
            )
        )
    return rows


def _rounded(value: torch.Tensor | float) -> float:
    return round(float(value), 6)
