"""One batch ahead: the next one is made while the last one is used."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
_END = object()


def one_ahead(items: Iterable[T]) -> Iterator[T]:
    """The same items in the same order; a thread makes the next one meanwhile.

    Not more than one waits, so memory is bounded. What goes wrong there is raised here.
    """
    source = iter(items)
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="next-batch") as thread:
        coming = thread.submit(next, source, _END)
        while (item := coming.result()) is not _END:
            coming = thread.submit(next, source, _END)
            yield item
