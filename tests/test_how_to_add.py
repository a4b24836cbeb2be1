"""CONTRIBUTING lists where a new fact, reason, reading, option or count goes: each is added to a copy."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import agent

ROOT = Path(agent.__file__).parents[1]


@dataclass(frozen=True)
class Edit:
    """Text that is put before other text of a file, which has it once."""

    path: str
    before: str
    added: str

    def apply(self, copy: Path) -> None:
        file = copy / self.path
        text = file.read_text(encoding="utf-8")
        assert text.count(self.before) == 1, (self.path, self.before)
        file.write_text(text.replace(self.before, self.added + self.before), encoding="utf-8")


@dataclass(frozen=True)
class Addition:
    """What is added, to at most so many files, and a program that shows that it works."""

    edits: tuple[Edit, ...]
    most_files: int
    check: str


ADDITIONS = {
    "a fact": Addition(
        (
            Edit(
                "agent/model/facts/driver.py",
                "\n\nclass GpuProbePassed(",
                '\n\nclass FanStopped(GpuState, frozen=True):\n    """The fan of a GPU stands."""\n\n'
                "    source: SourceName = NVML\n",
            ),
            Edit("agent/model/facts/driver.py", "    | GpuProbePassed\n", "    | FanStopped\n"),
            Edit("agent/model/facts/__init__.py", "    GpuProbePassed,\n", "    FanStopped,\n"),
            Edit("agent/model/facts/__init__.py", '    "GpuProbePassed",\n', '    "FanStopped",\n'),
            Edit(
                "agent/core/health/faults.py",
                "\n\n@handles(facts.HealthEventsUnsupported)",
                "\n\n@handles(facts.FanStopped)\n"
                "def apply_fan_stopped(state: State, fact: facts.FanStopped, now_ns: int) -> Applied:\n"
                '    """Record it."""\n'
                '    event = Event(EventKind.GPUS, "A fan stands", fields={"uuid": fact.gpu})\n'
                "    return state, (RecordEvent(event, now_ns),)\n",
            ),
        ),
        3,
        "from agent.core.health.reducer import step\n"
        "from agent.core.health.state import initial_state\n"
        "from agent.model.facts import FanStopped\n"
        "from agent.model.ids import GpuUuid\n"
        "from agent.model.policy import Policy\n"
        "_, effects, _ = step(initial_state(Policy(), None, now_ns=0), FanStopped(GpuUuid('GPU-1')), 1)\n"
        "assert [each.event.message for each in effects] == ['A fan stands'], effects\n",
    ),
    "a reason": Addition(
        (
            Edit("agent/model/health.py", '    THERMAL = "thermal"\n', '    FAN_STOPPED = "fan_stopped"\n'),
            Edit(
                "agent/core/reasons.py",
                "    Reason.THERMAL: ReasonSpec(",
                "    Reason.FAN_STOPPED: ReasonSpec(\n"
                '        _WARNING, _SOFT, _CLEARS, "A fan of the GPU stands", "replace the fan"\n    ),\n',
            ),
        ),
        2,
        "from agent.cli import main\nassert main(['explain', 'fan_stopped']) == 0\n",
    ),
    "a polled NVML reading": Addition(
        (
            Edit(
                "agent/model/sample.py", "    pcie_width: int", "    performance_state: int | None = None\n"
            ),
            Edit(
                "agent/sources/nvml/readings.py",
                "    def hw_slowed(self,",
                "    def performance_state(self, handle: Handle) -> int:\n"
                '        """Return the performance state; 0: the highest."""\n'
                "        return int(self._call(pynvml.nvmlDeviceGetPerformanceState, handle))\n\n",
            ),
            Edit(
                "agent/sources/nvml/sampling.py",
                "            hw_slowed=self._ask(",
                "            performance_state=self._ask(handle, self._readings.performance_state),\n",
            ),
        ),
        4,
        "from agent.errors import NvmlCode, NvmlError\n"
        "from agent.sources.nvml.sampling import Sampler\n"
        "class OneCall:\n"
        "    def call(self, function, *_, **__):\n"
        "        if function.__name__ == 'nvmlDeviceGetPerformanceState':\n"
        "            return 2\n"
        "        raise NvmlError(function.__name__, NvmlCode.NOT_SUPPORTED, 'Not Supported')\n"
        "sampler = Sampler(OneCall(), slow_ns=0, clock=lambda: 0)\n"
        "sample = sampler.sample(None, celsius=40, total_bytes=None, urgent=True).sample\n"
        "assert sample.performance_state == 2, sample\n",
    ),
    "an option": Addition(
        (
            Edit(
                "agent/config/our_options.py",
                '    ours(\n        "nvml-library",',
                '    ours("fan-limit", "80", integer(1, 100), "PERCENT", "Fans above it are reported",'
                ' fills="fan_limit"),\n',
            ),
            Edit("agent/config/settings.py", "    nvml_library: str", "    fan_limit: int\n"),
        ),
        2,
        "from agent.cli import main\n"
        "from agent.config.load import load\n"
        "assert load({'fan-limit': '70'}, {}).fan_limit == 70\n"
        "assert main(['config', 'explain', 'fan-limit']) == 0\n",
    ),
    "a count": Addition(
        (
            Edit(
                "agent/sinks/statefile.py",
                '    failures = Count("state_file_failures_total"',
                '    writes = Count("state_file_writes_total", "writes", "Writes of the state file.")\n',
            ),
        ),
        2,
        "import agent.sinks.statefile\n"
        "from agent.counts import describe\n"
        "assert describe()['state_file_writes_total']['value'] == 0\n",
    ),
}


def rows() -> dict[str, str]:
    """Return what CONTRIBUTING lists as the place of each thing."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## How to add")[2].partition("\n## ")[0]
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {cell[0].removeprefix("| "): cell[1] for cell in cells}


def is_named(path: str, row: str) -> bool:
    """Whether a row names a file: by its path, a pattern, its directory, or its name beside another."""
    for name in re.findall(r"`([^`]+)`", row):
        pattern = re.escape(name).replace("SUBJECT", r"\w+")
        if re.fullmatch(pattern, path) or (name.endswith("/") and path.startswith(name)):
            return True
        if "/" not in name and path.endswith(f"/{name}"):
            return True
    return False


@pytest.mark.parametrize("what", ADDITIONS)
def test_one_more_needs_the_files_that_contributing_names_and_no_others(what: str, tmp_path: Path) -> None:
    addition = ADDITIONS[what]
    files = {edit.path for edit in addition.edits}
    assert len(files) <= addition.most_files
    assert [path for path in files if not is_named(path, rows()[what])] == []
    shutil.copytree(
        ROOT / "agent", tmp_path / "agent", ignore=shutil.ignore_patterns("__pycache__", "simulation")
    )
    before = works(addition.check, tmp_path)
    for edit in addition.edits:
        edit.apply(tmp_path)
    after = works(addition.check, tmp_path)
    assert (before.returncode, after.returncode) == (1, 0), after.stderr[-2000:]


def works(check: str, copy: Path) -> subprocess.CompletedProcess[str]:
    """Run a check in the copy, whose package comes before an installed one; an error exits with 1."""
    is_of_copy = f"import agent\nassert agent.__file__.startswith({str(copy)!r})\n"
    return subprocess.run(
        (sys.executable, "-B", "-c", is_of_copy + check),
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_paths_in_the_architecture_name_what_there_is() -> None:
    """The functions that a reader follows from a fault to the socket are where the document has them."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    paths = text.partition("## Two paths")[2].partition("\n## ")[0]
    source = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "agent").rglob("*.py"))
    names = {name.rpartition(".")[2] for name in re.findall(r"`([A-Za-z_.]+)`", paths)} - {
        "py",
        "c",
        "send_message",
    }
    assert len(names) > 30
    missing = {name for name in names if not re.search(rf"(?:def|class) {name}\b", source)}
    assert missing - {"handlers", "changes", "step", "Latest"} == set()
