"""The process that serves the driver double: a folder of device files, and a control socket as its input.

The socket carries JSON lines, each of which is answered by one: first ``{"version", "gpus", "capabilities"}``
by ``{"folder", "device"}``; then ``{"do": "books"}``, ``held``, ``release-all``, or ``hold``, ``slow``,
``release`` with ``name`` and, to slow, ``latency_ns``. What cannot be done is answered by ``{"error"}``.
The end of the socket ends the process, and with it the folder.
"""

import json
import resource
import select
import socket
import sys
import time
from typing import Any, Final

from agent.errors import SourceError
from agent.simulation.driver_double.driver import Driver
from agent.simulation.driver_double.fuse import FuseFolder, IoctlAnswer
from agent.simulation.driver_double.nodes import Gpu, inodes

_MAX_LINE_BYTES: Final = 1 << 20


class _Control:
    """The control socket, read by lines."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._rest = b""

    def fileno(self) -> int:
        return self._sock.fileno()

    def read(self) -> list[dict[str, Any]]:
        """Return the requests that have come; raises EOFError at the end."""
        data = self._sock.recv(_MAX_LINE_BYTES)
        if not data or len(self._rest) > _MAX_LINE_BYTES:
            raise EOFError
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def write(self, answer: dict[str, Any]) -> None:
        self._sock.sendall(json.dumps(answer, separators=(",", ":")).encode() + b"\n")


class _Server:
    """Serves one folder until the control socket ends."""

    def __init__(self, control: _Control, spec: dict[str, Any]) -> None:
        """Mount; raises SourceError."""
        gpus = [Gpu(**each) for each in spec["gpus"]]
        self._control = control
        self._driver = Driver(
            spec["version"], gpus, capabilities=spec["capabilities"], answer_later=self._answer_later
        )
        self._folder = FuseFolder(inodes(gpus, spec["capabilities"]), self._driver)

    def introduction(self) -> dict[str, Any]:
        """Report where the folder is, and the number of its file system."""
        return {"folder": self._folder.path(""), "device": self._folder.file_system}

    def run(self) -> None:
        """Serve; raises EOFError at the end of the control socket."""
        poll = select.poll()
        for each in (self._folder.device, self._driver.asking.ready, self._control.fileno()):
            poll.register(each, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(self._patience_ms())}
            self._folder.answer_due()
            if not self._folder.serve():
                raise EOFError
            if self._driver.asking.ready in ready:
                self._driver.asking.finish()
            if self._control.fileno() in ready:
                for request in self._control.read():
                    self._control.write(self._execute(request))

    def _patience_ms(self) -> float | None:
        due_ns = self._folder.next_due_ns()
        return None if due_ns is None else max(0.0, (due_ns - time.monotonic_ns()) / 1e6)

    def _answer_later(self, number: int, answer: IoctlAnswer) -> None:
        self._folder.answer(number, answer)

    def _execute(self, request: dict[str, Any]) -> dict[str, Any]:
        name = request.get("name", "")
        match request["do"]:
            case "books":
                return self._driver.books()
            case "held":
                return {"held": self._folder.held}
            case "release-all":
                for each in self._folder.names:
                    self._folder.release(each)
                return {}
            case _ if name not in self._folder.names:
                return {"error": f"the driver has no node {name}"}
            case "hold":
                self._folder.hold(name)
            case "slow":
                self._folder.slow(name, request["latency_ns"])
            case "release":
                self._folder.release(name)
            case unknown:
                return {"error": f"{unknown} is no request"}
        return {}


def main() -> int:
    """Serve until the control socket ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    control = _Control(socket.socket(fileno=0))
    try:
        (spec,) = control.read()
        server = _Server(control, spec)
        control.write(server.introduction())
        server.run()
    except SourceError as error:
        control.write({"error": str(error)})
    except (EOFError, OSError):
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
