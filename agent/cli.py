"""The command line: finds the command and turns errors into sentences.

Guarantees: results go to standard output, all else to standard error; an error is one sentence and
never a traceback; exit codes are 0 for success, 1 for failed or not ready, 2 for usage, bad
configuration or an unknown answer. Only the chosen command's code is imported, because a plugin that
starts slowly leaves a node without GPUs for longer.
"""

import os
import sys
from collections.abc import Sequence
from typing import Final

from agent import __version__
from agent.commands.table import GROUPS, Command, all_commands, all_groups, module_of
from agent.errors import EXIT_FAILED, EXIT_USAGE, AgentError, ConfigError, UsageError

INTERRUPTED: Final = 130
"""128 + SIGINT, as in a shell."""

_COMMANDS: Final = {command.name: command for group in GROUPS for command in group.commands}

_EXAMPLES: Final = """\
  gpu-agent run                       the agent of this node
  gpu-agent devices                   the devices of the running agent
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
    except ConfigError as error:
        _complain(*error.problems)
        return error.exit_code
    except AgentError as error:
        _complain(str(error))
        return error.exit_code
    except BrokenPipeError:
        # The reader of our output has exited, as `head` does; nothing more can be written there.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exiting:
        # argparse exits so after it printed help.
        return exiting.code if isinstance(exiting.code, int) else EXIT_FAILED
    return code


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help(), end="")
        return 0 if arguments else EXIT_USAGE
    name, *rest = arguments
    if name in ("--version", "-V"):
        print(f"gpu-agent {__version__}")
        return 0
    if name == "run" and not {"-h", "--help"} & set(rest):
        from agent.commands.run import run  # noqa: PLC0415 - only what is needed

        return run(rest)
    return _with_argparse(_COMMANDS.get(name) or _command_of_an_extra(name), rest)


def _command_of_an_extra(name: str) -> Command:
    from agent.commands.extras import SIMULATION_COMMANDS, not_installed  # noqa: PLC0415 - as above
    from agent.spelling import suggestion  # noqa: PLC0415 - only where something is wrong

    installed = all_commands()
    if name in installed:
        return installed[name]
    if name in SIMULATION_COMMANDS:
        raise not_installed(f"gpu-agent {name}")
    raise UsageError(f'"{name[:80]}" is no command{suggestion(name, tuple(installed))}; see gpu-agent --help')


def _with_argparse(command: Command, arguments: list[str]) -> int:
    from agent.commands.arguments import Parser  # noqa: PLC0415 - not needed by run, which must start fast

    module = module_of(command)
    parser = Parser(command.name)
    module.configure(parser)
    return module.main(parser.parse(arguments))


def _complain(*sentences: str) -> None:
    from agent.core.wording import printable  # noqa: PLC0415 - only where something is wrong

    for sentence in sentences:
        # A sentence may quote untrusted text, and the last lines of a child.
        first, *further = sentence.splitlines() or [""]
        print(f"gpu-agent: {printable(first)}", *map(printable, further), sep="\n", file=sys.stderr)


def _help() -> str:
    groups = all_groups()
    examples = "".join(group.examples for group in groups) + _EXAMPLES
    lines = ["The GPU node agent: device plugin, health and preflight.", "", f"Examples:\n{examples}"]
    for group in groups:
        lines.append(f"{group.title}:")
        lines += [f"  {command.name:10} {command.summary}" for command in group.commands]
        lines.append("")
    lines += [
        "Exit codes: 0 success, 1 failed or not ready, 2 usage, bad configuration or",
        "an unknown answer. Every command explains itself: gpu-agent COMMAND --help",
        "",
    ]
    return "\n".join(lines)
