"""What can happen to the CDI spec files of a simulated node."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.errors import UsageError
from agent.simulation.action_table import action, choice, parameter

if TYPE_CHECKING:
    from agent.simulation.node import SimulatedNode


@dataclass(frozen=True, slots=True)
class Cdi:
    """Take away the CDI spec files, as a clean-up of /var/run does that knows no better."""

    what: str = parameter("WHAT", "delete", choice("delete"))

    async def apply(self, node: "SimulatedNode") -> str:
        """Delete every spec file."""
        files = sorted(node.directory.cdi.glob("*.json"))
        if not files:
            raise UsageError(
                "The simulated node has no CDI spec file; the agent writes one with a CDI strategy, such as"
                " device-list-strategy: cdi-cri"
            )
        for file in files:
            file.unlink()
        return f"The CDI spec file {', '.join(file.name for file in files)} is deleted"


CDI_ACTIONS: Final = (action(Cdi, "cdi", "what"),)
