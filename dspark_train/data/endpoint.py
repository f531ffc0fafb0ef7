"""Answers from a server that speaks OpenAI's completions: vLLM, SGLang, llama.cpp and others.

Prompts are sent as token ids, so the chat template is ours and the server's plays no part. Where
the server returns token ids these are taken, else its text is tokenised and checked to come back.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    wait_random_exponential,
)

from dspark_train.config_data import EndpointConfig
from dspark_train.data.answers import Answer, Progress
from dspark_train.target import Target

LONGEST_WAIT = 60.0
BUSY = (408, 409, 425, 429)


class UnreadableError(Exception):
    """An answer that is not one to what was asked; it is asked for again."""


class EndpointAnswers:
    """A server's answers: so many requests at once, each repeated until it is answered.

    Attributes:
        retries: requests that had to be repeated so far.
    """

    def __init__(
        self,
        endpoint: EndpointConfig,
        target: Target,
        sampling: Mapping[str, float],
        *,
        max_new_tokens: int,
    ) -> None:
        """Nothing is sent yet.

        Args:
            endpoint: where and how.
            target: whose tokenizer reads text; the server must serve the same model.
            sampling: settings by their names in the protocol, sent as they are.
            max_new_tokens: of each answer; the context may end it earlier.
        """
        self.endpoint, self.target, self.sampling = endpoint, target, dict(sampling)
        self.max_new_tokens = max_new_tokens
        self.retries, self._lock = 0, threading.Lock()

    def __call__(
        self, prompts: Sequence[list[int]], seeds: Sequence[int], progress: Progress
    ) -> list[Answer]:
        """Ask for all.

        Raises:
            ValueError: the server refuses a request, or does not answer it after all repetitions.
        """
        e = self.endpoint
        key = os.environ.get(e.key_env)
        with (
            httpx.Client(
                base_url=f"{e.url.rstrip('/')}/",
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=e.timeout,
                limits=httpx.Limits(max_connections=e.concurrency),
            ) as client,
            ThreadPoolExecutor(e.concurrency, thread_name_prefix="endpoint") as threads,
        ):

            def ask(prompt: list[int], seed: int) -> Answer:
                answer = self._ask(client, prompt, seed)
                with self._lock:
                    progress(len(answer.tokens))
                return answer

            coming = [threads.submit(ask, *one) for one in zip(prompts, seeds, strict=True)]
            try:
                return [answer.result() for answer in coming]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _ask(self, client: httpx.Client, prompt: list[int], seed: int) -> Answer:
        """One answer, asked for until it comes."""
        e, room = self.endpoint, self.target.max_positions - len(prompt)
        request = {
            "model": e.model,
            "prompt": prompt,
            "max_tokens": min(self.max_new_tokens, room),
            "seed": seed & 0x7FFF_FFFF,  # some servers keep 32 bits
            "n": 1,
            "stream": False,
            "skip_special_tokens": False,
            "return_token_ids": True,
            **self.sampling,
        }
        retrying = Retrying(
            stop=stop_after_attempt(e.attempts),
            wait=wait_random_exponential(multiplier=e.wait, max=LONGEST_WAIT),
            retry=retry_if_exception_type((httpx.TransportError, UnreadableError)),
            before_sleep=self._count,
            reraise=True,
        )
        try:
            return retrying(self._once, client, request)
        except (httpx.TransportError, UnreadableError) as error:
            raise ValueError(
                f"endpoint.url={e.url} did not answer after {e.attempts} attempts "
                f"({type(error).__name__}: {error}): what is finished is kept; see to the server "
                "and run the same command again"
            ) from error

    def _count(self, _: RetryCallState) -> None:
        with self._lock:
            self.retries += 1

    def _once(self, client: httpx.Client, request: dict[str, Any]) -> Answer:
        response = client.post("completions", json=request)
        if response.status_code >= 500 or response.status_code in BUSY:
            raise UnreadableError(f"status {response.status_code}: {response.text[:200]}")
        if response.status_code != 200:
            raise ValueError(
                f"endpoint.url={self.endpoint.url} refuses the request with status "
                f"{response.status_code}: {response.text[:300]}; expected a server of OpenAI's "
                f"completions that serves endpoint.model={self.endpoint.model}"
            )
        try:
            return self._read(response.json(), request)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise UnreadableError(f"{error!r} in {response.text[:200]}") from error

    def _read(self, body: dict[str, Any], request: dict[str, Any]) -> Answer:
        """The answer in a response; whatever is odd about it raises."""
        [choice] = body["choices"]
        prompt, reason = request["prompt"], choice["finish_reason"]
        seen = choice.get("prompt_token_ids") or body.get("prompt_token_ids") or prompt
        length = (body.get("usage") or {}).get("prompt_tokens", len(prompt))
        if seen != prompt or length != len(prompt):
            raise UnreadableError(
                f"it answers another prompt, of {length} tokens instead of {len(prompt)}: of "
                "another request, cut, or with tokens of its own"
            )
        if reason not in ("stop", "length"):
            raise UnreadableError(f"it ended with {reason!r}")
        eos, ids = self.target.eos_ids, choice.get("token_ids")
        if ids is not None:
            if not all(isinstance(i, int) and 0 <= i < self.target.vocab_size for i in ids):
                raise UnreadableError("its token ids are not those of the target")
            origin = "generated"
        else:
            tokenizer, text = self.target.tokenizer, choice["text"]
            ids = tokenizer.encode(text, add_special_tokens=False)
            back = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
            origin = "text" if back == text else "differs"
        ids = list(ids)
        if reason == "stop" and eos and (not ids or ids[-1] not in eos):
            ids.append(eos[0])  # servers leave it out of the text, some out of the ids
        if len(ids) > request["max_tokens"] + 1:
            raise UnreadableError(f"it has {len(ids)} tokens, {request['max_tokens']} were asked")
        return Answer(ids, reason, origin)
