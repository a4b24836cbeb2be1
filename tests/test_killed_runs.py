"""A run of tests that is killed leaves nothing behind, and the next one takes nothing from others."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.harness import ROOT
from tests.killed_runs import LOCK, WITH_US, held, remove_stale
from tests.sources.recorder import until

RUN = """\
import subprocess, tempfile
from tests.killed_runs import WITH_US

def test_it():
    child = subprocess.Popen([*WITH_US, "sleep", "inf"])
    print(child.pid, tempfile.gettempdir(), flush=True)
    child.wait()
"""


async def test_a_killed_run_leaves_no_process_and_the_next_run_removes_its_directory(tmp_path: Path) -> None:
    file = tmp_path / "test_run.py"
    file.write_text(RUN)
    command = (*WITH_US, sys.executable, "-m", "pytest", "-q", "-s", "-p", "tests.conftest")
    with subprocess.Popen(
        [*command, f"--config-file={ROOT / 'pyproject.toml'}", f"--rootdir={tmp_path}", file],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        pid, place = run.stdout.readline().split()
        assert Path(place, LOCK).exists()
        remove_stale(Path(place).parent, "gpu-")
        assert Path(place, LOCK).exists()
        run.kill()
    await until(lambda: not Path("/proc", pid).exists())
    remove_stale(Path(place).parent, "gpu-")
    assert not Path(place).exists()
    assert Path(tempfile.gettempdir()).exists()


def test_only_what_is_marked_and_free_is_removed(tmp_path: Path) -> None:
    (tmp_path / "gpu-of-a-person").mkdir()
    (tmp_path / "gpu-stale").mkdir()
    (tmp_path / "gpu-stale" / LOCK).touch()
    with held(tmp_path, "gpu-") as place:
        remove_stale(tmp_path, "gpu-")
        assert {each.name for each in tmp_path.iterdir()} == {"gpu-of-a-person", place.name}
    assert [each.name for each in tmp_path.iterdir()] == ["gpu-of-a-person"]
