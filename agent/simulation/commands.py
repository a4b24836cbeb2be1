"""The commands of the simulated node, for the command line of gpu-agent; the entry point of their group."""

from typing import Final

from agent.commands.extras import SIMULATION
from agent.commands.table import Command, CommandGroup

GROUP: Final = CommandGroup(
    "Without a GPU",
    (
        Command("demo", "Show a whole simulated node in this terminal", "agent.simulation.demo"),
        Command("simulate", "Run the simulated parts alone", "agent.simulation.simulate"),
        Command("inject", "Put a fault into the simulated node", "agent.simulation.inject"),
    ),
    examples="""\
  gpu-agent demo                      a simulated node with 8 GPUs, live
  gpu-agent inject xid 79 --gpu 3     a fault, from a second terminal
""",
    extra=SIMULATION,
)
