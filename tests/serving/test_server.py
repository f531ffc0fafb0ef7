"""The official client over a real socket: right answers, limits, clients that go away, the end."""

import concurrent.futures
import json
import random
import socket
import time

import httpx
import openai
import pytest

from dspark_train.decoding import SpeculativeDecoder
from dspark_train.decoding.proposers import PlainProposer
from dspark_train.serving.app import Limits
from tests import tiny_language
from tests.random_drafter import make_drafter
from tests.serving.served import MODEL, serving

CONVERSATIONS = tiny_language.prompts(12)


@pytest.fixture(scope="module")
def served(tiny_target):
    with serving(tiny_target) as one:
        yield one


@pytest.fixture(scope="module")
def decoder(tiny_target):
    return SpeculativeDecoder.with_drafter(tiny_target, make_drafter(tiny_target, 4))


@pytest.fixture
def endless(tiny_target) -> dict[str, float]:
    """A bias that bans every end."""
    return {str(token): -100 for token in tiny_target.eos_ids}


def ask(served, messages, **more):
    more = {"temperature": 0, "max_tokens": 24, **more}
    return served.client.chat.completions.create(model=MODEL, messages=messages, **more)


def test_a_chat_is_answered_as_the_decoder_answers(served, decoder) -> None:
    for messages in CONVERSATIONS[:4]:
        answer = ask(served, messages)
        expected = decoder.generate(messages, 24)
        (choice,) = answer.choices
        assert choice.message.content == expected.text
        assert choice.message.role == "assistant"
        assert choice.finish_reason == expected.finish_reason
        assert answer.usage.completion_tokens == len(expected.tokens)
        assert answer.usage.prompt_tokens == expected.prompt_tokens
        assert answer.usage.total_tokens == len(expected.tokens) + expected.prompt_tokens


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_is_the_answer_in_pieces(served, temperature) -> None:
    settings = {"temperature": temperature, "seed": 5, "n": 2}
    whole = ask(served, CONVERSATIONS[0], **settings)
    stream = ask(
        served,
        CONVERSATIONS[0],
        stream=True,
        stream_options={"include_usage": True},
        **settings,
    )
    texts, ends, usage = ["", ""], [None, None], None
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason or ends[choice.index]
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert usage == whole.usage


def test_seeds_repeat_and_choices_differ(served, decoder) -> None:
    answers = [
        [
            c.message.content
            for c in ask(served, CONVERSATIONS[1], temperature=1, seed=7, n=4).choices
        ]
        for _ in range(2)
    ]
    assert answers[0] == answers[1]
    solo = [
        decoder.generate(CONVERSATIONS[1], 24, temperature=1.0, seed=7 + i).text for i in range(4)
    ]
    assert answers[0] == solo
    assert len(set(solo)) > 1


def test_a_seed_gives_what_plain_decoding_gives_where_drafts_must_match(tiny_target) -> None:
    plain = SpeculativeDecoder(tiny_target, PlainProposer())
    settings = {"temperature": 1.0, "seed": 7}
    expected = plain.generate(CONVERSATIONS[1], 24, verdict="matching", **settings).text
    with serving(tiny_target, verdict="matching") as served:
        (choice,) = ask(served, CONVERSATIONS[1], **settings).choices
    assert choice.message.content == expected


def test_completions_of_text_and_tokens(served, decoder, tiny_target) -> None:
    create = served.client.completions.create
    text = "a b"
    ids = tiny_target.tokenizer(text)["input_ids"]
    by_text = create(model=MODEL, prompt=text, temperature=0, max_tokens=10)
    by_ids = create(model=MODEL, prompt=ids, temperature=0, max_tokens=10)
    assert by_text.choices[0].text == by_ids.choices[0].text
    assert by_text.choices[0].text == decoder.generate(ids, 10).text
    several = create(model=MODEL, prompt=[ids, [*ids, 5]], n=2, temperature=0, max_tokens=6)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == several.choices[1].text
    assert several.usage.prompt_tokens == 2 * len(ids) + 1
    pieces = create(model=MODEL, prompt=ids, temperature=0, max_tokens=10, stream=True)
    assert "".join(p.choices[0].text for p in pieces) == by_ids.choices[0].text


def test_logprobs(served, decoder) -> None:
    expected = decoder.generate(CONVERSATIONS[2], 8, logprobs=3).logprobs
    answer = ask(served, CONVERSATIONS[2], max_tokens=8, logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs.content
    assert [one.logprob for one in found] == pytest.approx([x.logprob for x in expected], abs=1e-4)
    assert all(len(one.top_logprobs) == 3 for one in found)
    assert found[0].top_logprobs[0].logprob >= found[0].top_logprobs[1].logprob
    old = served.client.completions.create(
        model=MODEL, prompt=[1, 2, 3], logprobs=2, max_tokens=5, temperature=0
    )
    logprobs = old.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert len(logprobs.tokens) == old.usage.completion_tokens


def test_stop_bias_and_penalties_reach_the_sampler(served, decoder, tiny_target, endless) -> None:
    free = ask(served, CONVERSATIONS[3], max_tokens=30, logit_bias=endless)
    assert free.choices[0].finish_reason == "length"
    assert free.usage.completion_tokens == 30
    text = free.choices[0].message.content
    stop = text.split()[3]
    stopped = ask(served, CONVERSATIONS[3], max_tokens=30, logit_bias=endless, stop=[stop])
    assert stopped.choices[0].message.content == text[: text.index(stop)]
    assert stopped.choices[0].finish_reason == "stop"
    settings = {"presence_penalty": 2.0, "frequency_penalty": 2.0}
    bias = {token: -100.0 for token in tiny_target.eos_ids}
    expected = decoder.generate(CONVERSATIONS[3], 30, logit_bias=bias, **settings)
    found = ask(served, CONVERSATIONS[3], max_tokens=30, logit_bias=endless, **settings)
    assert found.choices[0].message.content == expected.text != text


def test_many_at_a_time_get_what_each_gets_alone(served, decoder) -> None:
    jobs = [(CONVERSATIONS[i % 12], random.Random(i).randint(1, 30)) for i in range(32)]
    expected = [decoder.generate(*job).text for job in jobs]

    def one(job) -> str:
        return ask(served, job[0], max_tokens=job[1]).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        assert list(pool.map(one, jobs)) == expected


def test_models_health_and_metrics(served) -> None:
    assert [model.id for model in served.client.models.list()] == [MODEL]
    assert served.http.get("/health").json() == {"status": "ok"}
    page = served.http.get("/metrics").text
    assert 'dspark_requests_total{reason="stop"}' in page
    assert "dspark_time_to_first_token_seconds_count" in page


@pytest.mark.parametrize(
    ("settings", "status", "message"),
    [
        ({"temperature": 3}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 17}, 400, "n: "),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 10**6}, 400, "at most 2048 are allowed"),
        ({"stop": ["a", "b", "c", "d", "e"]}, 400, "at most 4"),
        ({"logit_bias": {"5": 1000}}, 400, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, 400, "token id 99999"),
        ({"top_logprobs": 50, "logprobs": True}, 400, "top_logprobs"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "user"}]}, 400, "content"),
        ({"model": "other"}, 404, "'other' is not served"),
        ({"extra_body": {"nonsense": 1}}, 400, "nonsense"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
    ],
)
def test_what_is_refused(served, settings, status, message) -> None:
    given = {"model": MODEL, "messages": CONVERSATIONS[0], **settings}
    with pytest.raises(openai.APIStatusError, match="Error code") as caught:
        served.client.chat.completions.create(**given)
    assert caught.value.status_code == status
    assert message in str(caught.value)
    assert set(caught.value.response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model": 1}', b"\xff\xfe"])
def test_bodies_that_are_no_requests(served, body) -> None:
    answer = served.http.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert "message" in answer.json()["error"]


def test_unknown_paths_and_methods_are_answered_in_the_same_words(served) -> None:
    for answer in (served.http.get("/v1/nothing"), served.http.get("/v1/completions")):
        assert answer.status_code in (404, 405)
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_long_bodies(served) -> None:
    long = b"x" * (1 << 21)
    assert served.http.post("/v1/completions", content=long).status_code == 413
    pieces = (b"x" * (1 << 18) for _ in range(8))  # does not say how long it is
    assert served.http.post("/v1/completions", content=pieces).status_code == 413


def test_a_long_prompt(tiny_target) -> None:
    with (
        serving(tiny_target, limits=Limits(max_prompt_tokens=5)) as one,
        pytest.raises(openai.BadRequestError, match="at most 5 are allowed here"),
    ):
        one.client.completions.create(model=MODEL, prompt=[1] * 6)


def test_an_api_key(tiny_target) -> None:
    with serving(tiny_target, api_key="secret") as one:
        assert ask(one, CONVERSATIONS[0]).choices
        for path in ("/v1/models", "/metrics"):
            assert one.http.get(path).status_code == 401
        assert one.http.get("/health").status_code == 200
        wrong = openai.OpenAI(base_url=f"{one.url}/v1", api_key="wrong", max_retries=0)
        with pytest.raises(openai.AuthenticationError):
            wrong.models.list()


def test_a_full_queue_answers_429(tiny_target, endless) -> None:
    with serving(tiny_target, rows=1, max_waiting=1) as one:
        streams = []

        def fill() -> None:
            for _ in range(8):
                stream = ask(one, CONVERSATIONS[0], max_tokens=90, stream=True, logit_bias=endless)
                streams.append(stream)

        with pytest.raises(openai.RateLimitError) as caught:
            fill()
        assert caught.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        assert one.idle()
        assert ask(one, CONVERSATIONS[0]).choices


def test_an_answer_that_takes_too_long(tiny_target, endless) -> None:
    with serving(tiny_target, limits=Limits(timeout=0.05)) as one:
        with pytest.raises(openai.InternalServerError, match="no answer within"):
            ask(one, CONVERSATIONS[0], max_tokens=90, logit_bias=endless)
        assert one.idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_row(tiny_target, endless, stream) -> None:
    with serving(tiny_target, rows=1) as one:
        real = one.batcher.engine.step

        def slow():
            time.sleep(0.05)
            return real()

        one.batcher.engine.step = slow
        body = {"model": MODEL, "messages": CONVERSATIONS[0], "max_tokens": 90, "stream": stream}
        content = json.dumps({**body, "temperature": 0, "logit_bias": endless}).encode()
        port = int(one.url.rsplit(":", 1)[1])
        with socket.create_connection(("127.0.0.1", port)) as raw:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}"
            )
            raw.sendall(f"{head}\r\nContent-Type: application/json\r\n\r\n".encode() + content)
            while not one.batcher.live:
                time.sleep(0.01)
            assert not one.idle(0.1)
        before = time.monotonic()
        assert one.idle()
        assert time.monotonic() - before < 1.5
        page = one.http.get("/metrics").text
        assert 'dspark_requests_total{reason="cancelled"} 1.0' in page


def test_a_failure_is_told_and_stays_alone(tiny_target, endless) -> None:
    with serving(tiny_target, rows=2) as one:
        real = one.batcher.engine.step

        def failing():
            if any(r.max_new_tokens == 77 for r in one.batcher.engine.requests):
                raise RuntimeError("out of memory")
            return real()

        one.batcher.engine.step = failing
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            good = pool.submit(ask, one, CONVERSATIONS[0], max_tokens=60, logit_bias=endless)
            with pytest.raises(openai.InternalServerError, match="out of memory"):
                ask(one, CONVERSATIONS[1], max_tokens=77)
            assert good.result().usage.completion_tokens == 60
        stream = ask(one, CONVERSATIONS[1], max_tokens=77, stream=True)
        with pytest.raises(openai.APIError, match="out of memory"):
            list(stream)


@pytest.mark.parametrize("seconds", [20.0, 1.0])
def test_the_end_finishes_or_fails_what_runs(tiny_target, endless, seconds) -> None:
    with serving(tiny_target, rows=1, shutdown_seconds=seconds) as one:
        real, slow = one.batcher.engine.step, 0.02 if seconds > 5 else 0.5

        def step():
            time.sleep(slow)
            return real()

        one.batcher.engine.step = step
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(ask, one, CONVERSATIONS[0], max_tokens=40, logit_bias=endless)
            while not one.batcher.live:
                time.sleep(0.01)
            one.server.should_exit = True
            if seconds > 5:
                assert running.result().usage.completion_tokens == 40
            else:
                with pytest.raises(openai.APIError):
                    running.result()
        while one.batcher.alive:
            time.sleep(0.02)
        with pytest.raises(httpx.HTTPError):
            one.http.get("/health")
