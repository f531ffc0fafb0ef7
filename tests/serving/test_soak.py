"""Random requests, cancels and bad input at full concurrency, for SOAK_SECONDS (15).

No wrong token (against the decoder alone, greedy and float32), no leak, no hang. For half an hour:
`SOAK_SECONDS=1800 python -m pytest -s --timeout 2400 tests/serving/test_soak.py`.
"""

import json
import os
import random
import resource
import threading
import time
from collections import Counter

import httpx
import pytest

from dspark_train.decoding import SpeculativeDecoder
from tests import tiny_language
from tests.random_drafter import make_drafter
from tests.serving.served import MODEL, serving

SECONDS = float(os.environ.get("SOAK_SECONDS", "15"))
USERS, ROWS = 24, 8
BAD = (
    b"",
    b"{",
    b'{"model": "tiny", "messages": []}',
    b'{"model": "tiny", "messages": [{"role": "user", "content": "x"}], "temperature": -1}',
    b'{"model": "other", "messages": [{"role": "user", "content": "x"}]}',
    json.dumps({"model": MODEL, "prompt": [10**9]}).encode(),
    json.dumps({"model": MODEL, "prompt": [1] * 5000}).encode(),
)


def megabytes() -> float:
    pages = int(open("/proc/self/statm").read().split()[1])  # noqa: SIM115
    return pages * resource.getpagesize() / 2**20


@pytest.mark.slow
@pytest.mark.timeout(max(120, 2 * SECONDS))
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads memory from /proc")
def test_soak(tiny_target) -> None:
    decoder = SpeculativeDecoder.with_drafter(tiny_target, make_drafter(tiny_target, 4))
    asked = [(m, limit) for m in tiny_language.prompts(20) for limit in (1, 7, 40)]
    expected = [decoder.generate(messages, limit).text for messages, limit in asked]
    seen, wrong, end = Counter(), [], time.monotonic() + SECONDS
    with serving(tiny_target, rows=ROWS, max_waiting=12, max_positions=300, chunk=8) as one:
        user = User(one.url, asked, expected, seen, wrong)
        threads = [threading.Thread(target=user.run, args=(n, end)) for n in range(USERS)]
        for thread in threads:
            thread.start()
        time.sleep(SECONDS / 3)
        early = megabytes()
        for thread in threads:
            thread.join(SECONDS + 60)
            assert not thread.is_alive(), "a user hangs"
        late = megabytes()
        assert one.idle()
        assert one.batcher.engine.free == ROWS
        assert one.http.get("/health").status_code == 200
        page = one.http.get("/metrics").text
    print(f"{SECONDS:g} s: {dict(seen)}, {early:.0f} MB -> {late:.0f} MB")
    assert not wrong
    assert min(seen[kind] for kind in ("answered", "streamed", "left", "bad", "busy")) > 0
    assert late - early < 60
    assert 'dspark_requests_total{reason="cancelled"}' in page
    assert 'reason="failed"' not in page


class User:
    """Does one thing after another, at random."""

    def __init__(self, url, asked, expected, seen, wrong) -> None:
        self.url, self.asked, self.expected = url, asked, expected
        self.seen, self.wrong = seen, wrong

    def run(self, number: int, end: float) -> None:
        chance = random.Random(number)
        with httpx.Client(base_url=self.url, timeout=60, trust_env=False) as client:
            while time.monotonic() < end:
                try:
                    self.once(client, chance)
                except Exception as error:  # a thread must not die in silence
                    self.wrong.append(repr(error))
                    return

    def once(self, client: httpx.Client, chance: random.Random) -> None:
        kind = chance.choices(("answered", "streamed", "left", "bad"), (4, 3, 2, 1))[0]
        if kind == "bad":
            path = chance.choice(("/v1/chat/completions", "/v1/completions"))
            answer = client.post(path, content=chance.choice(BAD))
            if answer.status_code not in (400, 404):
                self.wrong.append((kind, answer.status_code, answer.text))
            self.seen[kind] += 1
            return
        i = chance.randrange(len(self.asked))
        messages, limit = self.asked[i]
        body = {"model": MODEL, "messages": messages, "max_tokens": limit, "temperature": 0}
        path = "/v1/chat/completions"
        if kind == "answered":
            answer = client.post(path, json=body)
            if answer.status_code == 429:
                self.seen["busy"] += 1
                return
            text = answer.json()["choices"][0]["message"]["content"]
        else:
            text = ""
            with client.stream("POST", path, json={**body, "stream": True}) as answer:
                if answer.status_code == 429:
                    self.seen["busy"] += 1
                    return
                for line in answer.iter_lines():
                    if kind == "left" and chance.random() < 0.3:
                        self.seen[kind] += 1
                        return
                    if line.startswith("data: {"):
                        (choice,) = json.loads(line[6:])["choices"]
                        text += choice["delta"].get("content", "")
        self.seen[kind] += 1
        if text != self.expected[i]:
            self.wrong.append((kind, messages, limit, text, self.expected[i]))
