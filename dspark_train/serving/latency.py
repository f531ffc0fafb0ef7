"""From times of answers to what users and operators look at."""

from itertools import pairwise
from typing import Any

import numpy as np


def summary(answers: list[dict[str, Any]]) -> dict[str, float]:
    """Speeds and latencies of the answers of `load.run`, as dictionaries.

    Returns:
        `throughput`: tokens per second of all, from the first request to the last token.
        `per_user`: median over answers of tokens per second once it has begun.
        `first_p50`, `first_p95`: seconds to the first token.
        `token_p50`, `token_p95`, `token_p99`: seconds between tokens; tokens that come together
        share the wait for them in equal parts.
        `tokens`, `errors`, `cut`: counts; what the end of the load cut off counts with what it got.
    """
    good = [one for one in answers if one["error"] is None and one["tokens"]]
    cut = sum(one["error"] is None and not one["whole"] for one in answers)
    bad = sum(one["error"] is not None or (one["whole"] and not one["tokens"]) for one in answers)
    tokens = sum(one["tokens"][-1][1] for one in good)
    ends = [one["tokens"][-1][0] for one in good]
    first = [one["tokens"][0][0] - one["asked"] for one in good]
    speeds, waits = [], []
    for one in good:
        times = one["tokens"]
        (start, before), (end, count) = times[0], times[-1]
        if end > start and count > before:
            speeds.append((count - before) / (end - start))
        for (earlier, had), (later, has) in pairwise(times):
            waits += [(later - earlier) / (has - had)] * (has - had) if has > had else []
    wall = max(ends, default=0.0) - min((one["asked"] for one in answers), default=0.0)
    result = {
        "throughput": tokens / wall if wall > 0 else 0.0,
        "per_user": float(np.median(speeds)) if speeds else 0.0,
        **_quantiles("first", first, 50, 95),
        **_quantiles("token", waits, 50, 95, 99),
    }
    result = {key: round(value, 6) for key, value in result.items()}
    return {**result, "tokens": tokens, "errors": bad, "cut": cut}


def paces(answers: list[dict[str, Any]], prompts: int) -> np.ndarray:
    """`[prompts]`: tokens that came together, on the average, after the first of each answer.

    Where a message is a round, that is what a round commits: easy prompts have more. NaN for
    prompts without an answer.
    """
    tokens, messages = np.zeros(prompts), np.zeros(prompts)
    for one in answers:
        if len(one["tokens"]) > 1:
            tokens[one["prompt"]] += one["tokens"][-1][1] - one["tokens"][0][1]
            messages[one["prompt"]] += len({count for _, count in one["tokens"]}) - 1
    return np.divide(tokens, messages, out=np.full(prompts, np.nan), where=messages > 0)


def _quantiles(name: str, values: list[float], *shares: int) -> dict[str, float]:
    return {f"{name}_p{s}": float(np.percentile(values, s)) if values else 0.0 for s in shares}
