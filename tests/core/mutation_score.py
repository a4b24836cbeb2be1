"""Runs mutmut on agent/core and prints its score; exits 1 below MINIMUM_PERCENT.

Mutants that no test can distinguish from the original are listed in MUTANTS.md, each as the lines it changes,
so that the list survives a renumbering. ``--again`` forgets the results of earlier runs, ``--report``
only reads them. Names of mutants, or patterns like ``agent.core.health.faults.*``, restrict the run to these.

mutmut changes no function that is decorated, so it runs in a copy in which the handlers of facts are
registered after their definition.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

MINIMUM_PERCENT = 90.0

CHILDREN = 2

KILLED = frozenset({"killed", "timeout", "caught by type check"})

ROOT = Path(__file__).parents[2]
COPY = ROOT / "mutants"
"""What is tested, and in mutants/ of it what mutmut makes of it."""
COPIED = ("agent", "tests", "proto", "pyproject.toml", "README.md")
EQUIVALENTS = Path(__file__).with_name("MUTANTS.md")

PART = re.compile(r"^## `(?P<function>[^`]+)`$|^```diff\n(?P<block>.*?)^```$", re.MULTILINE | re.DOTALL)

Change = tuple[str, tuple[str, ...]]
"""A function, and the lines taken away from it and put into it."""


def main() -> int:
    """Run, compare, print."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--again", action="store_true", help="forget the results of earlier runs")
    arguments.add_argument("--report", action="store_true", help="only read the results of earlier runs")
    arguments.add_argument("mutants", nargs="*", help="only these")
    options = arguments.parse_args()
    if options.again:
        shutil.rmtree(COPY, ignore_errors=True)
    if not options.report:
        copy()
    if not COPY.exists():
        sys.stderr.write("there are no results of an earlier run; run it without --report\n")
        return 2
    os.chdir(COPY)
    if not options.report and run_mutmut(options.mutants) != 0:
        sys.stderr.write("mutmut did not run to its end; the reason is above\n")
        return 2
    return report(statuses(), dict.fromkeys(listed(EQUIVALENTS.read_text("utf-8"))))


def copy() -> None:
    """Make the copy, or bring it up to date; a file that is the same keeps its time."""
    COPY.mkdir(exist_ok=True)
    for name in COPIED:
        for stale in files_of(COPY / name):
            if not (ROOT / stale.relative_to(COPY)).exists():
                stale.unlink()
                (COPY / "mutants" / stale.relative_to(COPY)).unlink(missing_ok=True)
        for path in files_of(ROOT / name):
            target = COPY / path.relative_to(ROOT)
            content = path.read_bytes()
            if path.suffix == ".py" and path.is_relative_to(ROOT / "agent/core"):
                content = undecorated(content.decode()).encode()
            if not target.exists() or target.read_bytes() != content:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)


def files_of(path: Path) -> list[Path]:
    """Return the files below a directory, or the file itself."""
    found = path.rglob("*") if path.is_dir() else [path]
    return [each for each in found if each.is_file() and "__pycache__" not in each.parts]


def undecorated(source: str) -> str:
    """Return a module in which each ``@handles(Kind)`` is a call after the function."""
    lines = source.splitlines(keepends=True)
    for node in reversed(ast.parse(source).body):
        if not isinstance(node, ast.FunctionDef) or not node.decorator_list:
            continue
        (decorator, *others) = node.decorator_list
        if others or not ast.unparse(decorator).startswith("handles("):
            continue
        assert node.end_lineno is not None
        lines[node.end_lineno : node.end_lineno] = [f"\n\n{ast.unparse(decorator)}({node.name})\n"]
        del lines[decorator.lineno - 1 : node.lineno - 1]
    return "".join(lines)


def run_mutmut(names: Sequence[str] = ()) -> int:
    """Let mutmut try every mutant, or those named so, politely; returns its exit status."""
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "mutation"}
    command = ["nice", "-n", "19", str(Path(sys.executable).with_name("mutmut")), "run"]
    return subprocess.run(
        [*command, "--max-children", str(CHILDREN), *names], env=environment, check=False
    ).returncode


def statuses() -> dict[str, str]:
    """What became of each mutant, by its name."""
    from mutmut.stats import status_by_exit_code  # noqa: PLC0415 - reads the configuration when imported

    found: dict[str, str] = {}
    for path in sorted(Path("mutants").rglob("*.meta")):
        codes = json.loads(path.read_text("utf-8"))["exit_code_by_key"]
        found.update({name: status_by_exit_code[code] for name, code in codes.items()})
    return found


def report(found: dict[str, str], equivalents: dict[Change, None]) -> int:
    """Print what survived, what is listed for nothing, and the score."""
    survivors = {name: changed(name) for name, status in found.items() if status not in KILLED}
    unlisted = {name: change for name, change in survivors.items() if change not in equivalents}
    for name, (_, lines) in unlisted.items():
        show(f"{name}: {found[name]}", *lines, "")
    for function, lines in equivalents.keys() - set(survivors.values()):
        show(f"{function}: listed in {EQUIVALENTS.name}, but not a survivor", *lines, "")
    killed, total = len(found) - len(survivors), len(found)
    equivalent = len(survivors) - len(unlisted)
    percent = 100 * killed / max(1, total - equivalent)
    show(f"score {percent:.1f} % (killed {killed} of {total}, {equivalent} equivalent)")
    return 0 if percent >= MINIMUM_PERCENT else 1


def show(*lines: str) -> None:
    """Print lines."""
    sys.stdout.write("".join(f"{line}\n" for line in lines))


def changed(name: str) -> Change:
    """The function of a mutant, and the lines that it changes there."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant  # noqa: PLC0415 - as above

    module, _, mangled = name.rpartition(".")
    function = re.sub(r"__mutmut_\d+$", "", mangled)
    function = re.sub(r"^x_", "", function).replace("xǁ", "").replace("ǁ", ".")
    return f"{module}.{function}", tuple(difference(get_diff_for_mutant(name).splitlines()))


def listed(text: str) -> Iterator[Change]:
    """The equivalents of MUTANTS.md: a heading names the function, each diff block is a mutant."""
    function = ""
    for part in PART.finditer(text):
        if part["function"]:
            function = part["function"]
        else:
            yield function, tuple(difference(part["block"].splitlines()))


def difference(lines: list[str]) -> Iterator[str]:
    """The changed lines of a unified diff, whatever their indentation."""
    for line in lines:
        if line[:1] in {"+", "-"} and line[:3] not in {"+++", "---"}:
            yield f"{line[0]} {line[1:].strip()}"


if __name__ == "__main__":
    sys.exit(main())
