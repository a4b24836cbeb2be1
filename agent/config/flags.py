"""Parses the flags of ``gpu-agent run`` as Go's flag package does, as users of NVIDIA's plugin expect.

``--name=value``, ``--name value``, one dash or two; a switch without a value means true. The last value of a
repeated flag counts, lists are concatenated. Not argparse: its import alone costs a tenth of the time in
which a restarted agent has to be registered, and this parser reports all problems at once.
"""

from collections.abc import Iterable, Sequence

from agent.config.option import Option
from agent.config.values import bool_from


def parse(arguments: Sequence[str], options: Iterable[Option]) -> tuple[dict[str, str], list[str]]:
    """Return the values by option name, and the problems, each as a sentence."""
    by_flag = {flag: option for option in options for flag in (option.name, *option.aliases)}
    values: dict[str, str] = {}
    problems: list[str] = []
    words = list(reversed(arguments))
    while words:
        word = words.pop()
        if not word.startswith("-") or not word.strip("-"):
            problems.append(f'"{word[:80]}" is not expected here; run takes flags only')
            continue
        name, has_value, value = word.lstrip("-").partition("=")
        option = by_flag.get(name)
        if option is None:
            problems.append(_unknown(name, by_flag))
            if not has_value and words and not words[-1].startswith("-"):
                words.pop()  # the value of the misspelt flag
        else:
            problems += _read_value(values, option, value if has_value else None, words)
    return values, problems


def split(arguments: Sequence[str], options: Iterable[Option]) -> tuple[dict[str, str], list[str], list[str]]:
    """Return the values, the problems, and the remaining words in their order.

    For a command with arguments of its own; after ``--`` no word is a flag.
    """
    by_flag = {flag: option for option in options for flag in (option.name, *option.aliases)}
    values: dict[str, str] = {}
    problems: list[str] = []
    others: list[str] = []
    words = list(reversed(arguments))
    while words:
        word = words.pop()
        if word == "--":
            return values, problems, [*others, word, *reversed(words)]
        name, has_value, value = word.lstrip("-").partition("=")
        option = by_flag.get(name) if word.startswith("-") else None
        if option is None:
            others.append(word)
        else:
            problems += _read_value(values, option, value if has_value else None, words)
    return values, problems, others


def _read_value(values: dict[str, str], option: Option, value: str | None, words: list[str]) -> list[str]:
    """Add a flag's value, the next of ``words`` if it has none after ``=``; returns the problems."""
    if value is not None:
        _add(values, option, value)
    elif option.is_switch:
        _add(values, option, words.pop() if words and _is_bool(words[-1]) else "true")
    elif words:
        _add(values, option, words.pop())
    else:
        return [f"--{option.name} needs a value"]
    return []


def _add(values: dict[str, str], option: Option, text: str) -> None:
    before = values.get(option.name) if option.is_list else None
    values[option.name] = f"{before},{text}" if before else text


def _is_bool(word: str) -> bool:
    try:
        bool_from(word)
    except ValueError:
        return False
    return True


def _unknown(name: str, known: Iterable[str]) -> str:
    from agent.spelling import suggestion  # noqa: PLC0415 - only where something is wrong

    return f'"--{name[:80]}" is no flag{suggestion(name, known)}'
