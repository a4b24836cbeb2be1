"""Words of sentences for people that depend on a number."""

from collections.abc import Sequence


def counted(number: int, one: str, many: str = "") -> str:
    """Return a number with its noun: ``1 GPU``, ``2 GPUs``; ``many`` where that is not ``one`` with an s."""
    return f"{number} {one if number == 1 else many or one + 's'}"


def listed(words: Sequence[str], last: str) -> str:
    """Return words as a sentence lists them, with ``and`` or ``or`` before the last one."""
    return f" {last} ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
