"""An option of ``gpu-agent run``: one setting with all its names.

Invariants: a value is text until its option's parser has parsed it, whatever its origin.
"""

from collections.abc import Callable
from typing import Final, NamedTuple

ENVIRONMENT_PREFIX: Final = "GPU_AGENT_"

AND_MORE: Final = "and more"
"""Last entry of a truncated list of problems."""


class Option(NamedTuple):
    """One setting with all its names."""

    name: str
    """The flag without its dashes."""
    default: str
    parse: Callable[[str], object]
    metavar: str
    help: str
    environment: str
    file_key: str
    """Path in the configuration file; empty if the file cannot set it."""
    aliases: tuple[str, ...] = ()
    other_environment: tuple[str, ...] = ()
    """Further variables, used if the first is not set."""
    is_switch: bool = False
    """Whether the flag may have no value, which then means true."""
    is_list: bool = False
    """Whether the flag may be repeated and the file may give a list; elsewhere commas separate."""
    splits_in_file: bool = True
    """Whether commas separate in the file too; NVIDIA's plugin does not split some options there."""
    empty_means: str = ""
    """Effect of an empty value; without it an empty environment variable counts as unset."""
    needs_restart: bool = False
    """Whether a change in the file takes effect at the next start only."""
    fills: str = ""
    """The field of Settings that has its value, as ``policy.recovery_quiet_ns``; empty: load makes another
    value of it."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Its environment variables; the first one that is set counts."""
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
    fills: str = "",
) -> Option:
    """Return an option that NVIDIA's plugin does not have; its names follow from the flag's."""
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
        fills=fills,
    )


def _camel_case(name: str) -> str:
    first, *rest = name.split("-")
    return first + "".join(word.capitalize() for word in rest)


def shown(text: str) -> str:
    """Return a text cut for a sentence."""
    return text if len(text) <= 80 else text[:77] + "..."
