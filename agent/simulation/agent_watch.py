"""What a scenario waits for in the reports of the agent on a simulated node.

Guarantees: an agent that does not answer, because it was killed or has just begun, is asked again. A
probe that is unavailable ends the wait at once, with the agent's own sentence.
"""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from agent.errors import AgentError
from agent.simulation.agent_socket import document
from agent.simulation.expectation import ConditionExpectation, Expectation

Condition = Mapping[str, Any]
"""One of /v1/conditions."""

MAX_DESCRIBED: Final = 8
_ASK_AGAIN_S: Final = 0.05


class NoProbeError(AgentError):
    """The agent reports that its probe cannot be loaded."""


class AgentWatch:
    """Asks one agent over its control socket."""

    def __init__(self, control_socket: Path, uuids: tuple[str, ...]) -> None:
        """``uuids`` are those of the node's GPUs by position."""
        self._socket = control_socket
        self._uuids = uuids
        self._conditions: tuple[Condition, ...] = ()

    async def wait_for(self, expected: Expectation) -> Condition | None:
        """Wait without a limit until the agent reports what is expected; returns the condition, if one is.

        Raises NoProbeError.
        """
        while True:
            found = await self._poll(expected)
            if found is not None:
                return found.get("condition")
            await asyncio.sleep(_ASK_AGAIN_S)

    async def _poll(self, expected: Expectation) -> Mapping[str, Condition | None] | None:
        if expected.probe and not await self._has_probe():
            return None
        if expected.condition is None:
            return {}
        answer = await document(self._socket, "/v1/conditions")
        if answer is None:
            return None
        self._conditions = tuple(answer["conditions"])
        condition = next(self._matching(expected.condition), None)
        return {"condition": condition} if (condition is not None) is expected.condition.active else None

    async def _has_probe(self) -> bool:
        probe = ((await document(self._socket, "/debug/state")) or {}).get("probe") or {}
        if probe.get("state") == "disabled":
            raise NoProbeError(f"The agent's probe is off: {probe['message']}")
        return probe.get("state") == "running"

    def _matching(self, expected: ConditionExpectation) -> Iterator[Condition]:
        for condition in self._conditions:
            if (
                condition["code"] == expected.code
                and expected.kind in (None, kind_of(condition))
                and expected.gpu in (None, self.position_of(condition))
            ):
                yield condition

    def position_of(self, condition: Condition) -> int | None:
        """Return the position of a condition's GPU."""
        uuid = condition["gpu_uuid"]
        return self._uuids.index(uuid) if uuid in self._uuids else None

    def describe(self) -> str:
        """Return what the agent reported last, for the end of a sentence."""
        reported = [
            f"{kind_of(each) or each['code']} on GPU {self.position_of(each)}"
            for each in self._conditions[:MAX_DESCRIBED]
        ]
        return f"the agent reported {', '.join(reported) or 'no condition'}"


def kind_of(condition: Condition) -> str | None:
    """Return the kind of a finding on the use of a GPU; None for other conditions."""
    details = condition.get("details")
    return None if details is None else str(details["kind"])
