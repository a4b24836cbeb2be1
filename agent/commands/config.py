"""``gpu-agent config``: show the effective settings, check a file, explain every option."""

import argparse
import os
import sys
import textwrap
from typing import Final

from agent.commands.arguments import Parser
from agent.commands.render import NONE, Output, add_output_flag, fitted, share, show, table
from agent.config.load import check_file, load
from agent.config.options import OPTIONS
from agent.config.reference import Entry, entries
from agent.config.settings import ParsedOption, Settings
from agent.core.wording import printable
from agent.errors import EXIT_USAGE, ConfigError, UsageError
from agent.spelling import suggestion

_WIDTH: Final = 78
_VALUE_WIDTH: Final = 26

_DESCRIPTION: Final = """\
Show each setting and its origin, check a configuration file, or explain the
options. It needs no agent: show prints what run would use with the same flags
and variables.

Examples:
  gpu-agent config show --config-file /etc/gpu-agent/config.yaml
  gpu-agent config show poll -o json
  gpu-agent config validate config.yaml       every mistake, with its line
  gpu-agent config explain                    everything that can be set
  gpu-agent config explain agent.flapping     a key, a flag or a variable

validate exits with 0 for a valid file and with 2 for any other; warnings go
to standard error. show accepts every flag of run.
"""


def configure(parser: Parser) -> None:
    """Add the flags."""
    parser.usage = (
        "gpu-agent config show|explain [KEY] [flags]\n       gpu-agent config validate FILE [flags]"
    )
    parser.description = _DESCRIPTION
    parser.add_argument("action", choices=("show", "validate", "explain"), help="What to do")
    parser.add_argument("what", metavar="KEY|FILE", nargs="?", help="A flag, variable or key; or a file")
    parser.accept_options(OPTIONS.values())
    add_output_flag(parser)


def main(args: argparse.Namespace) -> int:
    """Show, validate or explain."""
    flags: dict[str, str] = args.settings
    output = Output(args.output)
    match args.action:
        case "show":
            return _show(load(flags, os.environ), args.what, output)
        case "validate":
            if args.what is None:
                raise UsageError("config validate needs a file; see gpu-agent config --help")
            return _validate(args.what, output, strict=flags.get("strict-config") == "true")
        case _:
            return _explain(args.what, output)


def _show(settings: Settings, what: str | None, output: Output) -> int:
    for warning in settings.warnings:
        print(f"gpu-agent: warning: {printable(warning)}", file=sys.stderr)
    wanted = None if what is None else {what, *(entry.name for entry in _found(what))}
    rows = {name: each for name, each in settings.shown.items() if wanted is None or name in wanted}
    if output in (Output.JSON, Output.YAML):
        listed = [{"name": name, "value": each.text, "origin": each.origin} for name, each in rows.items()]
        show({"apiVersion": "gpu-agent/v1", "settings": listed}, output)
    elif output is Output.NAME:
        print("\n".join(rows))
    else:
        is_wide = output is Output.WIDE
        lines = [_show_row(name, each, is_wide=is_wide) for name, each in rows.items()]
        print("\n".join(table(("NAME", "VALUE", "ORIGIN"), lines, is_wide=is_wide)))
    return 0


def _show_row(name: str, given: ParsedOption, *, is_wide: bool) -> list[str]:
    value, origin = fitted(given.text or NONE, share(_VALUE_WIDTH), is_wide=is_wide), str(given.origin)
    if not is_wide and sys.stdout.isatty():
        # Only the file's name and line; its directory and the key need a wide table.
        where, _, key = origin.partition(": ")
        origin = os.path.basename(where) if key else origin  # noqa: PTH119 - a text, no path
    return [name, value, origin]


def _validate(path: str, output: Output, *, strict: bool) -> int:
    contents = check_file(path, strict=strict)
    if output in (Output.JSON, Output.YAML):
        document = {
            "apiVersion": "gpu-agent/v1",
            "file": path,
            "valid": not contents.problems,
            "problems": contents.problems,
            "warnings": contents.warnings,
        }
        show(document, output)
        return EXIT_USAGE if contents.problems else 0
    for warning in contents.warnings:
        print(f"gpu-agent: warning: {printable(warning)}", file=sys.stderr)
    if contents.problems:
        raise ConfigError(tuple(contents.problems))
    print(f"{path} is valid")
    return 0


def _explain(what: str | None, output: Output) -> int:
    found = _found(what) if what is not None else list(entries())
    if output in (Output.JSON, Output.YAML):
        show({"apiVersion": "gpu-agent/v1", "settings": [_document(entry) for entry in found]}, output)
    elif output is Output.NAME:
        print("\n".join(entry.name for entry in found))
    elif what is None:
        print("\n".join(_explain_table(found, is_wide=output is Output.WIDE)))
    else:
        print("\n\n".join("\n".join(_paragraph(entry)) for entry in found))
    return 0


def _explain_table(found: list[Entry], *, is_wide: bool) -> list[str]:
    if not is_wide:
        return table(("NAME", "MEANING"), [[entry.name, entry.help] for entry in found])
    rows = [
        [
            entry.name,
            entry.default or NONE,
            ",".join(entry.variables) or NONE,
            entry.file_key or NONE,
            entry.help,
        ]
        for entry in found
    ]
    return table(("NAME", "DEFAULT", "VARIABLE", "FILE", "MEANING"), rows, is_wide=True)


def _found(what: str) -> list[Entry]:
    """Return the entries of a name, or those below a key of the file."""
    name = what.lstrip("-")
    everything = list(entries())
    found = [entry for entry in everything if name in entry.names]
    found = found or [entry for entry in everything if entry.file_key.startswith(f"{name}.")]
    if not found:
        known = tuple(name for entry in everything for name in entry.names if name)
        raise UsageError(
            f'"{what[:80]}" is no setting{suggestion(name, known)}; see gpu-agent config explain'
        )
    return found


def _document(entry: Entry) -> dict[str, object]:
    return {
        "name": entry.name,
        "help": entry.help,
        "takes": entry.accepts,
        "default": entry.default,
        "flags": list(entry.flags),
        "variables": list(entry.variables),
        "file": entry.file_key,
        "needsRestart": entry.needs_restart,
        "ofNvidiasPlugin": entry.is_nvidias,
    }


def _paragraph(entry: Entry) -> list[str]:
    effect = "at the next start" if entry.needs_restart else "at once, when the file changes"
    rows = {
        "Takes": entry.accepts,
        "Default": entry.default or NONE,
        "Flag": ", ".join(entry.flags) or NONE,
        "Variable": ", ".join(entry.variables) or NONE,
        "File": entry.file_key or NONE,
        "Counts": effect if entry.file_key else "at the next start",
    }
    lines = [entry.name, *textwrap.wrap(entry.help, _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    for title, text in rows.items():
        lines += textwrap.wrap(text, _WIDTH, initial_indent=f"  {title:<10}", subsequent_indent=" " * 12)
    return lines
