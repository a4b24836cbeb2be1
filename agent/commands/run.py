"""``gpu-agent run``: run the agent of this node."""

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
Advertise this node's GPUs to the kubelet, watch their health and use, and
serve what is known.

Examples:
  gpu-agent run
  gpu-agent run --fail-on-init-error=false --mig-strategy=mixed
  gpu-agent run --config-file /etc/gpu-agent/config.yaml

Each flag is also a variable and, unless noted, a key of the file; a flag
overrides a variable, a variable the file. Times are written as 500ms, 10s or
1m30s. SIGHUP reloads the file, SIGUSR2 writes stacks to the log, a second
SIGTERM exits at once.
"""


SWITCH_S: Final = 0.0005
"""How long a thread that imports or writes may block the event loop each time it wakes. Python's default of
5 ms is the whole time in which the kubelet must learn of an unhealthy GPU."""


def run(arguments: Sequence[str], *, seam: "Seam | None" = None) -> int:
    """Run the agent with these flags; the process exits in here. ``seam`` is for tests that inject faults."""
    sys.setswitchinterval(SWITCH_S)
    # Collecting garbage during the imports finds none and costs a tenth of the start; once it serves, the
    # agent collects it itself (runtime.garbage).
    gc.disable()
    environment = dict(os.environ)
    values, problems = flags.parse(arguments, OPTIONS.values())
    try:
        settings = load(values, environment)
    except ConfigError as error:
        raise ConfigError((*problems, *error.problems)) from None
    if problems:
        raise ConfigError(tuple(problems))
    from agent import app  # noqa: PLC0415 - a wrong setting is reported without it

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
    """Do nothing: argparse prints the help and exits before it would call this."""
    raise AssertionError(args)


def _exit_now(code: int) -> NoReturn:
    """Exit although a thread may be blocked in the driver, which a normal exit would wait for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
