"""From logits to tokens: one filter, one way to draw.

Target and drafter go through the same `warp`, so a tie or a rounding is settled alike on
both sides.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, get_args

import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TypicalLogitsWarper

_CHUNK = 256
# logits divided by less are beyond float32
COLDEST = 1e-30

VerdictName = Literal["rejection", "matching"]
NUMBERS = ("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
NUMBERS += ("presence_penalty", "frequency_penalty", "min_tokens")


@dataclass(frozen=True)
class SamplingSettings:
    """How tokens are sampled from the target. The defaults are greedy, with everything off.

    Attributes:
        temperature: 0 is greedy.
        top_k, top_p, min_p, typical_p: filters, in this order; 0 / 1.0 / 0 / 1.0 switch them off.
        seed: makes the output repeatable; None takes a new one each time.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and
            output, 1 is off (Keskar et al. 2019).
        presence_penalty, frequency_penalty: subtracted from logits of tokens in the output, once or
            as often as they occur.
        logit_bias: added to logits, by token id; minus infinity bans.
        allowed_tokens: ids, all others are banned; None allows all.
        bad_words: sequences of ids that must not come to stand in the output.
        min_tokens: no EOS before so many new tokens.
        suppress_at_begin: ids that cannot be the first new token.
        processors: more logits processors as those of transformers, run after the ones above.
        verdict: both are exact. "rejection" accepts most drafts. "matching" draws the target's own
            token at every position, and a draft stands if it is that token: so a seed gives the
            same tokens with every proposer and every number of drafts.

    Raises:
        ValueError: a value of another type, or outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    allowed_tokens: Sequence[int] | None = field(default=None, hash=False)
    bad_words: Sequence[Sequence[int]] = field(default=(), hash=False)
    suppress_at_begin: Sequence[int] = field(default=(), hash=False)
    processors: Sequence[Any] = field(default=(), hash=False)
    verdict: VerdictName = "rejection"

    def __post_init__(self) -> None:
        problems = [
            f"{name}={getattr(self, name)!r}, expected a number"
            for name in NUMBERS
            if not isinstance(getattr(self, name), Real)
        ]
        if self.seed is not None and not isinstance(self.seed, Integral):
            problems.append(f"seed={self.seed!r}, expected a whole number, or None for a new one")
        if problems:
            raise ValueError("sampling settings: " + "; ".join(problems))
        if not (self.temperature == 0 or COLDEST <= self.temperature < float("inf")):
            problems.append(
                f"temperature={self.temperature}, expected 0 (greedy) or at least {COLDEST}"
            )
        if self.top_k < 0 or int(self.top_k) != self.top_k:
            problems.append(f"top_k={self.top_k}, expected a whole number, 0 to switch it off")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p={self.top_p}, expected more than 0 and at most 1 (off)")
        if not 0 <= self.min_p <= 1:
            problems.append(f"min_p={self.min_p}, expected between 0 (off) and 1")
        if not 0 < self.typical_p <= 1:
            problems.append(f"typical_p={self.typical_p}, expected more than 0, at most 1 (off)")
        if not 0 < self.repetition_penalty < float("inf"):
            penalty = self.repetition_penalty
            problems.append(f"repetition_penalty={penalty}, expected a positive number, 1 is off")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -float("inf") < getattr(self, name) < float("inf"):
                problems.append(f"{name}={getattr(self, name)}, expected a finite number, 0 is off")
        if any(not bias < float("inf") for bias in self.logit_bias.values()):
            problems.append(f"logit_bias={dict(self.logit_bias)}, expected numbers below infinity")
        if self.allowed_tokens is not None and not len(self.allowed_tokens):
            problems.append("allowed_tokens is empty, expected at least one id, or None for all")
        if any(not len(word) for word in self.bad_words):
            problems.append(f"bad_words={self.bad_words}, expected sequences of at least one id")
        if self.min_tokens < 0:
            problems.append(f"min_tokens={self.min_tokens}, expected 0 or more")
        if self.verdict not in get_args(VerdictName):
            problems.append(f"verdict={self.verdict!r}, expected one of {get_args(VerdictName)}")
        if problems:
            raise ValueError("sampling settings: " + "; ".join(problems))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> tuple[float, ...]:
        """All that shapes a distribution; requests which agree in it are sampled together."""
        return self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p

    @property
    def filtered(self) -> bool:
        """Whether anything but the temperature shapes the distribution."""
        return self.filters[1:] != (0, 1.0, 0.0, 1.0)

    @property
    def named_ids(self) -> set[int]:
        """All token ids that the settings name."""
        words = (token for word in self.bad_words for token in word)
        return {*self.logit_bias, *(self.allowed_tokens or ()), *self.suppress_at_begin, *words}


def usable_vocabulary(tokenizer: Any, rows: int) -> int:
    """How many leading ids of an LM head with `rows` rows a tokenizer can produce.

    Heads are padded beyond the tokenizer; logits are cut to this length on both sides, so the
    padding never gets mass. Without a tokenizer all rows count.
    """
    if tokenizer is None:
        return rows
    return min(rows, max(len(tokenizer), 1 + max(tokenizer.get_vocab().values(), default=0)))


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """Ids `[...]` of the largest logits `[..., V]`; of equal ones the lowest id."""
    # argmax means the same, and takes four times as long on a CPU (torch 2.13)
    return logits.max(-1).indices


def warp(logits: torch.Tensor, settings: SamplingSettings) -> torch.Tensor:
    """Probabilities float32 `[..., V]` that tokens are drawn from, of logits `[..., V]`.

    The order is that of transformers: temperature, top-k (ties at the border stay), top-p (the
    fewest tokens that reach it), min-p, typical-p. Temperature 0 gives one-hot rows.
    """
    logits = logits.float()
    if settings.greedy:
        return torch.zeros_like(logits).scatter_(-1, most_likely(logits)[..., None], 1.0)
    logits = logits / settings.temperature
    if settings.top_k:
        logits = TopKLogitsWarper(int(settings.top_k))(None, logits)
    if settings.top_p < 1:
        logits = _keep_top_p(logits, settings.top_p)
    if settings.min_p > 0:
        logits = MinPLogitsWarper(settings.min_p)(None, logits)
    if settings.typical_p < 1:
        logits = TypicalLogitsWarper(settings.typical_p)(None, logits)
    return logits.softmax(-1)


def warp_rows(logits: torch.Tensor, settings: Sequence[SamplingSettings]) -> torch.Tensor:
    """`warp` of `[n, V]` with settings of its own for every row; equal ones share one filter."""
    groups: dict[tuple, list[int]] = {}
    for row, one in enumerate(settings):
        groups.setdefault(one.filters, []).append(row)
    if len(groups) == 1:
        return warp(logits, settings[0])
    probs = logits.new_empty(logits.shape, dtype=torch.float32)
    for rows in groups.values():
        probs[rows] = warp(logits[rows], settings[rows[0]])
    return probs


def _keep_top_p(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Mask all but the fewest most likely tokens whose mass reaches `top_p`.

    Keeps as many as transformers' warper, which sorts the whole vocabulary; here the head of the
    ranking is enough almost always. Of equal logits at the border the lower ids stay, where a sort
    that is not stable leaves it open.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    total = rows.logsumexp(-1, keepdim=True).double()
    width = min(_CHUNK, rows.shape[-1])
    while True:
        ranked = rows.topk(width).values
        mass = (ranked.double() - total).exp()
        # a token stays while the mass ranked before it is short of top_p
        count = ((mass.cumsum(-1) - mass) < top_p).sum(-1, keepdim=True)
        if width == rows.shape[-1] or bool((count < width).all()):
            break
        width = min(16 * width, rows.shape[-1])
    border = ranked.gather(-1, count - 1)
    kept = rows >= border
    if bool((kept.sum(-1, keepdim=True) > count).any()):
        tied = rows == border
        room = count - (ranked > border).sum(-1, keepdim=True)
        kept &= ~tied | (tied.cumsum(-1) <= room)
    return rows.masked_fill(~kept, float("-inf")).view_as(logits)


def draw(probs: torch.Tensor, u: float) -> int:
    """One token of `probs` `[V]` by inverse CDF at `u` in [0, 1); see `draw_rows`."""
    return int(draw_rows(probs[None], [u])[0])


def draw_rows(probs: torch.Tensor, uniforms: Sequence[float] | torch.Tensor) -> torch.Tensor:
    """One token per row by inverse CDF in float64.

    Args:
        probs: `[n, V]` not negative; rows need not sum to 1.
        uniforms: n numbers in [0, 1).

    Returns:
        Ids `[n]`. A token without mass is never drawn, not even at u = 0 or next to 1.

    Raises:
        ValueError: a row without mass, or with NaN or infinity.
    """
    drawn, total = drawn_rows(probs, torch.as_tensor(uniforms, dtype=torch.float64))
    if not bool(has_mass(total).all()):
        raise ValueError(
            f"cannot draw from rows whose mass is {total.tolist()}: expected positive finite sums; "
            "the logits hold NaN or infinity, or a filter removed every token"
        )
    return drawn


def drawn_rows(probs: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As `draw_rows`, and the mass `[n]` of each row; without `has_mass` its id means nothing."""
    n, V = probs.shape
    if V % _CHUNK:
        probs = torch.nn.functional.pad(probs, (0, -V % _CHUNK))
    chunks = probs.view(n, -1, _CHUNK)
    # two levels: the long sum runs over chunks, the exact place is sought inside one of them
    cumulative = chunks.sum(-1, dtype=torch.float64).cumsum(-1)
    total = cumulative[:, -1]
    target = _below(uniforms.to(total) * total, total)[:, None]
    # a row without mass has no such place, and some place must be read
    chunk = (cumulative <= target).sum(-1, keepdim=True).clamp_(max=chunks.shape[1] - 1)
    before = torch.nn.functional.pad(cumulative, (1, 0)).gather(-1, chunk)
    inside = chunks.gather(1, chunk[..., None].expand(-1, -1, _CHUNK))[:, 0].double().cumsum(-1)
    rest = _below(target - before, inside[:, -1:])
    drawn = chunk[:, 0] * _CHUNK + (inside <= rest).sum(-1)
    return drawn.clamp_(max=V - 1), total


def has_mass(total: torch.Tensor) -> torch.Tensor:
    """Whether rows of such sums can be drawn from."""
    return (total > 0) & (total < float("inf"))


def _below(value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    # rounding may lift u·total to total; strictly below it, the first larger cumulative sum exists
    return torch.minimum(value, torch.nextafter(bound, torch.zeros_like(bound)))
