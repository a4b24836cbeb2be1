"""``make test-vm``: the probe on another kernel, with kprobes and real device files, in a virtual machine.

QEMU emulates the machine (no KVM needed), Debian's own kernel runs in it, and sees this machine's files, read
only; what the guest writes is in its memory. A double of the driver as kernel modules has the real entry
points, and books of its own by which the probe is checked; see tests/vm/guest.py for what is played.

Guarantees: nothing is left behind but the unpacked kernel in build/vm. Whatever ends this process ends the
machine too, and so does its deadline.
The exit status is 0 if every scenario passed, 1 if not, 2 if the machine could not be made ready.
"""

import argparse
import compileall
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
LOADERS: Final = ("core", "bcc")
PARTS: Final = ("driver", "branches", "work", "trace", "no-btf")
DEADLINE_S: Final = 3600.0
"""A few minutes on a quiet machine."""
MEMORY_MIB: Final = 2048
CONSOLE_LINES: Final = 30
"""What is shown of the guest's console when something went wrong."""
_EXIT: Final = "exit "


class TooLate(Exception):  # noqa: N818 - a sentence about time
    """The machine did not end within its deadline."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Make ready, boot, relay what the guest reports, return the exit status."""
    given = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    with tempfile.TemporaryDirectory(prefix="gpu-agent-vm-") as name:
        folder = Path(name)
        prepared = subprocess.run([ROOT / ".ci/vm", folder], stdout=subprocess.PIPE, text=True, check=False)
        if prepared.returncode:
            return 2
        # The guest would compile each file anew, ten times as slowly.
        compileall.compile_dir(ROOT / "agent", quiet=2)
        compileall.compile_dir(ROOT / "tests", quiet=2)
        _show(f"booting Linux {prepared.stdout.strip()}, every instruction emulated")
        try:
            return _run(folder, (*(given.loader or LOADERS), *(given.only or PARTS)), given.deadline_s)
        except TooLate:
            _show(f"the machine was ended after {given.deadline_s:g} s; --deadline-s gives it longer")
        except KeyboardInterrupt:
            _show("interrupted")
        _show_console(folder)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make test-vm ARGS='...'",
        description="Run the probe's scenarios in a virtual machine with Debian's own kernel.",
    )
    parser.add_argument("--loader", choices=LOADERS, action="append", help="only this loader")
    parser.add_argument("--only", choices=PARTS, action="append", help="only this part of what is played")
    parser.add_argument("--deadline-s", type=float, default=DEADLINE_S, help="seconds until it is ended")
    return parser


def _run(folder: Path, played: Sequence[str], deadline_s: float) -> int:
    began = time.monotonic()
    status: int | None = None
    with _machine(folder, played) as machine:
        for line in _lines(machine, began + deadline_s):
            if line.startswith(_EXIT):
                status = int(line.removeprefix(_EXIT))
            else:
                sys.stdout.write(f"{line}\n")
                sys.stdout.flush()
    _show(f"the machine ran for {time.monotonic() - began:.0f} s")
    if status is None:
        _show("the guest ended before it could report its result")
        _show_console(folder)
    return 0 if status == 0 else 1


@contextmanager
def _machine(folder: Path, played: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Boot it, and end it on the way out."""
    machine = subprocess.Popen(
        _command(folder, played), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, process_group=0
    )
    try:
        yield machine
        machine.wait(10)
    finally:
        machine.kill()
        machine.wait()


def _command(folder: Path, played: Sequence[str]) -> list[str]:
    variables = {
        "VM_REPOSITORY": str(ROOT),
        "VM_PYTHON": sys.executable,
        "VM_FOLDER": str(folder),
        "VM_PLAYED": " ".join(played),
    }
    line = ["console=ttyS0", "panic=-1", *(f'{name}="{text}"' for name, text in variables.items())]
    return [
        # It ends with its parent.
        *("setpriv", "--pdeathsig", "KILL"),
        *("qemu-system-x86_64", "-machine", "q35", "-accel", "tcg", "-smp", "1", "-m", str(MEMORY_MIB)),
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        # The console is kept for when it is needed; what the guest reports has a line of its own.
        *("-serial", f"file:{folder / 'console.log'}"),
        *("-chardev", "stdio,id=report,signal=off", "-serial", "chardev:report"),
        *("-kernel", str(folder / "vmlinuz"), "-initrd", str(folder / "initrd.gz")),
        *("-append", " ".join(line)),
        *("-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap"),
        *("-device", "virtio-9p-pci,fsdev=host,mount_tag=host"),
    ]


def _lines(machine: subprocess.Popen[bytes], until_s: float) -> Iterator[str]:
    """Return what the guest reports, line by line; raises TooLate."""
    assert machine.stdout is not None
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(machine.stdout, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, until_s - time.monotonic())):
                raise TooLate
            data = os.read(machine.stdout.fileno(), 65_536)
            if not data:
                return
            *whole, pending = (pending + data).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace").rstrip("\r")


def _show_console(folder: Path) -> None:
    try:
        lines = (folder / "console.log").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return
    for line in lines[-CONSOLE_LINES:]:
        _show(f"console: {line}")


def _show(sentence: str) -> None:
    sys.stderr.write(f"test-vm: {sentence}\n")
    sys.stderr.flush()


def _terminated(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
