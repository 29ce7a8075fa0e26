"""Progress of long loops: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

#: Seconds between two lines of a loop in a log; a shorter loop prints none.
INTERVAL = 30.0

_Say = Callable[[str], None]
_log: ContextVar[_Say | None] = ContextVar("headprune_log", default=None)


@contextmanager
def lines_to(say: _Say | None) -> Iterator[None]:
    """Inside the block, loops print lines with ``say`` instead of bars; None changes nothing."""
    token = _log.set(say or _log.get())
    try:
        yield
    finally:
        _log.reset(token)


def bar(
    items: Iterable[Any] | None, what: str, show: bool | None = False, total: int | None = None
) -> Any:
    """Return a tqdm over the items.

    Args:
        items: What the loop goes through; None for a bar that is moved by ``update``.
        what: What the loop does.
        show: Show a bar; None shows it on a terminal only. Lines in a log do not depend on it.
        total: How far ``update`` can move it, without items.
    """
    from tqdm import tqdm as plain
    from tqdm.auto import tqdm

    say = _log.get()
    if items is not None:
        total = operator.length_hint(items) or None
        # tqdm.auto asks for an iterator of its own, and a DataLoader starts its workers for each:
        # give it one.
        items = iter(items)
    if say is None:
        disable = None if show is None else not show
        return tqdm(items, desc=what, total=total, disable=disable, leave=False)
    done = "{percentage:.0f} % ({n_fmt} of {total_fmt}), {elapsed} so far, {remaining} to go"
    if total is None:
        done = "{n_fmt}, {elapsed} so far"
    return plain(
        items,
        desc=what,
        total=total,
        file=_Lines(say),
        mininterval=INTERVAL,
        delay=INTERVAL,
        miniters=1,
        position=0,  # another one would move the cursor
        leave=False,
        bar_format=f"{{desc}}: {done}{{postfix}}",
    )


def announce(text: str, show: bool | None = False) -> None:
    """Print one line before long work, where bars are shown.

    Args:
        text: The line.
        show: As for ``bar``.
    """
    if show or (show is None and sys.stderr.isatty()):
        print(text, file=sys.stderr)


class _Lines:
    """A file that passes on what tqdm writes, without the blanks that it erases with."""

    def __init__(self, say: _Say) -> None:
        self._say = say

    def write(self, text: str) -> None:
        if text.strip():
            self._say(text.strip())

    def flush(self) -> None:
        """Do nothing: every line is printed at once."""
