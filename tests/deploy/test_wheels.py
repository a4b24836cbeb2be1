"""The wheel for nodes has nothing of the simulated node; the extra is a wheel of its own."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest

from agent import __version__
from tests.harness import ROOT, short_directory

pytestmark = pytest.mark.slow

OF_THE_EXTRA: Final = ("grpc", "google", "protobuf")
"""What only the simulated node needs, as it is named in site-packages."""


def environment() -> dict[str, str]:
    """Variables without those by which this checkout would be imported."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "GPU_AGENT"))}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both wheels by their distribution, built as make wheel does, from a copy without build folders."""
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, tree)
    shutil.copytree(ROOT / "agent", tree / "agent", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation"),
            *("-w", "dist", ".", "./agent/simulation"),
        ],
        cwd=tree,
        env=environment(),
        check=True,
        timeout=600,
    )
    return {path.name.partition("-")[0]: path for path in (tree / "dist").iterdir()}


class Installation:
    """A virtual environment with locked dependencies, and wheels in it."""

    def __init__(self, place: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", place], check=True, timeout=300)
        [site] = place.glob("lib/python3*/site-packages")
        self.place, self.site = place, site
        self.link(lambda name: not name.startswith((*OF_THE_EXTRA, "gpu_agent", "__editable__")))

    def link(self, is_wanted: Callable[[str], bool]) -> None:
        """Bring packages of this environment in, since no registry is asked."""
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if is_wanted(entry.name) and entry.suffix != ".pth":
                (self.site / entry.name).symlink_to(entry)

    def install(self, wheel: Path) -> None:
        subprocess.run(
            [
                *(sys.executable, "-m", "pip", "--python", self.place / "bin/python", "install", "-q"),
                *("--no-deps", "--no-index", "--no-compile", wheel),
            ],
            env=environment(),
            check=True,
            timeout=300,
        )

    def run(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.place / "bin/gpu-agent", *arguments],
            cwd=self.place,
            env=environment() | more,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )


@pytest.fixture(scope="module")
def node(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installation:
    made = Installation(tmp_path_factory.mktemp("node") / "venv")
    made.install(wheels["gpu_agent"])
    return made


@pytest.fixture(scope="module")
def desk(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Installation:
    made = Installation(tmp_path_factory.mktemp("desk") / "venv")
    made.link(lambda name: name.startswith(OF_THE_EXTRA))
    made.install(wheels["gpu_agent"])
    made.install(wheels["gpu_agent_simulation"])
    return made


def test_no_file_of_the_simulated_node_is_in_the_wheel_for_nodes(wheels: dict[str, Path]) -> None:
    names = zipfile.ZipFile(wheels["gpu_agent"]).namelist()
    assert [name for name in names if "simulation" in name or name.endswith((".so", ".pyi"))] == []
    # Nothing in it is built for one machine.
    assert wheels["gpu_agent"].name.endswith("-py3-none-any.whl")


def test_the_other_wheel_has_every_file_of_the_simulated_node_and_no_other(wheels: dict[str, Path]) -> None:
    names = zipfile.ZipFile(wheels["gpu_agent_simulation"]).namelist()
    files = {name for name in names if ".dist-info/" not in name}
    tree = ROOT / "agent/simulation"
    wanted = {
        str(path.relative_to(ROOT))
        for path in tree.rglob("*")
        if path.suffix in {".py", ".pyi", ".yaml"} and "__pycache__" not in path.parts
    }
    assert files == wanted | {"agent/simulation/nvml/libnvidia_ml.abi3.so"}


def test_commands_of_a_node_work_without_it(node: Installation) -> None:
    assert node.run("version", "-o", "name").stdout == f"{__version__}\n"
    assert "--mig-strategy" in node.run("run", "--help").stdout
    assert "gpu-agent demo" not in node.run("--help").stdout
    assert "simulate" not in node.run("completion", "bash").stdout


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("demo",), "gpu-agent demo"),
        (("inject", "xid", "79"), "gpu-agent inject"),
        (("allocate", "--scenario", "xid-79", "0"), "--scenario"),
        (("cdi", "--scenario", "xid-79"), "--scenario"),
    ],
)
def test_what_needs_it_names_what_to_install(
    node: Installation, arguments: tuple[str, ...], what: str
) -> None:
    done = node.run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"gpu-agent: {what} needs the simulated node, which is not installed; install it with: "
        "pip install 'gpu-agent[simulation]' (in a checkout: make setup)\n"
    )


def test_the_demo_runs_where_both_are_installed(desk: Installation) -> None:
    with short_directory() as directory:
        done = desk.run("demo", "--scenario", "xid-79", "--json", "--node-dir", f"{directory}/node")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["allocatable"] for line in lines if line["kind"] == "allocatable"] == [8, 7]
    help_text = desk.run("--help").stdout
    assert all(f"\n  {name} " in help_text for name in ("demo", "simulate", "inject"))
    assert "simulate" in desk.run("completion", "bash").stdout


def test_a_checkout_without_the_built_library_shows_how_to_build_it(desk: Installation) -> None:
    [library] = desk.site.glob("agent/simulation/nvml/libnvidia_ml*.so")
    hidden = library.rename(library.with_suffix(".hidden"))
    with short_directory() as directory:
        done = desk.run("demo", "--json", "--node-dir", f"{directory}/node")
    hidden.rename(library)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "it is built with the package gpu-agent-simulation, in a checkout by make setup" in done.stderr


def test_the_start_of_the_agent_reads_no_entry_points(desk: Installation) -> None:
    done = desk.run("run", "--poll=never", PYTHONVERBOSE="1")
    assert (done.returncode, "--poll" in done.stderr) == (2, True)
    assert "import 'agent.config.load'" in done.stderr
    for name in ("importlib.metadata", "agent.commands.extras"):
        assert f"import '{name}'" not in done.stderr


def project(path: str) -> Any:
    return tomllib.loads((ROOT / path).read_text(encoding="utf-8"))["project"]


def test_both_distributions_have_one_version_and_nodes_lock_no_more_than_they_need() -> None:
    agent, simulation = project("pyproject.toml"), project("agent/simulation/pyproject.toml")
    assert agent["version"] == simulation["version"] == __version__
    assert agent["optional-dependencies"]["simulation"] == [f"gpu-agent-simulation=={__version__}"]
    needs, *others = simulation["dependencies"]
    assert needs == f"gpu-agent=={__version__}"
    locked = re.findall(r"^[\w-]+", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    added = re.findall(r"^[\w-]+", (ROOT / "agent/simulation/requirements.txt").read_text(), re.MULTILINE)
    names = {match[0] for each in others if (match := re.match(r"[\w-]+", each))}
    assert names <= set(added)
    assert not names & set(locked)
