"""Bounds of the tracker's tables, and of what a long operation does between two pauses."""

import msgspec


class Bounds(msgspec.Struct, frozen=True):
    """How many entries each table has, and how many of them may belong to one process."""

    objects: int = 65_536
    """Clients and what is in them, of all owners; the table of the kernel has as much room."""
    objects_of_owner: int = 16_384
    """A program with ten contexts on each of eight GPUs has a thousand."""
    processes: int = 65_536
    files: int = 65_536
    files_of_process: int = 16_384
    """A program with ten contexts on each of eight GPUs has sixteen hundred."""
    registrations: int = 65_536
    """Files that were registered with a control file."""
    quarantined: int = 4_096
    """Clients and objects."""
    quarantine_ns: int = 60_000_000_000
    """How long a file without a holder, which may be in a message, keeps its clients and its registration."""
    step_rows: int = 128
    """Rows or clients between two pauses of a rebuild: about 2 ms."""
    step_changed: int = 64
    """Processes with other files than before, between two pauses of a scan."""
    step_unchanged: int = 8_192


BOUNDS = Bounds()
