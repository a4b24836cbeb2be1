"""Wording of messages: numbers, lists, and names from outside the agent."""

from collections.abc import Sequence


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 GPU``, ``2 GPUs``; ``many`` where that is not ``one`` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def listed(words: Sequence[str], last: str) -> str:
    """Return words as a sentence lists them, with ``and`` or ``or`` before the last one."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def printable(text: str) -> str:
    """Return a text as one line without control characters: what is not printable is escaped as in Python."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
