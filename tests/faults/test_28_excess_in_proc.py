"""Users that make /proc large, or give their processes and cgroups the names of others.

A scan beside 18,000 mounts with paths of 4 kB took 34 s and 533 MiB before it was bounded.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from agent.simulation.nvml import GpuProcess
from tests.harness import (
    GPU,
    ROOT,
    agent_process,
    short_directory,
    simulated_node,
    uuids,
    wait_allocatable,
    why_no_driver_double,
)
from tests.hidden_proc import DROP_ROOT
from tests.probe.conftest import MISC_MAJOR, QUIET_MINORS, make_node

MIB: Final = 2**20
UNPRIVILEGED: Final = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
MOUNTS: Final = 18_000
MOUNTER: Final = f"""
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
{DROP_ROOT}
libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE
if libc.unshare(0x10020000):  # CLONE_NEWUSER | CLONE_NEWNS
    sys.exit(os.strerror(ctypes.get_errno()))
open("/proc/self/uid_map", "w").write("0 65534 1")
os.chdir(sys.argv[1])
for _ in range(15):
    os.mkdir("x" * 250)
    os.chdir("x" * 250)
os.mkdir("top")
for _ in range(int(sys.argv[2])):
    if libc.mount(b".", b"top", None, 0x1000, None):  # MS_BIND
        sys.exit(os.strerror(ctypes.get_errno()))
kept = open("top/nvidia0", "w")
print(flush=True)
sys.stdin.read()
"""
SCAN: Final = """
import json, resource, sys, time
from agent.probe import procfs
from agent.probe.kernel import Majors
began = time.process_time()
scan = procfs.scan(majors=Majors(nvidia=10))
print(json.dumps({
    "cpu_ms": 1e3 * (time.process_time() - began),
    "peak_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    "unseen": scan.unseen,
    "holders": [each.tgid for each in scan.held],
}))
"""


@contextmanager
def waiting(*command: str, **options: Any) -> Iterator[int]:
    """Run a process that reports when it is ready and ends with its input; returns its pid."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
    ) as process:
        assert process.stdout is not None
        try:
            if process.stdout.readline() != "\n":
                pytest.skip("users may not make namespaces here")
            yield process.pid
        finally:
            process.communicate()


def scanned() -> dict[str, Any]:
    ran = subprocess.run([sys.executable, "-c", SCAN], cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_many_mounts_of_a_user_cost_a_bounded_scan_and_hide_no_neighbour(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    node = next(
        (made for each in QUIET_MINORS if (made := make_node(tmp_path / "nvidia0", MISC_MAJOR, each))), None
    )
    if node is None:
        pytest.skip("mknod is not permitted")
    with short_directory() as place, node.open("rb") as held:
        place.chmod(0o777)
        quiet = scanned()
        with waiting(sys.executable, "-ISc", MOUNTER, str(place), str(MOUNTS)) as pid:
            mounts = Path(f"/proc/{pid}/mountinfo")
            with mounts.open("rb") as file:
                size = sum(len(line) for line in file)
            found = scanned()
        assert held.fileno() >= 0
    figures = {
        "mountinfo_mib": size // MIB,
        "cpu_ms": (round(quiet["cpu_ms"]), round(found["cpu_ms"])),
        "more_mib": (found["peak_kib"] - quiet["peak_kib"]) / 1024,
    }
    sys.stdout.write(f"{figures}\n")
    for name, value in figures.items():
        record_property(name, value)
    assert size > 50 * MIB
    assert os.getpid() in found["holders"]
    assert (quiet["unseen"], found["unseen"]) == ("", f"more mounts than are read: process {pid}")
    assert figures["more_mib"] <= 16


# ---- names ----

IMPOSTOR: Final = """
import ctypes, sys
ctypes.CDLL(None).prctl(15, sys.argv[1].encode(), 0, 0, 0)  # PR_SET_NAME
print(flush=True)
sys.stdin.read()
"""
SERVICE: Final = """
import sys
print(flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(why_no_driver_double() is not None, reason=f"{why_no_driver_double()}")
async def test_names_that_users_choose_decide_nothing(tmp_path: Path) -> None:
    """Of a service's name, in a cgroup of their own that is named like the pod's; and root's own service."""
    async with simulated_node("4x-t4", driver="required") as node:
        flags = {"probe_tier": "procfs", "leak_foreign_process": "0s"}
        async with agent_process(node, **flags) as agent:
            await wait_allocatable(node.kubelet, 4, capacity=4)
            job = await node.kubelet.run_pod("job-a", "ns1", {"main": {GPU: 1}})
            given = uuids(node).index(job.containers["main"].envs["NVIDIA_VISIBLE_DEVICES"])
            other, roots = (number for number in range(3) if number != given) if given < 3 else (0, 1)
            (logs,) = node.directory.pod_logs.iterdir()
            uid = logs.name.rpartition("_")[2]
            program = tmp_path / "nv-hostengine"
            program.write_bytes(Path(sys.executable).resolve().read_bytes())
            program.chmod(0o755)
            environment = {"PYTHONHOME": sys.base_prefix}
            with (
                delegated_cgroup(f"kubepods/burstable/pod{uid}/{'ab' * 32}") as cgroup,
                open_device(node.directory.dev, other) as named_fd,
                open_device(node.directory.dev, given) as placed_fd,
                open_device(node.directory.dev, roots) as roots_fd,
                waiting(
                    *(*UNPRIVILEGED, sys.executable, "-ISc", IMPOSTOR, "dcgm-exporter"), pass_fds=(named_fd,)
                ) as named,
                waiting(
                    *("sh", "-c", 'echo $$ >"$0"; exec "$@"', f"{cgroup}/cgroup.procs", *UNPRIVILEGED),
                    *(sys.executable, "-ISc", IMPOSTOR, "python"),
                    pass_fds=(placed_fd,),
                ) as placed,
                waiting(str(program), "-Sc", SERVICE, pass_fds=(roots_fd,), env=environment) as service,
            ):
                for number, pid in ((other, named), (given, placed), (roots, service)):
                    node.nvml.set_processes(number, [GpuProcess(pid, 900 * MIB)])
                wanted = {other: named, given: placed}
                found = await agent.wait_answer(
                    "/v1/conditions", lambda _, body: foreign(body, uuids(node)).keys() >= wanted.keys()
                )
                assert foreign(found, uuids(node)) == wanted
                await agent.wait_answer(
                    "/v1/owners",
                    lambda _, body: (
                        (service, True) in [(each["pid"], each["service"]) for each in held(body, roots)]
                    ),
                )


def foreign(body: Any, gpus: list[str]) -> dict[int, int]:
    """Return the process that is found where it should not be, by number."""
    return {
        gpus.index(each["gpu_uuid"]): each["details"]["culprits"][0]["pid"]
        for each in body["conditions"]
        if each["code"] == "foreign_process"
    }


def held(body: Any, number: int) -> list[Any]:
    return [each for each in body["owners"][number]["holders"] or () if not each["is_agent"]]


@contextmanager
def open_device(dev: Path, number: int) -> Iterator[int]:
    descriptor = os.open(dev / f"nvidia{number}", os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def delegated_cgroup(path: str) -> Iterator[Path]:
    """Make a cgroup where systemd leaves a login's to its user."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    roots = [each[1] for each in mounts if each[2] == "cgroup2"] + [
        each[1] for each in mounts if each[2] == "cgroup" and "pids" in each[3].split(",")
    ]
    made: list[Path] = []
    directory = Path(roots[0])
    try:
        for name in ("user.slice", "user-65534.slice", "user@65534.service", *path.split("/")):
            directory /= name
            if not directory.exists():
                directory.mkdir()
                made.append(directory)
        yield directory
    finally:
        for each in reversed(made):
            each.rmdir()
