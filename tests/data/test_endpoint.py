"""Rollouts by a server: a real one in this process, which records and misbehaves on command."""

import json
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dspark_train.artifacts import Artifact
from dspark_train.config_data import EndpointConfig
from dspark_train.data.endpoint import EndpointAnswers
from dspark_train.decoding.batch import generate_batch
from dspark_train.decoding.sampling import SamplingSettings
from dspark_train.stages.rollout import responses
from dspark_train.target import Target
from tests.data.completions_server import Behaviour, Body, CompletionsServer
from tests.tiny_pipeline import Run, refused

Serve = Callable[[Behaviour], CompletionsServer]
PROMPTS = [[1, 2, 3 + i] for i in range(12)]


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers: list[CompletionsServer] = []

    def start(behaviour: Behaviour) -> CompletionsServer:
        servers.append(CompletionsServer(behaviour))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def echo(body: Body, **more: Any) -> Body:
    """An answer that can only be that of this prompt."""
    tokens = [body["prompt"][-1], body["seed"] % 100]
    choice = {"finish_reason": "length", "token_ids": tokens, "prompt_token_ids": body["prompt"]}
    return {"choices": [{**choice, **more}], "usage": {"prompt_tokens": len(body["prompt"])}}


def ask(
    server: CompletionsServer, target: Target, sampling: dict[str, float] | None = None, **how: Any
) -> tuple[list[Any], EndpointAnswers]:
    given = {"url": server.url, "model": "tiny", "wait": 0.001, "concurrency": 4, "timeout": 0.5}
    answers = EndpointAnswers(
        EndpointConfig(**(given | how)), target, sampling or {"temperature": 0.7}, max_new_tokens=2
    )
    return answers(PROMPTS, list(range(40, 52)), lambda _: None), answers


EXPECTED = [([3 + i, 40 + i], "length", "generated") for i in range(12)]


def test_what_is_sent_is_what_was_asked(
    serve: Serve, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault 42: every setting under its own name; nothing else."""
    monkeypatch.setenv("MY_KEY", "secret")
    server = serve(lambda body, _: echo(body))
    sampling = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1}
    sampling |= {"repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": 0.3}
    found, _ = ask(server, tiny_target, sampling, key_env="MY_KEY", concurrency=1)
    assert found == EXPECTED
    assert [body["prompt"] for body, _ in server.requests] == PROMPTS
    assert [body["seed"] for body, _ in server.requests] == list(range(40, 52))
    body, authorization = server.requests[0]
    assert authorization == "Bearer secret"
    assert body == {
        "model": "tiny",
        "prompt": PROMPTS[0],
        "max_tokens": 2,
        "seed": 40,
        "n": 1,
        "stream": False,
        "skip_special_tokens": False,
        "return_token_ids": True,
        **sampling,
    }


def test_many_at_once_in_any_order(serve: Serve, tiny_target: Target) -> None:
    def out_of_order(body: Body, number: int) -> Body:
        time.sleep(0.03 * (number % 3 == 0))
        return echo(body)

    server = serve(out_of_order)
    found, answers = ask(server, tiny_target)
    assert found == EXPECTED
    assert answers.retries == 0
    assert 2 <= server.most <= 4


@pytest.mark.parametrize(
    "misbehaviour", ["500", "429", "timeout", "cut", "garbage", "duplicate", "two", "foreign"]
)
def test_misbehaviour_is_asked_again(serve: Serve, tiny_target: Target, misbehaviour: str) -> None:
    """Every third request goes wrong; no answer is lost, doubled or taken for another's."""
    strange = {
        "two": lambda body: {"choices": echo(body)["choices"] * 2},
        "foreign": lambda body: echo(body, token_ids=[10**9]),
    }

    def misbehave(body: Body, number: int) -> Body | str:
        if number % 3 == 1:
            return strange[misbehaviour](body) if misbehaviour in strange else misbehaviour
        return echo(body)

    server = serve(misbehave)
    found, answers = ask(server, tiny_target, concurrency=2)
    assert found == EXPECTED
    assert answers.retries == len(server.requests) - len(PROMPTS) > 0


def test_a_cut_prompt_is_noticed(serve: Serve, tiny_target: Target) -> None:
    """Fault 43: a server that saw fewer tokens than were sent, and says so only in `usage`."""

    def cut(body: Body, _: int) -> Body:
        answer = echo(body)
        del answer["choices"][0]["prompt_token_ids"]
        answer["usage"]["prompt_tokens"] -= 1
        return answer

    with pytest.raises(ValueError, match=r"did not answer after 2 attempts .*of 2 tokens instead"):
        ask(serve(cut), tiny_target, attempts=2)


def test_a_refusal_is_final(serve: Serve, tiny_target: Target) -> None:
    server = serve(lambda *_: "404")
    with pytest.raises(ValueError, match=r"refuses the request with status 404: .*as commanded"):
        ask(server, tiny_target, concurrency=1)
    assert len(server.requests) < 3  # no retries, and what was waiting is not sent


def test_text_is_tokenised_and_checked(serve: Serve, tiny_target: Target) -> None:
    tokenizer = tiny_target.tokenizer
    [eos] = tiny_target.eos_ids
    texts = ["of course", "of  course", "zebra"]  # the second loses a space, the third is unknown

    def text(body: Body, _: int) -> Body:
        choice = {"finish_reason": "stop", "text": texts[body["prompt"][-1] % 3]}
        return {"choices": [choice]}

    found, _ = ask(serve(text), tiny_target)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        said = texts[prompt[-1] % 3]
        assert answer.tokens == [*tokenizer.encode(said, add_special_tokens=False), eos]
        assert answer.origin == ("text" if said == texts[0] else "differs")


def server_of(target: Target) -> Behaviour:
    """The tiny target as a server would serve it."""
    lock = threading.Lock()

    def complete(body: Body, _: int) -> Body:
        with lock:
            [made] = generate_batch(
                target,
                [body["prompt"]],
                SamplingSettings(body["temperature"], top_p=body["top_p"]),
                slots=1,
                max_new_tokens=body["max_tokens"],
                eos_ids=target.eos_ids,
                seeds=[body["seed"]],
            )
        ids = made.tokens[:-1] if made.finish_reason == "stop" else made.tokens
        return echo(body, token_ids=ids, finish_reason=made.finish_reason)

    return complete


@pytest.mark.slow
def test_a_rollout_by_a_server_that_fails_and_comes_back(
    serve: Serve, tiny_run: Run, tiny_target: Target, tmp_path: Path
) -> None:
    """It gives up in the middle, loses nothing that is finished, and repeats nothing of it."""
    behave, dice, broken = server_of(tiny_target), random.Random(0), threading.Event()

    def unreliable(body: Body, number: int) -> Body | str:
        if broken.is_set():
            return "500"
        return dice.choice(["500", "cut", "duplicate"]) if number % 5 == 4 else behave(body, number)

    server = serve(lambda body, n: broken.set() or "500" if n == 25 else unreliable(body, n))
    given = (
        f"endpoint.url={server.url}",
        "endpoint.model=tiny",
        "endpoint.wait=0.001",
        "endpoint.attempts=6",
        "endpoint.concurrency=4",
        "rollout.shard_prompts=8",
    )
    refused(tiny_run("stages=[rollout]", *given), "did not answer after 6 attempts", "status 500")
    folder = tmp_path / "run" / "rollout"
    kept = {path.name: path.read_bytes() for path in folder.glob("rollouts-*")}
    assert len(kept) == 2
    asked = len(server.requests)
    broken.clear()
    ended = tiny_run("stages=[rollout,capture]", *given)
    assert ended.status == 0, ended
    again = {json.dumps(body["prompt"]) for body, _ in server.requests[asked:]}
    rollout = Artifact.open(folder)
    rows = list(responses(folder, rollout.facts["shards"]))
    assert len({(row["id"], row["sample"]) for row in rows}) == len(rows)
    assert rollout.counts["responses"] == len(rows) == rollout.counts["splits"]["train"]
    for name, content in kept.items():
        assert (folder / name).read_bytes() == content
    assert not again & {json.dumps(row["prompt"]) for row in rows[:16]}
    stopped = [row for row in rows if row["finish_reason"] == "stop"]
    assert stopped
    assert all(row["response"][-1] in tiny_target.eos_ids for row in stopped)
    assert rollout.settings["endpoint"] == {"model": "tiny"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["endpoint.url=http://127.0.0.1:1/v1"], "endpoint.model=None: expected the name"),
        (["endpoint.url=http://a/v1", "endpoint.model=m", "rollout.checkpoint=x"], "one of them"),
        (["endpoint.concurrency=0"], "endpoint.concurrency=0"),
    ],
)
def test_settings_that_contradict_each_other(tiny_run: Run, given: list[str], message: str) -> None:
    refused(tiny_run("stages=[rollout]", *given), message, lines=3)


def test_no_server(tiny_run: Run) -> None:
    given = ["endpoint.url=http://127.0.0.1:1/v1", "endpoint.model=m", "endpoint.attempts=2"]
    refused(tiny_run("stages=[rollout]", "endpoint.wait=0", *given), "did not answer after 2")
