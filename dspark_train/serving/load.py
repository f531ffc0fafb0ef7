"""Load on a server, from a process of its own: `python -m dspark_train.serving.load < job > times`.

Closed loop: so many users, each of whom asks again once answered. Open loop: requests come at a
rate, whatever the server does.
"""

import asyncio
import json
import random
import sys
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any

import httpx


@dataclass(frozen=True)
class Job:
    """What to ask.

    Attributes:
        url: of the server.
        model: its name.
        prompts: token ids; taken in turn.
        requests: in all.
        users: at a time, in a closed loop.
        rate: requests per second in an open loop; None: closed.
        max_tokens: per answer.
        temperature: of the sampler; seeds count from `seed`.
        bias: logit bias, to ban ends of text and so make answers equally long.
        timeout: seconds per answer.
    """

    url: str
    model: str
    prompts: list[list[int]]
    requests: int
    users: int
    max_tokens: int
    rate: float | None = None
    temperature: float = 0.0
    seed: int = 0
    bias: dict[str, float] | None = None
    timeout: float = 600.0


@dataclass(frozen=True)
class Answered:
    """Times of one answer in seconds since the load began: when it was asked for, and when how many
    tokens were there; or an error."""

    asked: float
    tokens: list[tuple[float, int]]
    error: str | None = None


async def run(job: Job) -> list[Answered]:
    """All answers, in the order of the requests."""
    answers: list[Answered | None] = [None] * job.requests
    numbers = iter(range(job.requests))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=job.users)
    timeout = httpx.Timeout(job.timeout, pool=None)
    began = perf_counter()

    def clock() -> float:
        return perf_counter() - began

    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:

        async def one(number: int) -> None:
            answers[number] = await ask(client, job, number, clock)

        async def user() -> None:
            for number in numbers:
                await one(number)

        if job.rate is None:
            await asyncio.gather(*(user() for _ in range(job.users)))
        else:
            random_ = random.Random(job.seed)
            tasks = []
            for number in numbers:
                tasks.append(asyncio.create_task(one(number)))
                await asyncio.sleep(random_.expovariate(job.rate))
            await asyncio.gather(*tasks)
    return answers


async def ask(client: httpx.AsyncClient, job: Job, number: int, clock: Any) -> Answered:
    """Stream one answer."""
    body = {
        "model": job.model,
        "prompt": job.prompts[number % len(job.prompts)],
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "seed": job.seed + number,
        "logit_bias": job.bias,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    asked, tokens = clock(), []
    try:
        async with client.stream("POST", f"{job.url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                return Answered(asked, tokens, f"status {answer.status_code}")
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    return Answered(asked, tokens, chunk["error"]["message"])
                tokens.append((clock(), chunk["usage"]["completion_tokens"]))
    except httpx.HTTPError as error:
        return Answered(asked, tokens, repr(error))
    return Answered(asked, tokens)


def main() -> None:
    """Read a job, write the answers."""
    answers = asyncio.run(run(Job(**json.load(sys.stdin))))
    json.dump([asdict(one) for one in answers], sys.stdout)


if __name__ == "__main__":
    main()
