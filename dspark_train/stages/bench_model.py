"""The simple model of a speed-up, beside what was measured, and what makes the difference.

A round commits τ tokens, for which plain decoding runs τ passes. So with T the seconds of a plain
pass, D those of drafting and V those of verifying a round (Leviathan et al. 2023, section 3.3)

    speed-up = τ / (D/T + V/T)

The model knows nothing of what is outside the two models in a round, of reading the prompt (which
both do alike, and which weighs more in the faster one), and of what surrounds rounds. These are
measured and put in one after the other; with the last of them it is the measured speed-up.
"""

from dspark_train.decoding.stats import DecodingStats


def speed_model(
    stats: DecodingStats, wall: float, plain: DecodingStats, plain_wall: float
) -> dict[str, float]:
    """The model of one contestant against plain decoding of the same prompts.

    Args:
        stats, plain: of all answers, with seconds by part.
        wall, plain_wall: seconds that the answers took.

    Returns:
        `expected_tokens` τ; `draft_cost` and `verify_cost` of a round in plain passes; speed-ups:
        `predicted` by the model, `with_overhead` of sampling and bookkeeping, `with_prefill`, and
        `measured`. All 0 where there were no rounds.
    """
    keys = ("expected_tokens", "draft_cost", "verify_cost", "predicted", "with_overhead")
    if not (stats.rounds and plain.rounds):
        return dict.fromkeys((*keys, "with_prefill", "measured"), 0.0)

    def spent(which: DecodingStats, *parts: str) -> float:
        return sum(which.seconds[part] for part in parts)

    def ratio(seconds: float, plain_seconds: float, *, all_tokens: bool = True) -> float:
        count = "tokens" if all_tokens else "committed"
        return getattr(stats, count) / seconds * plain_seconds / getattr(plain, count)

    step = spent(plain, "verify") / plain.rounds
    drafting, verifying = spent(stats, "draft", "walk"), spent(stats, "verify")
    rounds = ("draft", "walk", "verify", "sampling", "bookkeeping")
    values = {
        "expected_tokens": stats.tau,
        "draft_cost": drafting / stats.rounds / step,
        "verify_cost": verifying / stats.rounds / step,
        "predicted": ratio(drafting + verifying, spent(plain, "verify"), all_tokens=False),
        "with_overhead": ratio(spent(stats, *rounds), spent(plain, *rounds), all_tokens=False),
        "with_prefill": ratio(spent(stats, *rounds, "prefill"), spent(plain, *rounds, "prefill")),
        "measured": ratio(wall, plain_wall),
    }
    return {key: round(value, 4) for key, value in values.items()}
