"""``gpu-agent run``: be the agent of this node."""

import argparse
import os
import sys
from typing import Final, NoReturn

from agent import config
from agent.errors import ConfigError
from agent.options import NVIDIA_OPTIONS, OPTIONS, OUR_OPTIONS, Option

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


def configure(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each option; values are judged later, all of them together."""
    parser.description = _DESCRIPTION
    parser.set_defaults(reports_unknown=True)
    for title, options in (("As NVIDIA's device plugin", NVIDIA_OPTIONS), ("Ours", OUR_OPTIONS)):
        group = parser.add_argument_group(title)
        for option in options:
            _add_flag(group, option)


def _add_flag(group: "argparse._ArgumentGroup", option: Option) -> None:
    names = [f"--{name}" for name in (option.name, *option.aliases)]
    dest = option.name.replace("-", "_")
    text = _help_of(option)
    if option.is_switch:
        group.add_argument(*names, dest=dest, metavar=option.metavar, help=text, nargs="?", const="true")
    else:
        group.add_argument(*names, dest=dest, metavar=option.metavar, help=text)


def _help_of(option: Option) -> str:
    notes = [f"default: {option.default or option.empty_means}", option.environment]
    if not option.file_key:
        notes.append("not in the file")
    if option.default and option.empty_means:
        notes.insert(1, f'"": {option.empty_means}')
    return f"{option.help} ({'; '.join(notes)})".replace("%", "%%")


def main(args: argparse.Namespace) -> int:
    """Run the agent; the process ends here."""
    flags = {
        name: value for name in OPTIONS if (value := getattr(args, name.replace("-", "_"), None)) is not None
    }
    environment = dict(os.environ)
    problems = tuple(args.unknown)
    try:
        settings = config.load(flags, environment)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    from agent import app  # noqa: PLC0415 - a wrong setting is told without it

    _leave(app.run(settings, reread=lambda: config.load(flags, environment), environment=environment))


def _leave(code: int) -> NoReturn:
    """End the process although a thread may be stuck in the driver, which a normal exit waits for."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
