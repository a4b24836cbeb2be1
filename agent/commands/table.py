"""The table of commands, by name and module: only the module of the chosen one is imported."""

import importlib
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    import argparse

    from agent.commands.arguments import Parser


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


def all_groups() -> tuple[CommandGroup, ...]:
    """Return the groups with those of the extras that are installed; raises AgentError."""
    from agent.commands.extras import command_groups  # noqa: PLC0415 - not for run, which must start fast

    *own, other = GROUPS
    return (*own, *command_groups(), other)


def all_commands() -> dict[str, Command]:
    """Return every command that is installed by its name; raises AgentError."""
    return {command.name: command for group in all_groups() for command in group.commands}


def module_of(command: Command) -> CommandModule:
    """Import a command's module, and no other's."""
    return cast("CommandModule", importlib.import_module(command.module))
