"""What to simulate, as the command line asks for it."""

from dataclasses import dataclass
from typing import Literal

from agent.errors import UsageError
from agent.simulation import scenario
from agent.simulation.presets import NodeSpec, PresetError, load_preset
from agent.simulation.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Plan:
    """A scenario with its node, or a node until it is stopped."""

    label: str
    spec: NodeSpec
    scenario: Scenario | None = None

    @property
    def driver_wanted(self) -> Literal["none", "if-possible", "required"]:
        """Whether device files have to answer: for what a scenario does, or an operator may inject."""
        if self.scenario is None:
            return "if-possible"
        return "required" if self.scenario.needs_driver else "none"


def plan_of(scenario_given: str | None, preset: str) -> Plan:
    """Return the plan; raises UsageError, ConfigError with every problem of a scenario."""
    if scenario_given is not None:
        loaded = scenario.load(scenario_given)
        return Plan(loaded.label, loaded.node, loaded)
    try:
        return Plan(preset, load_preset(preset))
    except PresetError as error:
        raise UsageError(f"--{error}") from None
