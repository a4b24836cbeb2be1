"""The command line as data: every command with its flags and words, as its own parser has them.

Completions and the manual are generated from it, so they agree with ``--help``.
"""

import argparse
import re
from collections.abc import Iterator
from typing import Final, Literal, NamedTuple

from agent.commands.arguments import Parser
from agent.commands.table import Command, CommandGroup, CommandModule, all_groups, module_of

Kind = Literal["none", "path", "text"]

_PATHS: Final = re.compile(r"\b(?:FILE|PATH|DIR|DIRECTORY)\b")


class Argument(NamedTuple):
    """A flag, or a word where ``names`` is empty."""

    names: tuple[str, ...]
    metavar: str
    """Placeholder of the value; empty: the flag has none."""
    kind: Kind
    """What the value is: none, a path of a file, or other text."""
    choices: tuple[str, ...]
    help: str


class Described(NamedTuple):
    """One command."""

    command: Command
    usage: str
    description: str
    arguments: tuple[Argument, ...]

    @property
    def flags(self) -> tuple[Argument, ...]:
        """The arguments that have a name."""
        return tuple(each for each in self.arguments if each.names)

    @property
    def words(self) -> tuple[str, ...]:
        """Positional words, as far as they are a closed set."""
        return tuple(choice for each in self.arguments if not each.names for choice in each.choices)

    @property
    def takes_path(self) -> bool:
        """Whether a positional word may be a path."""
        return any(each.kind == "path" for each in self.arguments if not each.names)


def described() -> Iterator[tuple[CommandGroup, Described]]:
    """Yield each command that is installed, with its group."""
    for group in all_groups():
        for command in group.commands:
            yield group, _described(command, module_of(command))


def _described(command: Command, module: CommandModule) -> Described:
    parser = Parser(command.name)
    module.configure(parser)
    listed = [_argument(action) for action in parser._actions]  # noqa: SLF001 - argparse has no other way
    listed += [
        Argument(
            tuple(f"--{name}" for name in (option.name, *option.aliases)),
            "" if option.is_switch else option.metavar,
            "none" if option.is_switch else _kind(option.metavar),
            (),
            option.help,
        )
        for option in parser.accepted_options
    ]
    usage = parser.format_usage().removeprefix("usage: ").strip()
    return Described(command, usage, parser.description or "", tuple(listed))


def _argument(action: argparse.Action) -> Argument:
    takes_none = action.nargs == 0
    metavar = "" if takes_none else str(action.metavar or action.dest.upper())
    choices = tuple(map(str, action.choices or ()))
    text = (action.help or "").replace("%%", "%")
    return Argument(
        tuple(action.option_strings), metavar, "none" if takes_none else _kind(metavar), choices, text
    )


def _kind(metavar: str) -> Kind:
    return "path" if _PATHS.search(metavar) else "text"
