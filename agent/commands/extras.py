"""The extras of the package, each a distribution of its own: found by entry points, imported when asked for.

Guarantee: nothing of this is read for ``gpu-agent run``, whose start it would delay.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from agent.errors import AgentError, UsageError

if TYPE_CHECKING:
    from agent.commands.table import CommandGroup
    from agent.config.settings import Settings
    from agent.model.snapshot import Snapshot

COMMANDS: Final = "gpu_agent.commands"
"""Entry points whose object is a CommandGroup."""
SCENARIOS: Final = "gpu_agent.scenarios"
"""Entry points whose object takes a scenario's name and flags, and returns a ScenarioNode."""
SIMULATION: Final = "gpu-agent[simulation]"
SIMULATION_COMMANDS: Final = ("demo", "simulate", "inject")
"""Their names alone, for where the extra is not installed."""


class ScenarioNode(Protocol):
    """The node of a scenario before its first step, from its specification alone: nothing is started."""

    @property
    def settings(self) -> "Settings":
        """What an agent would run with on it."""

    @property
    def snapshot(self) -> "Snapshot":
        """The agent's snapshot of it, with every GPU healthy."""

    @property
    def driver_version(self) -> str:
        """The version of its driver."""

    def write_roots(self, directory: Path) -> None:
        """Write the driver's files under ``directory``/driver, and those of the kernel under sys and proc."""


def command_groups() -> tuple["CommandGroup", ...]:
    """Return the commands of the extras that are installed; raises AgentError."""
    return tuple(cast("CommandGroup", found) for found in _load(COMMANDS))


def scenario_node(name: str, flags: Mapping[str, str]) -> ScenarioNode:
    """Return a scenario's node for an agent with these flags; raises AgentError."""
    for load in _load(SCENARIOS):
        return cast("ScenarioNode", load(name, flags))
    raise not_installed("--scenario")


def not_installed(what: str) -> UsageError:
    """Return the error of a command or flag that needs the simulated node."""
    return UsageError(
        f"{what} needs the simulated node, which is not installed; install it with: "
        f"pip install '{SIMULATION}' (in a checkout: make setup)"
    )


def _load(group: str) -> list[Any]:
    # It reads the metadata of every installed package.
    from importlib.metadata import entry_points  # noqa: PLC0415

    loaded = []
    for point in entry_points(group=group):
        try:
            loaded.append(point.load())
        except (ImportError, AttributeError) as error:
            raise AgentError(
                f"The extra {point.name} cannot be imported: {error}; "
                f"install it again in the version of gpu-agent, with: pip install '{SIMULATION}'"
            ) from error
    return loaded
