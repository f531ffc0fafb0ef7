"""Other ways to calibrate the cumulative product, to compare with: isotonic and Platt.

Both map the product of each slot on its own. Neither keeps products falling from slot to slot, and
isotonic maps many of them to one value: a scheduler that ranks drafts needs both.
"""

from collections.abc import Callable

import numpy as np
import torch
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression

# from products `[N]` to calibrated products `[N]`
Map = Callable[[torch.Tensor], torch.Tensor]


def isotonic(product: torch.Tensor, passed: torch.Tensor) -> Map:
    """The best rising step function (Zadrozny and Elkan 2002) for products and outcomes `[N]`."""
    fitted = IsotonicRegression(out_of_bounds="clip", y_min=0.0, y_max=1.0)
    fitted.fit(product.double().numpy(), passed.double().numpy())
    return lambda new: torch.from_numpy(fitted.predict(new.double().numpy()))


def platt(product: torch.Tensor, passed: torch.Tensor) -> Map:
    """`σ(a · logit(product) + b)` (Platt 1999); where all outcomes agree, their frequency."""
    if bool(passed.all()) or not bool(passed.any()):
        frequency = float(passed.double().mean())
        return lambda new: torch.full_like(new.double(), frequency)
    fitted = LogisticRegression(C=np.inf).fit(_logit(product), passed.numpy())
    return lambda new: torch.from_numpy(fitted.predict_proba(_logit(new))[:, 1])


def _logit(product: torch.Tensor) -> np.ndarray:
    return product.double().clamp(1e-9, 1 - 1e-9).logit().numpy()[:, None]
