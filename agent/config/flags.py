"""Reads the flags of ``gpu-agent run`` the way Go's flag package does, as NVIDIA's plugin's users expect.

``--name=value``, ``--name value``, one dash or two; a switch may stand alone, which means true. Of a
flag given twice the last one counts, lists are put together. Not argparse, because its import alone
costs a tenth of the time in which a restarted agent has to be registered, and because all problems are
told at once.
"""

from collections.abc import Iterable, Sequence

from agent.config.option import Option
from agent.config.values import bool_from


def parse(arguments: Sequence[str], options: Iterable[Option]) -> tuple[dict[str, str], list[str]]:
    """Return the values by option name, and what is wrong, each as a sentence."""
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
                words.pop()  # the value of what was misspelt
        elif has_value:
            _add(values, option, value)
        elif option.is_switch:
            _add(values, option, words.pop() if words and _is_bool(words[-1]) else "true")
        elif words:
            _add(values, option, words.pop())
        else:
            problems.append(f"--{name} needs a value")
    return values, problems


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
