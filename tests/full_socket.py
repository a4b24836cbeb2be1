"""A peer that hangs: its queue of connections is full."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def full(path: Path) -> Iterator[Path]:
    """Yield the path of a unix socket with a full queue of connections, none of which is accepted."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))
        yield path
