"""What an operator can do to the agent on a simulated node, as an action: commands, and a kill.

Guarantees as in ``actions``. Commands go the way of ``gpu-agent hold`` and its like: over the control socket.
"""

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent.config.values import duration_from
from agent.errors import AgentError
from agent.simulation.action_table import action, choice, name_text, parameter
from agent.simulation.agent_socket import ask, wait_for_answer

if TYPE_CHECKING:
    from agent.simulation.node import SimulatedNode

AGENT: Final = "agent"
"""The name of the action."""
KILL: Final = "kill"

SERVES_WITHIN_S: Final = 10.0
"""How long the agent may need for its first answer: it serves the kubelet before it serves HTTP."""
RELEASED_WITHIN_S: Final = 20.0
"""How long a release may wait until no file of the driver is open."""
ANSWERED_WITHIN_S: Final = RELEASED_WITHIN_S + 5.0
DEFAULT_RELEASE: Final = "10m"

_COMMANDS: Final = ("hold", "unhold", "recover", "release", "resume", KILL)
_OF_ONE_GPU: Final = frozenset({"hold", "unhold", "recover"})
_MAX_WHY: Final = 200
_PATH: Final = "/control/v1/"


def _why(text: str) -> str:
    if not text.strip() or len(text) > _MAX_WHY or not text.isprintable():
        raise ValueError(f"must have 1 to {_MAX_WHY} printable characters")
    return text


def _config(text: str) -> str:
    if not text.strip():
        raise ValueError("must be the text of a configuration file")
    return text


def _time(text: str) -> str:
    duration_from(text)
    return text


@dataclass(frozen=True, slots=True)
class AgentCommand:
    """Send the agent an operator's command, or kill its process with SIGKILL."""

    command: str = parameter("COMMAND", ", ".join(_COMMANDS), choice(*_COMMANDS))
    gpu: str | None = parameter(
        "GPU",
        "Position or UUID, for hold, unhold and recover; release: all by default",
        name_text,
        default=None,
    )
    why: str | None = parameter("TEXT", "Why the GPU is held", _why, default=None)
    time: str | None = parameter(
        "TIME", f"How long the driver is released, {DEFAULT_RELEASE} by default", _time, default=None
    )

    def __post_init__(self) -> None:
        if self.gpu is None and self.command in _OF_ONE_GPU:
            raise ValueError(f"needs gpu for {self.command}")
        if self.gpu is not None and self.command not in {*_OF_ONE_GPU, "release"}:
            raise ValueError(f"accepts no gpu for {self.command}")
        if self.why is None and self.command == "hold":
            raise ValueError("needs why for hold")
        if self.why is not None and self.command != "hold":
            raise ValueError(f"accepts no why for {self.command}")
        if self.time is not None and self.command != "release":
            raise ValueError(f"accepts no time for {self.command}")

    async def apply(self, node: "SimulatedNode") -> str:
        """Send it, and wait for the agent's answer."""
        gpu = None if self.gpu is None else node.nvml.uuid(node.position(self.gpu))
        socket = node.directory.agent / "control.sock"
        state = await state_of_agent(socket, SERVES_WITHIN_S)
        if self.command == KILL:
            return _kill(state)
        path = f"{_PATH}{self.command}"
        answer = await ask(socket, path, command=self._body(gpu), timeout_s=ANSWERED_WITHIN_S)
        if answer is None:
            raise AgentError(f"The agent did not answer to {self.command}; read its log")
        if answer.status != 200:
            raise AgentError(
                f"The agent rejected {self.command}: {answer.document.get('error', answer.status)}"
            )
        if answer.document.get("driver_released") is False:
            raise AgentError(str(answer.document.get("message")))
        return str(answer.document.get("message", f"The agent accepted {self.command}"))

    def _body(self, gpu: str | None) -> Mapping[str, Any]:
        match self.command:
            case "hold":
                return {"selector": gpu, "why": self.why}
            case "unhold":
                return {"selector": gpu}
            case "recover":
                return {"gpu": gpu}
            case "release":
                gpus = "all" if gpu is None else [gpu]
                return {"gpus": gpus, "for": self.time or DEFAULT_RELEASE, "wait_s": RELEASED_WITHIN_S}
            case _:
                return {}


async def state_of_agent(socket: Path, within_s: float) -> Mapping[str, Any]:
    """Return the agent's /debug/state once it serves; raises AgentError if it does not in time."""
    answer = await wait_for_answer(socket, "/debug/state", within_s)
    if answer is None:
        raise AgentError(f"No agent answers at {socket}; start one with gpu-agent run or gpu-agent demo")
    return answer.document


def is_kill(name: str, given: Mapping[str, str]) -> bool:
    """Return whether an action, by its name and parameters, kills the agent."""
    return name == AGENT and given.get("command") == KILL


def _kill(state: Mapping[str, Any]) -> str:
    pid = state.get("agent", {}).get("pid")
    if not isinstance(pid, int) or pid <= 1:
        raise AgentError("The agent does not report its process id")
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError as error:
        raise AgentError(f"The agent's process {pid} could not be killed: {error.strerror}") from None
    return f"The agent's process {pid} was killed"


@dataclass(frozen=True, slots=True)
class AgentConfig:
    """Write the configuration file anew that the scenario gave the agent; it reads it by itself."""

    text: str = parameter("YAML", "The whole file, as NVIDIA's plugin reads it", _config)

    async def apply(self, node: "SimulatedNode") -> str:
        """Replace the file as a whole, as an editor or a config map does."""
        if not node.directory.agent_config.exists():
            raise AgentError("The agent here reads no configuration file; give the scenario a config")
        write_config(node.directory.agent_config, self.text)
        return "The agent's configuration file was written anew"


def write_config(path: Path, text: str) -> None:
    """Put a configuration file in its place, never half written."""
    draft = path.with_suffix(".new")
    draft.write_text(text, encoding="utf-8")
    draft.replace(path)


AGENT_ACTIONS: Final = (action(AgentCommand, AGENT, "command"), action(AgentConfig, "agent-config", "text"))
