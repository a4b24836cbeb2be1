"""The driver's double as kernel modules, seen from the guest: it is loaded, unloaded, its books are read."""

import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from agent.probe import kernel
from agent.probe.kernel import Roots
from agent.simulation.driver_double.double import Books, Client, Context
from agent.simulation.driver_double.nodes import UVM
from tests.probe.test_workloads import GPUS

VERSION: Final = "570.148.08"
"""The version of the modules."""
OLDER_VERSION: Final = "520.56.06"
"""The version of those of an older branch."""

_BOOKS: Final = Path("/proc/driver/nvidia/books")
_DEV: Final = Path("/dev")


class DriverModule:
    """nvidia.ko and nvidia-uvm.ko from a folder; two at once are not possible."""

    folder: Final = _DEV
    """Where its nodes are."""

    def __init__(self, folder: Path, *, counts_uvm: bool, version: str = VERSION) -> None:
        """``counts_uvm``: opens of nvidia-uvm count in the books, as for a probe that sees every open."""
        self._folder = folder
        self.version = version
        self._counts_uvm = counts_uvm

    def load(self) -> None:
        """Load both modules, in the place of what is loaded; their counts begin at zero."""
        self.unload_if_loaded()
        for name in ("nvidia", "nvidia-uvm"):
            subprocess.run(["busybox", "insmod", self._folder / f"{name}.ko"], check=True)
        node = _DEV / UVM
        node.unlink(missing_ok=True)
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(kernel.majors(Roots()).uvm, 0))

    def unload(self) -> None:
        """Unload both; subprocess.CalledProcessError while a file of theirs is open."""
        for name in ("nvidia_uvm", "nvidia"):
            subprocess.run(["busybox", "rmmod", name], check=True, stderr=subprocess.DEVNULL)

    def unload_if_loaded(self) -> None:
        """Unload what is loaded and not in use."""
        with suppress(subprocess.CalledProcessError):
            self.unload()

    def begin_anew(self) -> None:
        """Let the counts begin at zero."""
        _BOOKS.write_text("anew\n", encoding="ascii")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let every call wait in the driver while the context lasts."""
        _BOOKS.write_text("hold\n", encoding="ascii")
        try:
            yield
        finally:
            _BOOKS.write_text("release\n", encoding="ascii")

    def waiting(self) -> int:
        """Return how many calls wait in the driver."""
        return int(_BOOKS.read_text(encoding="ascii").rpartition("waiting ")[2])

    async def books(self) -> Books:
        """Return what the driver granted since its counts began, and what of it lives."""
        return self.read_books()

    def read_books(self) -> Books:
        """As ``books``."""
        contexts: list[Context] = []
        clients: list[Client] = []
        processes: dict[int, dict[str, int]] = {}
        counts: dict[str, int] = {}
        minors: dict[int, int | None] = {gpu.instance: gpu.minor for gpu in GPUS}
        for line in _BOOKS.read_text(encoding="ascii").splitlines():
            kind, *words = line.split()
            numbers = [int(word) for word in words]
            match kind, numbers:
                case "context", [client, handle, pid, instance]:
                    contexts.append(Context(client, handle, pid, minors.get(instance)))
                case "client", [client, pid, objects]:
                    clients.append(Client(client, pid, 0, objects))
                case "process", [pid, opens, uvm_opens, allocs, frees, allocated]:
                    processes[pid] = {
                        "opens": opens + (uvm_opens if self._counts_uvm else 0),
                        "allocs": allocs,
                        "frees": frees,
                        "contexts_allocated": allocated,
                    }
                case "counts", [allocated, freed, rejected]:
                    counts = {"contexts_allocated": allocated, "contexts_freed": freed, "rejected": rejected}
                case "waiting", _:
                    pass
                case _:
                    raise ValueError(f"the books have a line that is not known: {line}")
        return Books(tuple(contexts), tuple(clients), counts, {}, {}, processes, ())
