"""``gpu-agent run``: be the agent of this node."""

import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NoReturn

from agent.config import flags
from agent.config.leak_options import LEAK_OPTIONS
from agent.config.load import load
from agent.config.nvidia_options import NVIDIA_OPTIONS
from agent.config.option import Option
from agent.config.options import OPTIONS
from agent.config.our_options import OUR_OPTIONS
from agent.errors import ConfigError

if TYPE_CHECKING:
    import argparse

    from agent.guard import Seam

_DESCRIPTION: Final = """\
Offer this node's GPUs to the kubelet, watch them, and tell what is known.

Examples:
  gpu-agent run
  gpu-agent run --fail-on-init-error=false --mig-strategy=mixed
  gpu-agent run --config-file /etc/gpu-agent/config.yaml

Each flag is also a variable and, unless noted, a key of the file; a flag
counts before a variable, a variable before the file. Times are written as
500ms, 10s or 1m30s. SIGHUP reads the file again, SIGUSR2 writes stacks to
the log, a second SIGTERM ends at once.
"""


SWITCH_S: Final = 0.0005
"""How long a thread that imports or writes may keep the event loop from the interpreter each time it wakes;
Python's own 5 ms are all that the kubelet may wait for a sick GPU."""


def run(arguments: Sequence[str], *, seam: "Seam | None" = None) -> int:
    """Run the agent with these flags; the process ends in here. ``seam`` is for tests that break it."""
    sys.setswitchinterval(SWITCH_S)
    # Collecting garbage while modules are imported finds none and costs a tenth of the start; once it
    # serves, the agent does it itself (runtime.garbage).
    gc.disable()
    environment = dict(os.environ)
    values, problems = flags.parse(arguments, OPTIONS.values())
    try:
        settings = load(values, environment)
    except ConfigError as error:
        raise ConfigError((*problems, *error.problems)) from None
    if problems:
        raise ConfigError(tuple(problems))
    from agent import app  # noqa: PLC0415 - a wrong setting is told without it

    _exit_now(app.run(settings, reread=lambda: load(values, environment), environment=environment, seam=seam))


def configure(parser: "argparse.ArgumentParser") -> None:
    """Describe the flags, for their help."""
    parser.description = _DESCRIPTION
    for title, options in (
        ("As NVIDIA's device plugin", NVIDIA_OPTIONS),
        ("Ours", OUR_OPTIONS),
        ("Leaks", LEAK_OPTIONS),
    ):
        group = parser.add_argument_group(title)
        for option in options:
            names = [f"--{name}" for name in (option.name, *option.aliases)]
            group.add_argument(*names, metavar=option.metavar, help=_help_of(option))


def _help_of(option: Option) -> str:
    notes = [f"default: {option.default or option.empty_means}", option.environment]
    if not option.file_key:
        notes.append("not in the file")
    if option.default and option.empty_means:
        notes.insert(1, f'"": {option.empty_means}')
    return f"{option.help} ({'; '.join(notes)})".replace("%", "%%")


def main(args: "argparse.Namespace") -> int:
    """Run the agent; argparse only comes here after help was asked for, and ends by itself."""
    raise AssertionError(args)


def _exit_now(code: int) -> NoReturn:
    """End the process although a thread may be stuck in the driver, which a normal exit waits for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
