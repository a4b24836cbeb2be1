"""Play a scenario: its steps in time, each until the kubelet has shown what is expected.

Guarantees: an expectation of a step counts every state since the step began, however short; the one of
``until`` counts only what is there after all steps. The agent is asked several times a second, so a state
that it reports briefly may be missed; what was waited for is put into the feed.
"""

import asyncio
import time

from agent.errors import AgentError
from agent.simulation.agent_actions import write_config
from agent.simulation.agent_watch import AgentWatch, Condition
from agent.simulation.expectation import Expectation
from agent.simulation.kubelet import EmulatedKubelet
from agent.simulation.node import SimulatedNode
from agent.simulation.scenario import Scenario, Step


class ScenarioFailedError(AgentError):
    """The kubelet did not show in time what the scenario expects."""


async def set_up(node: SimulatedNode, scenario: Scenario) -> None:
    """Write the agent's configuration and apply the steps that come before the agent starts."""
    if scenario.config is not None:
        write_config(node.directory.agent_config, scenario.config)
    for step in scenario.setup:
        for invocation in step.do:
            await node.apply(invocation)


async def play(node: SimulatedNode, scenario: Scenario) -> str:
    """Apply the other steps and wait for ``until``; returns how it ended, in one sentence.

    Raises ScenarioFailedError with what was last seen, AgentError for an action that cannot be done.
    """
    began_ns = time.monotonic_ns()
    agent = AgentWatch(node.directory.agent / "control.sock", tuple(gpu.uuid for gpu in node.spec.gpus))
    waits_for = scenario.until
    try:
        async with asyncio.timeout(scenario.timeout_ns / 1e9):
            for step in scenario.steps[len(scenario.setup) :]:
                waits_for = step.expect or scenario.until
                await _apply(node, agent, step, began_ns)
            waits_for = scenario.until
            await _until(node, agent, scenario.until)
    except TimeoutError:
        seen = describe(node.kubelet) + (f"; {agent.describe()}" if waits_for.is_of_agent else "")
        raise ScenarioFailedError(
            f"Scenario {scenario.name} did not end within {scenario.timeout_ns / 1e9:g} s; "
            f"it waited for {waits_for}, and last seen was {seen}"
        ) from None
    return f"Scenario {scenario.name} ended as expected: {scenario.until}"


_FOREVER_S = 86_400.0
"""Longer than any scenario; the scenario's own time limit is the one that counts."""


async def _apply(node: SimulatedNode, agent: AgentWatch, step: Step, began_ns: int) -> None:
    due_ns = max(began_ns + step.at_ns, time.monotonic_ns() + step.after_ns)
    await asyncio.sleep((due_ns - time.monotonic_ns()) / 1e9)
    mark_ns = time.monotonic_ns()
    for invocation in step.do:
        await node.apply(invocation)
    expected = step.expect
    if expected is not None:
        await node.kubelet.wait_for(lambda kubelet: _has_shown(kubelet, expected, mark_ns), _FOREVER_S)
        await _report(node, expected, await agent.wait_for(expected))


async def _until(node: SimulatedNode, agent: AgentWatch, expected: Expectation) -> None:
    """Wait until the kubelet and the agent report the expected state at once."""
    while True:
        await node.kubelet.wait_for(lambda kubelet: _shows(kubelet, expected), _FOREVER_S)
        condition = await agent.wait_for(expected)
        if _shows(node.kubelet, expected):
            await _report(node, expected, condition)
            return


async def _report(node: SimulatedNode, expected: Expectation, condition: Condition | None) -> None:
    if expected.condition is not None:
        await node.caught_up()
        node.report_condition(expected.condition, condition)


def _shows(kubelet: EmulatedKubelet, expected: Expectation) -> bool:
    resource = expected.resource
    return _matches(
        expected, kubelet.capacity(resource), kubelet.allocatable(resource)
    ) and _has_registrations(kubelet, expected)


def _has_shown(kubelet: EmulatedKubelet, expected: Expectation, since_ns: int) -> bool:
    if _shows(kubelet, expected):
        return True
    return _has_registrations(kubelet, expected) and any(
        _matches(expected, change.capacity, change.allocatable)
        for change in kubelet.change_history
        if change.resource == expected.resource and change.at_ns >= since_ns
    )


def _matches(expected: Expectation, capacity: int, allocatable: int) -> bool:
    return expected.capacity in (None, capacity) and expected.allocatable in (None, allocatable)


def _has_registrations(kubelet: EmulatedKubelet, expected: Expectation) -> bool:
    if expected.registrations is None:
        return True
    accepted = sum(each.accepted and each.resource == expected.resource for each in kubelet.registrations)
    return accepted >= expected.registrations


def describe(kubelet: EmulatedKubelet) -> str:
    """Return what the kubelet shows, for the end of a sentence."""
    shown = [
        f"{resource} capacity {kubelet.capacity(resource)}, allocatable {kubelet.allocatable(resource)}"
        for resource in kubelet.resources
    ]
    return "; ".join(shown) or "no resource: no agent has registered"
