"""Tokens to text as they come: whole characters only, and an end at stop strings."""

from collections.abc import Iterable
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Text of one response, one token at a time.

    A token may end inside a character; such text waits for the next token. Only the few tokens
    since the last whole character are decoded again, so the cost per token is constant.

    Args:
        tokenizer: of the target.
        stop: strings that end the response; the text ends before the first of them.
    """

    def __init__(self, tokenizer: Any, stop: Iterable[str] = ()) -> None:
        self.tokenizer, self.stop = tokenizer, tuple(stop)
        self.text = ""
        self.stopped = False
        self._ids: list[int] = []
        self._settled = self._read = 0
        self._taken = 0

    def push(self, token: int) -> bool:
        """Add a token; True if it completed a stop string, which ends the text."""
        self._ids.append(token)
        return self._extend(final=False)

    def finish(self) -> str:
        """Text that was still held back: nothing follows."""
        if not self.stopped:
            self._extend(final=True)
        piece, self._taken = self.text[self._taken :], len(self.text)
        return piece

    def take(self) -> str:
        """Text since the last call that no later token can change or turn into a stop string."""
        end = len(self.text) if self.stopped else len(self.text) - self._possible_stop()
        piece, self._taken = self.text[self._taken : end], max(self._taken, end)
        return piece

    def _extend(self, final: bool) -> bool:
        # the tokens before the new ones are decoded with them: some tokenizers join words by space
        known = self._decode(self._ids[self._settled : self._read])
        fresh = self._decode(self._ids[self._settled :])
        silent = len(fresh) == len(known)  # a special token: no context for the next one's space
        if silent or (fresh.endswith(_INCOMPLETE) and not final):
            return False
        start = len(self.text)
        self.text += fresh[len(known) :]
        self._settled, self._read = self._read, len(self._ids)
        return self._cut(start)

    def _cut(self, start: int) -> bool:
        found = [self.text.find(s, max(0, start - len(s) + 1)) for s in self.stop]
        found = [place for place in found if place >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True
        return self.stopped

    def _possible_stop(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        return max(
            (n for s in self.stop for n in range(1, len(s)) if self.text.endswith(s[:n])),
            default=0,
        )

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
