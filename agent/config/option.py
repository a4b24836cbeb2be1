"""What an option of ``gpu-agent run`` is: one setting and every name it goes by.

Invariants: a value is text until its option's parser has seen it, wherever it came from.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

ENVIRONMENT_PREFIX: Final = "GPU_AGENT_"

AND_MORE: Final = "and more"
"""Ends a list of problems that is too long to be told."""


class Option(NamedTuple):
    """One setting and every name it goes by."""

    name: str
    """The flag without its dashes."""
    default: str
    parse: Callable[[str], object]
    metavar: str
    help: str
    environment: str
    file_key: str
    """Path in the configuration file; empty where it cannot be set there."""
    aliases: tuple[str, ...] = ()
    other_environment: tuple[str, ...] = ()
    """Further variables, which count where the first is not set."""
    is_switch: bool = False
    """Whether the flag may stand without a value, which then means true."""
    is_list: bool = False
    """Whether the flag may be repeated and the file may give a list; elsewhere commas separate."""
    splits_in_file: bool = True
    """Whether commas separate in the file too; NVIDIA's plugin takes some words there as they are."""
    empty_means: str = ""
    """What an empty value does; without it an empty environment variable counts as unset."""
    needs_restart: bool = False
    """Whether a change of it in the file takes effect at the next start only."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Every environment variable that sets it, the first one that is set counts."""
        return (self.environment, *self.other_environment)


def ours(
    name: str,
    default: str,
    parse: Callable[[str], object],
    metavar: str,
    text: str,
    *,
    file_key: str | None = None,
    is_switch: bool = False,
    is_list: bool = False,
    empty_means: str = "",
    needs_restart: bool = False,
) -> Option:
    """Describe an option that NVIDIA's plugin does not have; its names follow from the flag's."""
    return Option(
        name=name,
        default=default,
        parse=parse,
        metavar=metavar,
        help=text,
        environment=ENVIRONMENT_PREFIX + name.upper().replace("-", "_"),
        file_key=f"agent.{_camel_case(name)}" if file_key is None else file_key,
        is_switch=is_switch,
        is_list=is_list,
        empty_means=empty_means,
        needs_restart=needs_restart,
    )


def _camel_case(name: str) -> str:
    first, *rest = name.split("-")
    return first + "".join(word.capitalize() for word in rest)


def shown(text: str) -> str:
    """Return a text as it can stand in a sentence."""
    return text if len(text) <= 80 else text[:77] + "..."
