"""``gpu-agent cdi``: show the CDI specifications that the agent writes, or would write; validate a file."""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from agent.commands.arguments import Parser
from agent.commands.render import Output, add_output_flag, show
from agent.config.load import load
from agent.config.option import shown
from agent.config.options import OPTIONS
from agent.core.allocation.cdi import CLASSES
from agent.core.allocation.cdi_schema import problems_of
from agent.core.allocation.injection import CDI_VENDOR
from agent.core.wording import printable
from agent.errors import AgentError, ConfigError, UsageError
from agent.model.structs import replace

_DESCRIPTION: Final = """\
Show the CDI specifications that the agent of this node writes for container
runtimes, or with --scenario those that it would write on a simulated node,
which starts nothing; or check a file as strictly as a runtime does.

Examples:
  gpu-agent cdi                        the agent's files in /var/run/cdi
  gpu-agent cdi show -o yaml
  gpu-agent cdi --scenario mig-mixed --device-id-strategy index
  gpu-agent cdi validate /etc/cdi/nvidia.yaml     every problem

validate exits with 0 for a specification that runtimes load and with 2 for
any other file. show accepts every flag of run; warnings go to standard error.
"""

MAX_BYTES: Final = 4 * 1024 * 1024
"""Maximum size of a specification; those of the agent are smaller."""
MAX_VALUES: Final = 100_000
"""Values of a YAML file, each counted as often as an alias repeats it."""


def configure(parser: Parser) -> None:
    """Add the flags."""
    parser.usage = "gpu-agent cdi [show] [flags]\n       gpu-agent cdi validate FILE"
    parser.description = _DESCRIPTION
    parser.add_argument("action", choices=("show", "validate"), nargs="?", default="show", help="What to do")
    parser.add_argument("file", metavar="FILE", nargs="?", help="A specification, JSON or YAML")
    parser.add_argument("--scenario", metavar="NAME|FILE", help="Use this scenario's node")
    add_output_flag(parser, Output.JSON, Output.YAML)
    parser.accept_options(OPTIONS.values())


def main(args: argparse.Namespace) -> int:
    """Show or validate."""
    if args.action == "validate":
        if args.file is None:
            raise UsageError("cdi validate needs a file; see gpu-agent cdi --help")
        return _validate(args.file)
    if args.file is not None:
        raise UsageError(f'"{shown(args.file)}" is not expected here; see gpu-agent cdi --help')
    if args.scenario is not None:
        documents = _of_scenario(args.scenario, args.settings)
    else:
        documents = _of_node(load(args.settings, os.environ).cdi.spec_dir)
    for number, document in enumerate(documents):
        if number and args.output == Output.YAML.value:
            print("---")
        show(document, Output(args.output))
    return 0


# Of a node


def _of_node(directory: str) -> list[Any]:
    """Return the content of the agent's own files; raises AgentError if there is none or one is invalid."""
    paths = [path for path in _own_files(directory) if os.path.exists(path)]  # noqa: PTH110 - Path's raises
    if not paths:
        raise AgentError(
            f"{directory} has no CDI specification of the agent; it writes one with a CDI strategy"
            " (--device-list-strategy). --cdi-spec-dir names another directory, --scenario shows an example"
        )
    documents = []
    for path in paths:
        document, problems = _read(path)
        if problems := problems or _problems_in(path, document):
            raise AgentError(f"{problems[0]}, so runtimes reject it; the agent rewrites it within moments")
        documents.append(document)
    return documents


def _own_files(directory: str) -> Iterator[str]:
    for kind in CLASSES:
        yield f"{directory.rstrip('/')}/{CDI_VENDOR}-{kind}.json"


def _of_scenario(name: str, given: dict[str, str]) -> list[Any]:
    """Return what the agent would write on a scenario's node, and print its warnings."""
    from agent.commands.extras import scenario_node  # noqa: PLC0415 - help must appear at once
    from agent.sinks.cdi.files import SpecDirectory  # noqa: PLC0415
    from agent.sinks.cdi.records import CdiError, Wanted  # noqa: PLC0415

    node = scenario_node(name, given)
    settings, snapshot = node.settings, node.snapshot
    with TemporaryDirectory(prefix="gpu-agent-") as directory:
        node.write_roots(Path(directory))
        wanted = Wanted(
            gpus=tuple(view.gpu for view in snapshot.gpus),
            driver_version=node.driver_version,
            injection=settings.policy.injection,
            mig_strategy=settings.policy.mig_strategy,
            present=frozenset(view.gpu.uuid for view in snapshot.gpus),
        )
        cdi = replace(settings.cdi, spec_dir=f"{directory}/cdi", driver_root_ctr_path=f"{directory}/driver")
        specs = SpecDirectory(cdi, sys_root=f"{directory}/sys", is_in_container=True)
        try:
            made = specs.update(wanted)
        except CdiError as error:
            raise AgentError(f"The agent would write no specification: {error}") from None
        absent = (f"the node has nothing for {each}" for each in sorted(made.absent))
        for note in (*settings.warnings, *made.notes, *made.left_out, *absent):
            print(f"gpu-agent: warning: {printable(note)}", file=sys.stderr)
        return [json.loads(Path(file.path).read_bytes()) for file in made.files.values()]


# Of a file


def _validate(path: str) -> int:
    document, problems = _read(path)
    if problems := problems or _problems_in(path, document):
        raise ConfigError(tuple(problems))
    number = len(document["devices"])
    devices = f"{number} device{'' if number == 1 else 's'} of {document['kind']}"
    print(f"{path} is valid: version {document['cdiVersion']}, {devices}")
    return 0


def _problems_in(path: str, document: object) -> list[str]:
    return [f"{path}: {problem}" for problem in problems_of(document)]


def _read(path: str) -> tuple[Any, list[str]]:
    """Return the parsed content of a file, or the problems that prevent parsing it."""
    from agent.config import yaml_tree  # noqa: PLC0415 - only where a file is read

    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:  # noqa: PTH123
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"Could not read {path}: {error.strerror}") from None
    if len(raw) > MAX_BYTES:
        return None, [f"{path}: is over {MAX_BYTES // 2**20} MiB"]
    if not raw.strip():
        return None, [f"{path}: is empty"]
    if raw.lstrip()[:1] == b"{":
        return _from_json(path, raw)
    if len(raw) > yaml_tree.MAX_BYTES:
        return None, [f"{path}: is over {yaml_tree.MAX_BYTES // 1024} KiB of YAML; convert it to JSON"]
    try:
        root = yaml_tree.tree_of(path, raw)
    except yaml_tree.UnreadableError as error:
        return None, [str(error)]
    notes = yaml_tree.Notes(path)
    return (None if root is None else _Values(notes).of("", root, frozenset())), notes.problems


def _from_json(path: str, raw: bytes) -> tuple[Any, list[str]]:
    twice: list[str] = []

    def noted(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice.extend(f"{path}: {shown(name)} is given twice" for name in found if names.count(name) > 1)
        return found

    try:
        return json.loads(raw, object_pairs_hook=noted), twice
    except json.JSONDecodeError as error:
        return None, [f"{path}:{error.lineno}: {error.msg}"]
    except UnicodeDecodeError:
        return None, [f"{path}: not UTF-8 text"]
    except ValueError:
        return None, [f"{path}: holds a number with too many digits"]
    except RecursionError:
        return None, [f"{path}: nested too deeply"]


class _Values:
    """Converts a YAML tree into values, and notes what a runtime's strict parser rejects."""

    def __init__(self, notes: Any) -> None:
        self._notes = notes
        self._left = MAX_VALUES

    def of(self, name: str, node: Any, inside: frozenset[int]) -> Any:
        """Return the value of a node; ``inside`` are the nodes around it."""
        self._left -= 1
        if id(node) in inside or self._left < 0:
            # Without this limit a few lines of aliases could expand to more than fits into memory.
            if self._left >= -1:
                self._notes.problem(node, f"its aliases stand for over {MAX_VALUES} values")
            return None
        if node.id == "scalar":
            return self._notes.value(name or "the document", node)
        inside |= {id(node)}
        if node.id == "sequence":
            return [self.of(f"{name}[{number}]", each, inside) for number, each in enumerate(node.value)]
        pairs = self._notes.pairs(name, node)
        return {key: self.of(f"{name}.{key}".lstrip("."), each, inside) for key, each in pairs}
