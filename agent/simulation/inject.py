"""``gpu-agent inject``: make something happen to the simulated node that runs here."""

import argparse
from pathlib import Path
from typing import Any, Final

from agent.config import settings as config
from agent.errors import UsageError

EXAMPLES: Final = """\
Examples:
  gpu-agent inject xid 79 --gpu 3
  gpu-agent inject hang --gpu 2
  gpu-agent inject release
  gpu-agent inject kubelet restart --downtime 2s"""

EXIT_CODES: Final = "exit codes: 0 done, 1 not possible now, 2 usage, or no simulated node runs"
_WIDTH: Final = 78


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command and every action."""
    default = config.default_node_dir()
    sentence = "Make something happen to the simulated node of gpu-agent demo or simulate."
    parser.description = f"{sentence}\n\n{EXAMPLES}"
    parser.usage = "gpu-agent inject ACTION [VALUE] [--PARAMETER VALUE]... [--node-dir DIR]"
    parser.epilog = f"{_listing()}\n\n{EXIT_CODES}"
    parser.add_argument(
        "--node-dir",
        metavar="DIR",
        default=default,
        help=f"The node's directory ({default})".replace("%", "%%"),
    )
    parser.add_argument("action", nargs="?", metavar="ACTION", help="What happens")
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="Its value and parameters")


def main(args: argparse.Namespace) -> int:
    """Run the command; raises AgentError with what is wrong in one sentence."""
    from agent.simulation import actions, control  # noqa: PLC0415 - a completion of all commands needs neither

    if args.action is None:
        print(_listing())  # noqa: T201 - the result of the command
        return 0
    words = [args.action, *args.words]
    if {"-h", "--help"} & set(words):
        print(_listing(_name(words)[0]))  # noqa: T201
        return 0
    name, given, node_dir = _read(words, args.node_dir)
    invocation = actions.parse(name, given)
    print(control.ask(Path(node_dir), invocation.name, invocation.given))  # noqa: T201
    return 0


def _name(words: list[str]) -> tuple[str, list[str]]:
    """Split off an action's name, which has two words on the kubelet."""
    from agent.simulation.actions import KUBELET  # noqa: PLC0415 - as in main

    count = 2 if words[0] == KUBELET and len(words) > 1 and not words[1].startswith("-") else 1
    return " ".join(words[:count]), words[count:]


def _read(words: list[str], node_dir: str) -> tuple[str, dict[str, str], str]:
    """Return name, parameters and node directory; raises UsageError."""
    from agent.simulation import actions  # noqa: PLC0415 - as in main

    name, rest = _name(words)
    row = actions.table().get(name.replace("_", "-"))
    given: dict[str, str] = {}
    remaining = iter(rest)
    for word in remaining:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            value = value if equals else next(remaining, "")
            if not equals and not value:
                raise UsageError(f"{name}: --{key} needs a value")
        elif row is not None and row.subject is not None and row.subject not in given:
            key, value = row.subject, word
        elif row is not None:
            raise UsageError(f'{name} accepts no "{word[:80]}"; it is written: {row.usage}')
        else:
            continue
        if key.replace("-", "_") in given:
            raise UsageError(f"{name}: --{key} is given twice")
        if key == "node-dir":
            node_dir = value
        else:
            given[key.replace("-", "_")] = value
    return name, given, node_dir


def _listing(only: str = "") -> str:
    """Return the help on one action, or on all of them."""
    from agent.simulation import actions  # noqa: PLC0415 - as in main

    table = actions.table()
    row = table.get(only.replace("_", "-"))
    if row is not None:
        return "\n".join(_row_lines(row, is_full=True))
    return "\n".join(
        ["actions:", *(line for each in table.values() for line in _row_lines(each, is_full=False))]
    )


def _row_lines(row: Any, *, is_full: bool) -> list[str]:
    import textwrap  # noqa: PLC0415 - as in main

    lines = textwrap.wrap(
        row.usage, _WIDTH, initial_indent="  ", subsequent_indent="      ", break_on_hyphens=False
    )
    lines += textwrap.wrap(row.summary, _WIDTH, initial_indent="      ", subsequent_indent="      ")
    for each in row.parameters if is_full else ():
        name = each.metavar if each.name == row.subject else f"--{each.name} {each.metavar}"
        lines.append(f"        {name:<20} {each.help}".rstrip())
    return lines
