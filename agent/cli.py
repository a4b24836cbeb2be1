"""The command line: finds the command, parses its flags, turns errors into sentences.

Guarantees: results go to standard output, all else to standard error; an error is one sentence and
never a traceback; exit codes are 0 for success, 1 for failed or not ready, 2 for usage, bad
configuration or could not tell. Only the chosen command's code is imported, because a plugin that
starts slowly leaves a node without GPUs for longer.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NoReturn, Protocol, cast

from agent import __version__
from agent.errors import EXIT_FAILED, EXIT_USAGE, AgentError, ConfigError, UsageError

HELP_WIDTH: Final = 79
INTERRUPTED: Final = 130
"""128 + SIGINT, as a shell says it."""


class CommandModule(Protocol):
    """What a command's module offers."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's flags, description and examples."""

    def main(self, args: argparse.Namespace) -> int:
        """Do it and return the exit code."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command."""

    name: str
    summary: str
    module: str


GROUPS: Final = {
    "On a GPU node": (
        Command("run", "Offer this node's GPUs to the kubelet and watch them", "agent.commands.run"),
        Command("status", "Show the running agent and why the node is not ready", "agent.commands.status"),
        Command("devices", "Show each device, its health and the reason", "agent.commands.devices"),
        Command("events", "Show what happened", "agent.commands.events"),
    ),
    "Without a GPU": (
        Command("demo", "Show a whole simulated node in this terminal", "agent.simulation.demo"),
        Command("simulate", "Run the simulated parts alone", "agent.simulation.simulate"),
        Command("inject", "Put a fault into the simulated node", "agent.simulation.inject"),
    ),
    "Other": (Command("version", "Show the version", "agent.commands.version"),),
}

COMMANDS: Final = {command.name: command for group in GROUPS.values() for command in group}

_EXAMPLES: Final = """\
Examples:
  gpu-agent demo                      a simulated node with 8 GPUs, live
  gpu-agent inject xid 79 --gpu 3     a fault, from a second terminal
  gpu-agent run                       the agent of this node
  gpu-agent devices                   what the running agent offers
"""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are UsageErrors."""

    def error(self, message: str) -> NoReturn:
        """Raise the error instead of printing usage; the sentence says where help is."""
        raise UsageError(f"{message[:1].upper()}{message[1:]}; see {self.prog} --help")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps examples as they are written, and every line within a terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=HELP_WIDTH)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except ConfigError as error:
        _complain(*error.problems)
        return error.exit_code
    except AgentError as error:
        _complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        # Whoever read our output has left, as `head` does; nothing more can be written there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0 if arguments else EXIT_USAGE
    if arguments[0] in ("--version", "-V"):
        print(f"gpu-agent {__version__}")
        return 0
    command = COMMANDS.get(arguments[0])
    if command is None:
        raise UsageError(_unknown(arguments[0], "command", tuple(COMMANDS)) + "; see gpu-agent --help")
    module = cast("CommandModule", importlib.import_module(command.module))
    parser = Parser(
        prog=f"gpu-agent {command.name}",
        usage=f"gpu-agent {command.name} [flags]",
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    module.configure(parser)
    parsed, unknown = parser.parse_known_args(arguments[1:])
    parsed.unknown = [_unknown_argument(parser, word) for word in unknown]
    if parsed.unknown and not getattr(parsed, "reports_unknown", False):
        raise ConfigError(tuple(parsed.unknown))
    code = module.main(parsed)
    sys.stdout.flush()
    return code


def _unknown_argument(parser: argparse.ArgumentParser, word: str) -> str:
    if not word.startswith("-"):
        return f'"{word[:80]}" is not expected here; see {parser.prog} --help'
    name = word.partition("=")[0]
    return _unknown(name, "flag", tuple(flag for flag in _flags(parser) if flag.startswith("--")))


def _flags(parser: argparse.ArgumentParser) -> Sequence[str]:
    return [flag for action in parser._actions for flag in action.option_strings]  # noqa: SLF001 - no other way


def _unknown(word: str, kind: str, known: tuple[str, ...]) -> str:
    from agent.config_file import suggestion  # noqa: PLC0415 - only where something is wrong

    return f'"{word[:80]}" is no {kind}{suggestion(word, known)}'


def _complain(*sentences: str) -> None:
    for sentence in sentences:
        print(f"gpu-agent: {sentence}", file=sys.stderr)


def _help() -> str:
    lines = ["The GPU node agent: device plugin, health and preflight.", "", _EXAMPLES]
    for title, commands in GROUPS.items():
        lines.append(f"{title}:")
        lines += [f"  {command.name:10} {command.summary}" for command in commands]
        lines.append("")
    lines += [
        "Exit codes: 0 success, 1 failed or not ready, 2 usage, bad configuration or",
        "could not tell. Every command explains itself: gpu-agent COMMAND --help",
        "",
    ]
    return "\n".join(lines)
