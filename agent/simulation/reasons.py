"""Why devices are unhealthy: asked from the running agent, for what the kubelet shows."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent.simulation.agent_socket import document, wait_for_answer

FIRST_ANSWER_WITHIN_S: Final = 10.0
"""How long it may need for its first answer: it serves the kubelet before it serves HTTP."""
AGREES_WITHIN_S: Final = 5.0
"""How long the agent may need to report which list it sent, on a busy machine."""
_ASK_AGAIN_S: Final = 0.05

UNKNOWN: Final = "unknown"
STREAM_ENDED: Final = "The kubelet holds it for unhealthy because its ListAndWatch stream has ended"


_RECOVERIES: Final = ("self_clearing", "reset", "reboot", "by_hand")
"""How lasting a condition is: the last of these longest."""


@dataclass(frozen=True, slots=True)
class Reason:
    """The most lasting of a device's reasons; ``number`` is an XID or a return code."""

    code: str = UNKNOWN
    number: int | None = None
    evidence: str | None = None
    message: str | None = None
    detail: Mapping[str, Any] | None = None
    """Of a finding on the use of a GPU: its kind, and the involved processes."""

    def __str__(self) -> str:
        return self.code if self.number is None else f"{self.code} {self.number}"


class AgentClient:
    """Asks one agent over its control socket."""

    def __init__(self, socket_path: Path, *, first_answer_within_s: float = FIRST_ANSWER_WITHIN_S) -> None:
        self._path = socket_path
        self._first_answer_within_s = first_answer_within_s
        self._is_waited_for = False

    async def reasons(
        self, resource: str, unhealthy: Sequence[str], *, at_ns: int, connected: bool
    ) -> Mapping[str, Reason]:
        """Return a reason for each of the ids that the kubelet shows as unhealthy since ``at_ns``.

        It is the one that the device had in the list that the kubelet was sent, not one of some moments
        later. Where the agent does not answer, or keeps that list no more, the reason is unknown.
        ``connected`` is whether the kubelet has it from a list.
        """
        found: dict[str, Reason] = {}
        if not connected:
            # The one that lists them again may be another process, which serves HTTP last.
            self._is_waited_for = False
            return dict.fromkeys(unhealthy, Reason(message=STREAM_ENDED))
        if unhealthy:
            await self._wait_for_first_answer()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(AGREES_WITHIN_S):
                    found = await self._unhealthy(resource, at_ns)
                    while set(found) != set(unhealthy):
                        await asyncio.sleep(_ASK_AGAIN_S)
                        found = await self._unhealthy(resource, at_ns)
        return {id_: found.get(id_, Reason()) for id_ in unhealthy}

    async def _wait_for_first_answer(self) -> None:
        """Give the agent time to serve; waited for once, since one that hangs would delay all."""
        if not self._is_waited_for:
            await wait_for_answer(self._path, "/v1/devices", self._first_answer_within_s)
            self._is_waited_for = True

    async def http_address(self) -> str | None:
        """Return where the agent serves HTTP; None while it does not."""
        answer = await document(self._path, "/debug/state") or {}
        listeners = answer.get("agent", {}).get("listeners", {})
        return listeners.get("http") or None

    async def _unhealthy(self, resource: str, at_ns: int) -> dict[str, Reason]:
        answer = await document(self._path, f"/v1/lists?at={at_ns}")
        lists = answer.get("lists", []) if answer is not None else []
        return {
            str(device["id"]): _reason(device)
            for each in lists
            if each.get("resource") == resource
            for device in each.get("unhealthy", [])
        }


def _reason(device: Mapping[str, Any]) -> Reason:
    flipping = [each for each in device.get("reasons", []) if each.get("flips")]
    if not flipping:
        # Not known to be healthy, and no condition: it was never probed.
        return Reason("not_probed") if device.get("health") == UNKNOWN else Reason()
    # Of several, the first of those that stay the longest: it keeps the device unhealthy the longest.
    lasting = max(flipping, key=lambda each: _lasts(each.get("recovery")))
    detail = lasting.get("details")
    return Reason(
        lasting.get("code", UNKNOWN),
        # Of findings it only distinguishes their kinds, and the detail has that in words.
        lasting.get("number") if detail is None else None,
        lasting.get("evidence"),
        lasting.get("message"),
        detail,
    )


def _lasts(recovery: object) -> int:
    return _RECOVERIES.index(recovery) if recovery in _RECOVERIES else 0
