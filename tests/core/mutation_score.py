"""Runs mutmut on agent/core and prints its score; exits 1 below MINIMUM_PERCENT.

Mutants that no test can distinguish from the original are listed in MUTANTS.md, each as the lines it changes,
so that the list survives a renumbering. ``--again`` forgets the results of earlier runs, ``--report``
only reads them.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

MINIMUM_PERCENT = 90.0

CHILDREN = 2

KILLED = frozenset({"killed", "timeout", "caught by type check"})

ROOT = Path(__file__).parents[2]
EQUIVALENTS = Path(__file__).with_name("MUTANTS.md")

PART = re.compile(r"^## `(?P<function>[^`]+)`$|^```diff\n(?P<block>.*?)^```$", re.MULTILINE | re.DOTALL)

Change = tuple[str, tuple[str, ...]]
"""A function, and the lines taken away from it and put into it."""


def main() -> int:
    """Run, compare, print."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--again", action="store_true", help="forget the results of earlier runs")
    arguments.add_argument("--report", action="store_true", help="only read the results of earlier runs")
    options = arguments.parse_args()
    os.chdir(ROOT)
    if options.again:
        shutil.rmtree("mutants", ignore_errors=True)
    if not options.report and run_mutmut() != 0:
        sys.stderr.write("mutmut did not run to its end; the reason is above\n")
        return 2
    return report(statuses(), dict.fromkeys(listed(EQUIVALENTS.read_text("utf-8"))))


def run_mutmut() -> int:
    """Let mutmut try every mutant, politely; returns its exit status."""
    environment = {**os.environ, "HYPOTHESIS_PROFILE": "mutation"}
    command = ["nice", "-n", "19", str(Path(sys.executable).with_name("mutmut")), "run"]
    return subprocess.run(
        [*command, "--max-children", str(CHILDREN)], env=environment, check=False
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
