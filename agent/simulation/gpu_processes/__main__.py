"""A process that uses GPUs and executes commands from its standard input, a socket of JSON messages.

``python -m agent.simulation.gpu_processes COMM``. The first message is ``{"do": "set-up", "folder",
"version", "gpus", "cgroup"}``; each message is answered with ``{}`` and more, or ``{"error"}``. Messages may
carry descriptors. The end of the socket ends the process at once, with nothing freed.
"""

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

from agent.core.wording import counted
from agent.simulation.driver_double.nodes import Gpu
from agent.simulation.gpu_processes.calls import Caller, CallRejected
from agent.simulation.gpu_processes.cuda import Cuda

MAX_MESSAGE_BYTES: Final = 1 << 16
MAX_SENT_FILES: Final = 250
"""Under the kernel's bound for one message. Source: linux/net/scm.h, SCM_MAX_FD."""
RESUMED: Final = "resumed"
_FIRST_FILE: Final = 3
_MAX_COMM: Final = 15

Message = dict[str, Any]


class Program:
    """Executes commands; see the module."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._cuda: Cuda | None = None
        self._gpus: dict[int, Gpu] = {}
        self._caller: Caller | None = None
        self._handlers: dict[str, Callable[[Message, list[int]], Message]] = {
            "set-up": self._set_up,
            "create": self._create,
            "destroy": self._destroy,
            "count": self._count,
            "open": self._open,
            "fork": self._fork,
            "dup": self._duplicate,
            "close": self._close,
            "close-range": self._close_range,
            "send": self._send,
            "receive": self._receive,
            "exec": self._exec,
            "exit": self._exit,
            "stop": self._stop,
        }

    def run(self) -> None:
        """Execute commands until the socket ends."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1)
            if not data:
                return
            message = json.loads(data)
            try:
                answer = self._handlers[message["do"]](message, descriptors)
            except (CallRejected, OSError, LookupError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            self.send(answer)

    def send(self, answer: Message) -> None:
        """Send an answer."""
        self._control.send(json.dumps(answer).encode())

    # Commands

    def _set_up(self, message: Message, _: list[int]) -> Message:
        if message["cgroup"] is not None:
            Path(message["cgroup"], "cgroup.procs").write_text(str(os.getpid()), encoding="ascii")
        self._gpus = {each["minor"]: Gpu(**each) for each in message["gpus"]}
        self._caller = Caller(message["folder"], message["version"])
        self._cuda = Cuda(self._caller)
        return {}

    @property
    def _program(self) -> Cuda:
        if self._cuda is None:
            raise LookupError("not set up")
        return self._cuda

    def _create(self, message: Message, _: list[int]) -> Message:
        for _number in range(message["contexts"]):
            self._program.create(self._gpus[message["minor"]])
        return {}

    def _destroy(self, message: Message, _: list[int]) -> Message:
        minor, number = message["minor"], message["contexts"]
        live = self._program.contexts_on(minor)
        if number is not None and number > live:
            raise LookupError(f"it has {counted(live, 'context')}")
        for _number in range(live if number is None else number):
            self._program.destroy(minor)
        return {"destroyed": live if number is None else number}

    def _count(self, message: Message, _: list[int]) -> Message:
        """Do so many opens and closes, and allocations and frees of contexts, and nothing else."""
        for _number in range(message.get("opens", 0)):
            os.close(self._files_of_driver(message["name"]))
        if message.get("contexts", 0):
            self._program.count(message["contexts"])
        return {}

    def _open(self, message: Message, _: list[int]) -> Message:
        return {"descriptor": self._files_of_driver(message["name"])}

    def _files_of_driver(self, name: str) -> int:
        if self._caller is None:
            raise LookupError("not set up")
        return self._caller.open(name)

    def _fork(self, message: Message, descriptors: list[int]) -> Message:
        """Go on as two; the child reads commands from the descriptor that came with this one."""
        (mine,) = descriptors
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        own = Path("/proc/self/comm").read_text(encoding="utf-8").strip()
        # The child has its name from the first moment on, for every reader of /proc.
        set_comm(message["comm"])
        child = os.fork()
        if child:
            set_comm(own)
            os.close(mine)
            return {"pid": child}
        os.dup2(mine, self._control.fileno())
        os.close(mine)
        return {"pid": os.getpid()}

    def _duplicate(self, _: Message, __: list[int]) -> Message:
        return {"descriptor": self._program.move_control()}

    def _close(self, message: Message, _: list[int]) -> Message:
        if "descriptor" in message:
            os.close(message["descriptor"])
        else:
            self._program.close()
        return {}

    def _close_range(self, _: Message, __: list[int]) -> Message:
        self._program.forget()
        os.closerange(_FIRST_FILE, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return {}

    def _send(self, _: Message, descriptors: list[int]) -> Message:
        """Give every file of the driver away through the descriptor that came with it, and close them."""
        with socket.socket(fileno=descriptors[0]) as sock:
            files = self._program.files
            for first in range(0, len(files), MAX_SENT_FILES):
                socket.send_fds(sock, [b"files"], files[first : first + MAX_SENT_FILES])
        self._program.close()
        return {"files": len(files)}

    def _receive(self, _: Message, descriptors: list[int]) -> Message:
        """Receive files until the descriptor that came with the command ends; they are kept, and not used."""
        received = 0
        with socket.socket(fileno=descriptors[0]) as sock:
            while True:
                data, files, _flags, _address = socket.recv_fds(sock, 16, MAX_SENT_FILES)
                received += len(files)
                if not data:
                    return {"files": received}

    def _exec(self, message: Message, _: list[int]) -> NoReturn:
        """Become another program, which answers this command."""
        os.execv(sys.executable, [*COMMAND, message["comm"], RESUMED])  # noqa: S606 - no shell is wanted

    def _exit(self, message: Message, _: list[int]) -> NoReturn:
        os._exit(message.get("status", 0))

    def _stop(self, _: Message, __: list[int]) -> NoReturn:
        self._program.shut_down()
        os._exit(0)


COMMAND: Final = (sys.executable, "-S", "-m", "agent.simulation.gpu_processes")


def set_comm(name: str) -> None:
    """Let the process be called so. Source: proc(5)."""
    Path("/proc/self/comm").write_text(name[:_MAX_COMM], encoding="utf-8")


def main() -> None:
    """Execute commands until the socket ends."""
    set_comm(sys.argv[1])
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    program = Program(socket.socket(fileno=0))
    if sys.argv[2:] == [RESUMED]:
        program.send({})
    program.run()
    # Nothing is freed: the kernel ends what is open, as it does for a program that was killed.
    os._exit(0)


if __name__ == "__main__":
    main()
