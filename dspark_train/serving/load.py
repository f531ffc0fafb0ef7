"""Load on a server, from a process of its own: `python -m dspark_train.serving.load < job > times`.

Closed loop: so many users, each of whom asks again once answered. Open loop: requests come at a
rate, whatever the server does.
"""

import asyncio
import json
import random
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from time import perf_counter

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
        seconds: then the load ends, with whatever has been answered; None: it takes what it takes.
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
    seconds: float | None = None


@dataclass
class Answered:
    """What became of one request; times are seconds since the load began.

    Attributes:
        prompt: which one.
        asked: when.
        tokens: when how many tokens were there.
        error: what went wrong.
        whole: whether it was answered to its end; not if the load ended before.
    """

    prompt: int
    asked: float
    tokens: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None
    whole: bool = False


async def run(job: Job) -> list[Answered]:
    """All that was asked, in the order of the requests."""
    answers: list[Answered] = []
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=job.users)
    timeout = httpx.Timeout(job.timeout, pool=None)
    began = perf_counter()

    def clock() -> float:
        return perf_counter() - began

    async with httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client:

        async def one() -> None:
            number = len(answers)
            answers.append(Answered(number % len(job.prompts), clock()))
            await ask(client, job, number, answers[number], clock)

        async def user() -> None:
            while len(answers) < job.requests:
                await one()

        async def arrivals(group: asyncio.TaskGroup) -> None:
            random_ = random.Random(job.seed)
            for _ in range(job.requests):
                group.create_task(one())
                await asyncio.sleep(random_.expovariate(job.rate))

        try:
            async with asyncio.timeout(job.seconds), asyncio.TaskGroup() as group:
                if job.rate is None:
                    for _ in range(job.users):
                        group.create_task(user())
                else:
                    await arrivals(group)
        except TimeoutError:
            pass
    return answers


async def ask(
    client: httpx.AsyncClient, job: Job, number: int, answer: Answered, clock: Callable[[], float]
) -> None:
    """Stream one answer."""
    body = {
        "model": job.model,
        "prompt": job.prompts[answer.prompt],
        "max_tokens": job.max_tokens,
        "temperature": job.temperature,
        "seed": job.seed + number,
        "logit_bias": job.bias,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }
    try:
        async with client.stream("POST", f"{job.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                answer.error = f"status {response.status_code}"
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    answer.error = chunk["error"]["message"]
                    return
                answer.tokens.append((clock(), chunk["usage"]["completion_tokens"]))
    except httpx.HTTPError as error:
        answer.error = repr(error)
        return
    answer.whole = True


def main() -> None:
    """Read a job, write the answers."""
    answers = asyncio.run(run(Job(**json.load(sys.stdin))))
    json.dump([asdict(one) for one in answers], sys.stdout)


if __name__ == "__main__":
    main()
