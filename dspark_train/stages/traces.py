"""Prompts -> traced decoding rounds, many prompts at a time."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from dspark_train.calibration.traces import TracedRound
from dspark_train.decoding.admission import admit
from dspark_train.decoding.engine import Engine
from dspark_train.decoding.loading import block_proposer
from dspark_train.decoding.request import Request
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.decoding.stats import Round
from dspark_train.drafter import Drafter
from dspark_train.target import Target

Watch = Callable[[Sequence[Request], Sequence[Round]], None]


def decode_traced(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[Mapping[str, Any]],
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    seed: int,
    batch_size: int,
    name: str,
    watch: Watch | None = None,
) -> list[TracedRound]:
    """Decode every prompt once at every temperature.

    Args:
        target: the frozen model.
        drafter: with a confidence head; moved to the target's device and dtype.
        prompts: rows with token ids under `prompt`, and `category`.
        temperatures: of the sampler.
        max_new_tokens: per prompt.
        seed: of the first request; the others count on.
        batch_size: requests that are decoded at the same time.
        name: of the progress bar.
        watch: called with requests and rounds after every step, before finished requests leave.

    Returns:
        Rounds that verified a draft, those of a request together, in the order of the requests.
        `conversation` is the prompt's place.
    """
    drafter.to(device=target.device, dtype=target.dtype)
    proposer = block_proposer(drafter, target)
    engine = Engine(target, proposer, proposer.vocabulary, rows=batch_size)
    waiting, places = [], {}
    for place, row in enumerate(prompts):
        for temperature in temperatures:
            settings = SamplingSettings(temperature, seed=seed + len(waiting))
            request = admit(target, proposer.vocabulary, row["prompt"], max_new_tokens, settings)
            request.traced = True
            places[id(request)] = (len(waiting), place, str(row.get("category") or "none"))
            waiting.append(request)
    traced: list[list[TracedRound]] = [[] for _ in waiting]
    waiting.reverse()
    with tqdm(total=len(traced), desc=name, unit="answer", mininterval=1) as bar:
        while waiting or engine.requests:
            fresh = [waiting.pop() for _ in range(min(engine.free, len(waiting)))]
            if fresh:
                engine.add(fresh)
            bar.update(len(engine.take_finished()))
            if not engine.requests:
                continue
            requests = list(engine.requests)
            contexts = [len(request.tokens) - 1 for request in requests]
            rounds = engine.step()
            if watch is not None:
                watch(requests, rounds)
            for request, context, one in zip(requests, contexts, rounds, strict=True):
                number, place, domain = places[id(request)]
                if one.proposed:
                    traced[number].append(
                        TracedRound(
                            logits=one.confidence,
                            overlap=one.overlap,
                            accepted=one.accepted,
                            known=one.known,
                            context=context,
                            conversation=place,
                            domain=domain,
                            temperature=request.settings.temperature,
                        )
                    )
            bar.update(len(engine.take_finished()))
    return [one for rounds in traced for one in rounds]
