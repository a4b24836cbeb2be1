"""The command line: finds the command and turns errors into sentences.

Guarantees: results go to standard output, all else to standard error; an error is one sentence and
never a traceback; exit codes are 0 for success, 1 for failed or not ready, 2 for usage, bad
configuration or an unknown answer. Only the chosen command's code is imported, because a plugin that
starts slowly leaves a node without GPUs for longer.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from agent import __version__
from agent.errors import EXIT_FAILED, EXIT_USAGE, AgentError, ConfigError, UsageError

if TYPE_CHECKING:
    import argparse

    from agent.commands.arguments import Parser

INTERRUPTED: Final = 130
"""128 + SIGINT, as in a shell."""


class CommandModule(Protocol):
    """Interface of a command's module."""

    def configure(self, parser: "Parser") -> None:
        """Add the command's flags, description and examples."""

    def main(self, args: "argparse.Namespace") -> int:
        """Execute the command and return the exit code."""


class Command(NamedTuple):
    """One command."""

    name: str
    summary: str
    module: str


class CommandGroup(NamedTuple):
    """Commands under one title of the help."""

    title: str
    commands: tuple[Command, ...]
    examples: str = ""
    """Lines among the examples of the help."""
    extra: str = ""
    """The extra that they are installed with; empty: always there."""


GROUPS: Final = (
    CommandGroup(
        "On a GPU node",
        (
            Command("run", "Advertise this node's GPUs to the kubelet and watch them", "agent.commands.run"),
            Command(
                "status", "Show the running agent and why the node is not ready", "agent.commands.status"
            ),
            Command("devices", "Show each device, its health and the reason", "agent.commands.devices"),
            Command("describe", "Show everything the agent knows of one GPU", "agent.commands.describe"),
            Command("topology", "Show how the GPUs are connected", "agent.commands.topology"),
            Command("contexts", "Show each process on a GPU and its contexts", "agent.commands.contexts"),
            Command(
                "owners", "Show the pod each GPU is allocated to, and its users", "agent.commands.owners"
            ),
            Command("trace", "Show the driver calls of one process, live", "agent.commands.trace"),
            Command("events", "Show the events of this node", "agent.commands.events"),
            Command("allocate", "Show what a container would get, as a dry run", "agent.commands.allocate"),
            Command("cdi", "Show the CDI specification, or check one", "agent.commands.cdi"),
        ),
    ),
    CommandGroup(
        "Maintenance",
        (
            Command("hold", "Keep a GPU Unhealthy until unhold, over reboots", "agent.commands.hold"),
            Command("unhold", "Return a held GPU to service", "agent.commands.unhold"),
            Command("recover", "Declare a GPU healthy", "agent.commands.recover"),
            Command("release", "Release the driver, for a reset or an unload", "agent.commands.release"),
            Command("resume", "Open the driver again", "agent.commands.resume"),
            Command("bundle", "Save the evidence of a GPU, for an RMA", "agent.commands.bundle"),
        ),
    ),
    CommandGroup(
        "Other",
        (
            Command("explain", "Explain reason codes and XIDs", "agent.commands.explain"),
            Command("config", "Show, check and explain the configuration", "agent.commands.config"),
            Command("completion", "Print the completion of a shell", "agent.commands.completion"),
            Command("version", "Show the version", "agent.commands.version"),
        ),
    ),
)

_COMMANDS: Final = {command.name: command for group in GROUPS for command in group.commands}

_EXAMPLES: Final = """\
  gpu-agent run                       the agent of this node
  gpu-agent devices                   the devices of the running agent
"""


def all_groups() -> tuple[CommandGroup, ...]:
    """Return the groups with those of the extras that are installed; raises AgentError."""
    from agent.extras import command_groups  # noqa: PLC0415 - not for run, which must start fast

    *own, other = GROUPS
    return (*own, *command_groups(), other)


def all_commands() -> dict[str, Command]:
    """Return every command that is installed by its name; raises AgentError."""
    return {command.name: command for group in all_groups() for command in group.commands}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        _complain(*error.problems)
        return error.exit_code
    except AgentError as error:
        _complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has exited, as `head` does; nothing more can be written there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exiting:
        # argparse exits so after it printed help.
        return exiting.code if isinstance(exiting.code, int) else EXIT_FAILED
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0 if arguments else EXIT_USAGE
    name, *rest = arguments
    if name in ("--version", "-V"):
        print(f"gpu-agent {__version__}")
        return 0
    if name == "run" and not {"-h", "--help"} & set(rest):
        from agent.commands.run import run  # noqa: PLC0415 - only what is needed

        return run(rest)
    return _with_argparse(_COMMANDS.get(name) or _command_of_an_extra(name), rest)


def _command_of_an_extra(name: str) -> Command:
    from agent.extras import SIMULATION_COMMANDS, not_installed  # noqa: PLC0415 - as above
    from agent.spelling import suggestion  # noqa: PLC0415 - only where something is wrong

    installed = all_commands()
    if name in installed:
        return installed[name]
    if name in SIMULATION_COMMANDS:
        raise not_installed(f"gpu-agent {name}")
    raise UsageError(f'"{name[:80]}" is no command{suggestion(name, tuple(installed))}; see gpu-agent --help')


def _with_argparse(command: Command, arguments: list[str]) -> int:
    from agent.commands.arguments import Parser  # noqa: PLC0415 - not needed by run, which must start fast

    module = cast("CommandModule", importlib.import_module(command.module))
    parser = Parser(command.name)
    module.configure(parser)
    return module.main(parser.parse(arguments))


def _complain(*sentences: str) -> None:
    from agent.core.wording import printable  # noqa: PLC0415 - only where something is wrong

    for sentence in sentences:
        # A sentence may quote untrusted text, and the last lines of a child.
        first, *further = sentence.splitlines() or [""]
        print(f"gpu-agent: {printable(first)}", *map(printable, further), sep="\n", file=sys.stderr)


def _help() -> str:
    groups = all_groups()
    examples = "".join(group.examples for group in groups) + _EXAMPLES
    lines = ["The GPU node agent: device plugin, health and preflight.", "", f"Examples:\n{examples}"]
    for group in groups:
        lines.append(f"{group.title}:")
        lines += [f"  {command.name:10} {command.summary}" for command in group.commands]
        lines.append("")
    lines += [
        "Exit codes: 0 success, 1 failed or not ready, 2 usage, bad configuration or",
        "an unknown answer. Every command explains itself: gpu-agent COMMAND --help",
        "",
    ]
    return "\n".join(lines)
