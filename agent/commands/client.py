"""Client of a running agent, over its control socket.

Guarantees: answers are bounded in size and time. When no agent answers, the error names the sockets tried
and what to start.
"""

import http.client
import json
import os
import socket
from collections.abc import Mapping
from typing import Final, cast

from agent.config.options import OPTIONS
from agent.config.settings import default_node_dir
from agent.errors import AgentError, AgentUnreachableError, UsageError

MAX_ANSWER_BYTES: Final = 16 * 1024 * 1024
TIMEOUT_S: Final = 5.0
COMMAND_TIMEOUT_S: Final = 10.0
"""The agent answers a command once the core has handled it, or after five seconds."""
CONTROL_SOCKET: Final = OPTIONS["control-socket"]

Json = dict[str, object]


def candidates(flag: str | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the sockets to try: the configured one, else the node's and then the simulated node's."""
    configured = flag or environment.get(CONTROL_SOCKET.environment)
    if configured:
        return (configured,)
    return (CONTROL_SOCKET.default, f"{default_node_dir(environment)}/agent/control.sock")


class AgentClient:
    """A client of one agent."""

    def __init__(self, path: str) -> None:
        self.path = path

    def accepts(self) -> bool:
        """Return whether an agent listens there; raises AgentUnreachableError if the caller lacks rights."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(TIMEOUT_S)
            try:
                probe.connect(self.path)
            except PermissionError:
                raise AgentUnreachableError(
                    f"Only root may ask the agent at {self.path}; run this as root"
                ) from None
            except OSError:
                return False
        return True

    def get(self, target: str, *, timeout_s: float = TIMEOUT_S) -> Json:
        """Return the document at a path such as ``/v1/devices``."""
        return self._ask("GET", target, None, timeout_s)[1]

    def send_command(
        self, name: str, body: Mapping[str, object], *, timeout_s: float = COMMAND_TIMEOUT_S
    ) -> Json:
        """Send a command and return its result.

        Raises UsageError if the command is invalid, AgentError if the agent cannot execute it now.
        """
        status, document = self._ask("POST", f"/control/v1/{name}", json.dumps(body), timeout_s)
        if status == http.client.OK:
            return document
        sentence = str(document.get("error", f"The agent at {self.path} answered {status}"))
        raise (UsageError if status == http.client.BAD_REQUEST else AgentError)(sentence)

    def _ask(self, method: str, target: str, body: str | None, timeout_s: float) -> tuple[int, Json]:
        connection = _UnixConnection(self.path, timeout_s)
        try:
            connection.request(method, target, body)
            response = connection.getresponse()
            raw = response.read(MAX_ANSWER_BYTES + 1)
        except TimeoutError:
            raise AgentUnreachableError(
                f"The agent at {self.path} did not answer within {timeout_s:g} s; read its log"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise AgentUnreachableError(f"The request to the agent at {self.path} failed: {error}") from None
        finally:
            connection.close()
        if response.status == http.client.FORBIDDEN:
            raise AgentUnreachableError(f"Only root may ask the agent at {self.path}; run this as root")
        if len(raw) > MAX_ANSWER_BYTES:
            raise AgentError(f"The answer of the agent at {self.path} is too long")
        try:
            return response.status, cast("Json", json.loads(raw))
        except ValueError:
            if response.status == http.client.SERVICE_UNAVAILABLE:
                raise AgentError(
                    f"The agent at {self.path} serves its maximum of readers of"
                    f" {target.partition('?')[0]}; close some, or retry"
                ) from None
            raise AgentError(
                f"The agent at {self.path} answered {response.status} to {target}, which is no document; "
                "is it of another version?"
            ) from None


def find_agent(flag: str | None, environment: Mapping[str, str] | None = None) -> AgentClient:
    """Return a client of the agent that runs here, or raise AgentUnreachableError."""
    paths = candidates(flag, os.environ if environment is None else environment)
    for path in paths:
        agent = AgentClient(path)
        if agent.accepts():
            return agent
    raise AgentUnreachableError(
        f"No agent answers at {' or '.join(paths)}; start one with 'gpu-agent run', "
        "or a simulated node with 'gpu-agent demo'"
    )


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the path."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
