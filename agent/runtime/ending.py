"""How an agent comes to its end, and why."""

import asyncio

import msgspec

from agent.errors import AgentError


class EndedError(AgentError):
    """The agent ends itself, so that a new process sees the new world."""


class Ending(msgspec.Struct):
    """The wish to end, and why; the first one counts."""

    asked: asyncio.Event = msgspec.field(default_factory=asyncio.Event)
    error: AgentError | None = None
    why: str = ""

    def ask(self, why: str, error: AgentError | None = None) -> None:
        """Ask for the end: as asked by a person, or because of an error."""
        if not self.asked.is_set():
            self.why, self.error = why, error
            self.asked.set()
