"""Suggests the known word closest to a misspelt one."""

import difflib
from collections.abc import Iterable


def suggestion(word: str, known: Iterable[str]) -> str:
    """Return `` (did you mean …?)`` for a misspelt word, or nothing where no known word is close."""
    by_plain_form = {_plain(name): name for name in known}
    close = difflib.get_close_matches(_plain(word)[:100], by_plain_form, n=1, cutoff=0.7)
    return f" (did you mean {by_plain_form[close[0]]}?)" if close else ""


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")
