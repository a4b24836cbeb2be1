"""A peer that hangs, as the kernel shows it once its queue of connections is full."""

import contextlib
import socket
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def full(path: Path) -> Iterator[Path]:
    """A unix socket that takes no more connections, since nobody accepts the one that waits."""
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as waiting:
        listener.bind(str(path))
        listener.listen(0)
        waiting.connect(str(path))
        yield path
