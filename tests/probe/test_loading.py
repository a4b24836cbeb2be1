"""Every way in which loading the probe fails has its code, and leaves nothing behind."""

import asyncio
import errno
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.errors import ProbeLoadError
from agent.probe import loader, syscalls
from agent.probe.kernel import Roots
from agent.probe.layout import ProbeConfig
from agent.probe.loading import MAX_DETAIL_BYTES, load
from agent.probe.probe import Probe
from agent.probe.programs import of_tier
from agent.probe.request import Doubles, Request, last_useful_line, read_reply
from tests.probe.conftest import DOUBLES, REPOSITORY, LoadProbe, loaded, why_no_probe
from tests.probe.machines import OTHER_RELEASE, RELEASE, Machine

NEXT_STEPS = (
    "use|install|reinstall|update|grant|mount|build|rebuild|boot|raise|set|check|allow|its whole output"
)
SCRIPTED_BCC = """
import os
with open(os.path.join(os.path.dirname(__file__), "compilations"), "a") as log:
    log.write("module imported\\n")
class BPF:
    TRACEPOINT = RAW_TRACEPOINT = KPROBE = TRACING = 1
    def __init__(self, text, cflags):
        with open(os.path.join(os.path.dirname(__file__), "compilations"), "a") as log:
            log.write("compiled\\n")
        os.write(2, {output!r}.encode() * {times})
        raise {error}
"""


@pytest.fixture(autouse=True)
def _possible(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := why_no_probe():
        pytest.skip(why)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("scratch")))


def open_descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


def scratch_directories() -> set[str]:
    return {entry.name for entry in Path(tempfile.gettempdir()).iterdir()}


def children() -> set[int]:
    """Return the loader processes that are ours."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"agent.probe.loader" in (process / "cmdline").read_bytes():
                found.add(int(process.name))
        except OSError:
            continue
    return found


def load_error(request: Request, **options: Any) -> ProbeLoadError:
    """Return the error, having seen that nothing else is left."""
    before = scratch_directories(), children(), open_descriptors()
    with pytest.raises(ProbeLoadError) as caught:
        loaded(request, **options)
    assert (scratch_directories(), children()) == before[:2]
    # Probes of other tests may be on their way out.
    assert open_descriptors() <= before[2]
    assert "\n" not in str(caught.value)
    # What is wrong, and what to do about it.
    assert re.search(rf"; ({NEXT_STEPS}) ", str(caught.value)), caught.value
    return caught.value


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def scripted_bcc(folder: Path, error: str, *, output: str = "", times: int = 1) -> tuple[str, ...]:
    (folder / "bcc").mkdir()
    (folder / "bcc/__init__.py").write_text(SCRIPTED_BCC.format(error=error, output=output, times=times))
    return (str(folder),)


def compilations(folder: Path) -> int:
    return (folder / "bcc/compilations").read_text().count("compiled")


# ---- what is loaded ----


def test_all_programs_of_the_tier_are_attached(shared: Probe) -> None:
    assert set(shared.attached) == {program.name for program in of_tier("syscalls")} - shared.missing.keys()
    assert shared.missing == {}
    assert shared.tier == "syscalls"


def test_the_status_names_loader_and_headers(shared: Probe) -> None:
    assert (shared.loader == "bcc") == bool(shared.headers)


def test_this_kernels_trace_file_system_stays_as_it_was(shared: Probe) -> None:
    mounts = Path("/proc/self/mounts").read_text()

    assert shared.attached
    assert "gpu-agent" not in mounts
    assert mounts.count(" tracefs ") <= 2


def test_auto_uses_the_object_where_bcc_is_not_installed(load_probe: LoadProbe, object_path: Path) -> None:
    probe = load_probe(loader="auto", bcc_paths=(), object_path=str(object_path))

    assert probe.loader == "core"


def test_auto_uses_the_object_where_bcc_has_no_headers(
    load_probe: LoadProbe, object_path: Path, machine: Machine, tmp_path: Path
) -> None:
    probe = load_probe(
        loader="auto",
        roots=machine.kernel_of_this_machine,
        bcc_paths=scripted_bcc(tmp_path, "Exception()"),
        object_path=str(object_path),
    )

    assert probe.loader == "core"


def test_auto_uses_the_object_where_bcc_cannot_compile(
    load_probe: LoadProbe, object_path: Path, machine: Machine, tmp_path: Path
) -> None:
    machine.with_headers("modules/6.1.0-9-amd64/build")
    probe = load_probe(
        loader="auto",
        roots=machine.kernel_of_this_machine,
        bcc_paths=scripted_bcc(tmp_path, "Exception('Failed to compile BPF module')"),
        object_path=str(object_path),
    )

    assert probe.loader == "core"
    assert compilations(tmp_path) == 1


def test_the_drivers_programs_are_loaded_and_wait_for_the_driver(
    loader: dict[str, Any], load_probe: LoadProbe, machine: Machine
) -> None:
    machine.with_kprobes(pmu=999)
    Path(machine.roots.sys, "kernel").mkdir()
    Path(machine.roots.sys, "kernel/btf").symlink_to("/sys/kernel/btf")
    roots = replace(Roots(), sys=machine.roots.sys, node_proc=machine.roots.node_proc)

    probe = load_probe(tier="driver", roots=roots, doubles=None, **loader)

    assert probe.tier == "driver"
    kprobes = {program.name for program in of_tier("driver") if program.kind in {"kprobe", "kretprobe"}}
    assert set(probe.missing) == kprobes
    assert set(probe.attached) == {program.name for program in of_tier("driver")} - kprobes
    assert all(reason != "was not loaded" for reason in probe.missing.values())


def test_the_programs_know_the_devices(load_probe: LoadProbe, core: dict[str, Any], machine: Machine) -> None:
    machine.with_driver(version="525.147.05")
    probe = load_probe(roots=replace(Roots(), node_proc=machine.roots.node_proc), doubles=None, **core)

    assert probe.config == ProbeConfig(
        nvidia_major=195, uvm_major=509, caps_major=507, driver_branch=525, agent_tgid=os.getpid()
    )


# ---- what goes wrong before anything is loaded ----


def test_no_headers_at_all(machine: Machine, tmp_path: Path) -> None:
    error = load_error(
        Request(
            loader="bcc",
            roots=machine.kernel_of_this_machine,
            bcc_paths=scripted_bcc(tmp_path, "Exception()"),
        )
    )

    assert error.code == "kernel_headers_missing"
    assert os.uname().release in str(error)


def test_headers_of_another_kernel_without_btf(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", release=RELEASE.replace("5.4", "5.14"))
    machine.with_headers(f"modules/{OTHER_RELEASE}/build")
    machine.write("sys/kernel/tracing/events/x", "")
    error = load_error(
        Request(loader="bcc", roots=machine.roots, bcc_paths=scripted_bcc(tmp_path, "Exception()"))
    )

    assert error.code == "kernel_headers_mismatch"
    assert OTHER_RELEASE in str(error)
    assert machine.root.joinpath("proc/sys/kernel/osrelease").read_text().strip() in str(error)


def test_a_kernel_that_is_locked_down(machine: Machine) -> None:
    machine.write("sys/kernel/security/lockdown", "none integrity [confidentiality]\n")

    assert load_error(Request(roots=machine.roots)).code == "kernel_lockdown"


def test_a_kernel_that_is_too_old(tmp_path: Path) -> None:
    assert load_error(Request(roots=Machine(tmp_path, release=RELEASE).roots)).code == "bpf_unsupported"


@pytest.mark.parametrize(
    ("dropped", "named"),
    [("-bpf,-sys_admin", "CAP_BPF"), ("-perfmon,-sys_admin", "CAP_PERFMON")],
)
def test_a_capability_that_is_missing_is_named(core: dict[str, Any], dropped: str, named: str) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")

    error = load_error(Request(**core), launcher=("setpriv", f"--bounding-set={dropped}"))

    assert error.code == "missing_capability"
    assert named in str(error)
    assert re.findall(r"CAP_\w+", str(error)) == [named]


def test_the_two_capabilities_are_enough_where_the_trace_file_system_is_mounted(
    load_probe: LoadProbe, loader: dict[str, Any], tmp_path: Path
) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed")
    script = tmp_path / "run"
    # In a mount namespace of its own, as a unit or a container would have it.
    script.write_text(
        "#!/bin/sh\nmount -t tracefs nodev /sys/kernel/tracing 2>/dev/null\n"
        'exec setpriv --bounding-set=-all,+bpf,+perfmon,+dac_read_search -- "$@"\n'
    )
    script.chmod(0o755)

    probe = load_probe(launcher=("unshare", "--mount", str(script)), **loader)

    assert probe.missing == {}


def test_without_the_trace_file_system_system_calls_cannot_be_traced(
    core: dict[str, Any], machine: Machine
) -> None:
    machine.write("sys/kernel/btf/vmlinux", "")

    error = load_error(Request(tier="syscalls", roots=replace(Roots(), sys=machine.roots.sys), **core))

    assert error.code == "tracefs_missing"


def test_what_cannot_be_attached_to_is_named_with_another_tier(
    loader: dict[str, Any], machine: Machine
) -> None:
    machine.write("sys/kernel/tracing/events/syscalls/sys_exit_ioctl/id", "0\n")
    Path(machine.roots.sys, "kernel/btf").symlink_to("/sys/kernel/btf")

    error = load_error(
        Request(tier="syscalls", doubles=DOUBLES, roots=replace(Roots(), sys=machine.roots.sys), **loader)
    )

    assert error.code == "attach_failed"
    assert "enter_ioctl: the kernel has no syscalls/sys_enter_ioctl" in str(error)
    assert "--probe-tier procfs" in str(error)


def test_a_nested_pid_namespace_is_reported(core: dict[str, Any]) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed")

    error = load_error(
        Request(**core), launcher=("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    )

    assert error.code == "pid_namespace"
    assert "hostPID" in str(error)


def test_tier_driver_is_rejected_where_the_kernel_has_no_kprobes(core: dict[str, Any]) -> None:
    if Path("/sys/bus/event_source/devices/kprobe").exists():
        pytest.skip("this kernel has kprobes")

    error = load_error(Request(tier="driver", **core))

    assert error.code == "tier_unavailable"
    assert "no kprobes" in str(error)


def test_auto_traces_system_calls_where_the_kernel_has_no_kprobes(
    load_probe: LoadProbe, core: dict[str, Any]
) -> None:
    if Path("/sys/bus/event_source/devices/kprobe").exists():
        pytest.skip("this kernel has kprobes")

    assert load_probe(tier="auto", doubles=None, **core).tier == "syscalls"


# ---- what goes wrong while loading ----


def test_neither_bcc_nor_an_object(tmp_path: Path) -> None:
    missing = str(tmp_path / "none.o")

    assert load_error(Request(loader="auto", bcc_paths=(), object_path=missing)).code == "bcc_missing"
    assert load_error(Request(loader="bcc", bcc_paths=())).code == "bcc_missing"
    assert load_error(Request(loader="core", object_path=missing)).code == "object_missing"


def test_a_module_bcc_that_cannot_be_imported(tmp_path: Path, machine: Machine) -> None:
    (tmp_path / "bcc").mkdir()
    (tmp_path / "bcc/__init__.py").write_text("raise OSError('libbcc.so.0: cannot open shared object file')")
    machine.with_headers("modules/6.1.0-9-amd64/build")

    error = load_error(
        Request(loader="bcc", bcc_paths=(str(tmp_path),), roots=machine.kernel_of_this_machine)
    )

    assert error.code == "bcc_missing"
    assert "libbcc.so.0" in str(error)


def test_a_compiler_failure_is_reported_in_one_line_and_not_repeated(
    tmp_path: Path, machine: Machine
) -> None:
    machine.with_headers("modules/6.1.0-9-amd64/build")
    output = "/virtual/main.c:3:1: note: here\n/virtual/main.c:4:2: error: unknown type name 'u33'\n"
    paths = scripted_bcc(tmp_path, "Exception('Failed to compile BPF module')", output=output, times=20_000)

    error = load_error(Request(loader="bcc", bcc_paths=paths, roots=machine.kernel_of_this_machine))

    assert error.code == "compile_failed"
    assert "unknown type name 'u33'" in str(error)
    assert "omitted" in str(error)
    assert 1000 < len(error.detail) <= MAX_DETAIL_BYTES
    assert compilations(tmp_path) == 1


def test_a_kernel_that_forbids_bpf_despite_the_capabilities(tmp_path: Path, machine: Machine) -> None:
    machine.with_headers("modules/6.1.0-9-amd64/build")
    paths = scripted_bcc(tmp_path, "PermissionError(1, 'Operation not permitted')")

    error = load_error(Request(loader="bcc", bcc_paths=paths, roots=machine.kernel_of_this_machine))

    assert error.code == "bpf_not_permitted"


def test_a_file_that_is_no_object(tmp_path: Path) -> None:
    broken = tmp_path / "gpu_probe.bpf.o"
    broken.write_bytes(b"no object")

    error = load_error(Request(loader="core", object_path=str(broken)))

    assert error.code == "object_missing"
    assert str(broken) in str(error)


def rebuilt(tmp_path: Path, file: str, old: str, new: str) -> str:
    """Return an object of changed source."""
    if shutil.which("clang") is None:
        pytest.skip("clang is not installed")
    source = tmp_path / "bpf"
    shutil.copytree(REPOSITORY / "bpf", source)
    text = (source / file).read_text()
    assert old in text
    (source / file).write_text(text.replace(old, new))
    subprocess.run(
        ["clang", "-O2", "-g", "-target", "bpf", "-c", source / "gpu_probe.bpf.c", "-o", tmp_path / "x.o"],
        check=True,
    )
    return str(tmp_path / "x.o")


def test_a_program_that_the_verifier_rejects_is_reported_in_one_line(
    object_path: Path, tmp_path: Path
) -> None:
    assert object_path.exists()
    path = rebuilt(tmp_path, "calls.h", "if (call.size > sizeof(block))", "if (call.size > 4096)")

    error = load_error(Request(loader="core", tier="syscalls", object_path=path))

    assert error.code == "verifier_refused"
    assert "invalid" in str(error)
    assert "exit_ioctl" in error.detail


def test_an_optional_program_that_fails_to_load_is_named(
    load_probe: LoadProbe, object_path: Path, tmp_path: Path
) -> None:
    assert object_path.exists()
    path = rebuilt(
        tmp_path,
        "gpu_probe.bpf.c",
        "bpf_seq_write(ctx->meta->seq,",
        "bpf_seq_write((struct seq_file *)ctx->task,",
    )

    probe = load_probe(loader="core", object_path=path)

    assert "bpf_iter__task_file" in probe.missing
    assert {"enter_ioctl", "exit_ioctl"} <= set(probe.attached)
    assert probe.scan().source == "procfs"


def test_an_object_of_another_version_is_not_read_wrongly(object_path: Path, tmp_path: Path) -> None:
    assert object_path.exists()
    shutil.copytree(REPOSITORY / "bpf", tmp_path / "bpf")
    header = tmp_path / "bpf/gpu_probe.h"
    header.write_text(
        header.read_text()
        .replace(
            "unsigned int tgid, rm_class, parent, gpu;", "unsigned int tgid, rm_class, parent, gpu, x, y;"
        )
        .replace("sizeof(struct gpu_object) == 56", "sizeof(struct gpu_object) == 64")
    )
    built = tmp_path / "old.o"
    source = tmp_path / "bpf/gpu_probe.bpf.c"
    subprocess.run(["clang", "-O2", "-g", "-target", "bpf", "-c", source, "-o", built], check=True)

    error = load_error(Request(loader="core", tier="syscalls", object_path=str(built)))

    assert error.code == "layout_mismatch"
    assert "make bpf" in str(error)


# ---- what goes wrong with the process ----


def test_a_loader_that_is_killed_is_reported_with_its_signal() -> None:
    error = load_error(Request(), launcher=("sh", "-c", "kill -9 $$"))

    assert error.code == "loader_killed"
    assert "SIGKILL" in str(error)


DIES_UNLESS_PRECOMPILED = """\
case "$*" in *'"loader": "core"'*) exec "$@";; *) kill -9 $$;; esac
"""


async def test_where_the_compiler_is_killed_the_precompiled_object_is_loaded(core: dict[str, Any]) -> None:
    request = replace(Request(doubles=DOUBLES, tier="syscalls", **core), loader="auto")

    probe = await load(request, launcher=("sh", "-c", DIES_UNLESS_PRECOMPILED, "sh"))

    assert probe.loader == "core"
    probe.close()


def test_a_loader_requested_by_name_is_the_only_one_used(core: dict[str, Any]) -> None:
    request = replace(Request(**core), loader="bcc")
    error = load_error(request, launcher=("sh", "-c", DIES_UNLESS_PRECOMPILED, "sh"))

    assert error.code == "loader_killed"


def test_a_loader_that_exits_without_an_answer_is_reported_with_its_last_line() -> None:
    error = load_error(Request(), launcher=("sh", "-c", "echo what went wrong >&2; exit 3"))

    assert error.code == "loader_failed"
    assert "exited with 3: what went wrong" in str(error)


def test_a_file_that_the_loader_cannot_write_is_not_the_verifiers_fault() -> None:
    failed = loader._failed(PermissionError(errno.EACCES, "Permission denied", "/tmp/headers"))
    assert failed.code == "loader_failed"
    assert "/tmp/headers" in str(failed)
    assert loader._failed(OSError(errno.EINVAL, "Invalid argument")).code == "verifier_refused"


def test_a_loader_that_cannot_be_started_is_reported() -> None:
    assert load_error(Request(), launcher=("/nonexistent/launcher",)).code == "loader_failed"


def test_a_loader_past_its_deadline_is_killed() -> None:
    error = load_error(Request(), launcher=("sh", "-c", "exec sleep 60"), deadline_s=0.2)

    assert error.code == "loader_timeout"


async def test_cancelling_kills_the_process() -> None:
    task = asyncio.get_running_loop().create_task(load(Request(), launcher=("sh", "-c", "exec sleep 60")))
    while not await asyncio.get_running_loop().run_in_executor(None, children_sleeping):
        await asyncio.sleep(0.01)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    while await asyncio.get_running_loop().run_in_executor(None, children_sleeping):
        await asyncio.sleep(0.01)


async def test_cancelling_leaves_no_directory() -> None:
    task = asyncio.get_running_loop().create_task(load(Request(), launcher=("sh", "-c", "exec sleep 60")))
    while not await asyncio.get_running_loop().run_in_executor(None, children_sleeping):
        await asyncio.sleep(0.01)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert scratch_directories() == set()


async def test_leftovers_of_a_killed_agent_are_removed() -> None:
    folder = Path(tempfile.gettempdir())
    (folder / "gpu-agent-probe-left/kheaders").mkdir(parents=True)
    (folder / "gpu-agent-probe-another").mkdir()
    (folder / "gpu-agent-probe-link").symlink_to(folder)
    descriptor = os.open(folder / "gpu-agent-probe-another", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)

        with pytest.raises(ProbeLoadError):
            await load(Request(), launcher=("false",))

        assert scratch_directories() == {"gpu-agent-probe-another", "gpu-agent-probe-link"}
    finally:
        os.close(descriptor)


def children_sleeping() -> bool:
    output = subprocess.run(["pgrep", "-P", str(os.getpid()), "sleep"], capture_output=True, check=False)
    return bool(output.stdout)


# ---- what the process has, and what is left of it ----

REPORTING_BCC = """
import ctypes, json, os, resource, tempfile
libc = ctypes.CDLL(None)
signal = ctypes.c_int()
libc.prctl(2, ctypes.byref(signal), 0, 0, 0)
reported = {
    "environment": dict(os.environ),
    "directory": os.getcwd(),
    "mask": os.umask(0o077),
    "files": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    "limits": [resource.getrlimit(limit)[0] for limit in (resource.RLIMIT_CORE, resource.RLIMIT_NOFILE)],
    "signal_at_end_of_parent": signal.value,
    "no_new_privileges": libc.prctl(39, 0, 0, 0, 0),
    "session": os.getsid(0) == os.getpid() == os.getpgid(0),
    "temporary": tempfile.gettempdir(),
    "mode": os.stat(tempfile.gettempdir()).st_mode & 0o777,
}
with open(os.path.join(os.path.dirname(__file__), "reported"), "w") as file:
    json.dump(reported, file)
raise ImportError
"""
WAITING_BCC = """
import os, time
with open(os.path.join(os.path.dirname(__file__), "here"), "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, file.name.replace("here", "waits"))
while True:
    time.sleep(60)
"""


def reporting_bcc(folder: Path, code: str) -> tuple[str, ...]:
    (folder / "bcc").mkdir()
    (folder / "bcc/__init__.py").write_text(code)
    return (str(folder),)


def test_the_process_has_nothing_of_the_agent_but_what_is_named(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.with_headers("modules/6.1.0-9-amd64/build")
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONSTARTUP", "BCC_SYMFS", "TMPDIR"):
        monkeypatch.setenv(name, "/nonexistent" if name != "LD_PRELOAD" else "")
    with (tmp_path / "inheritable").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        load_error(
            Request(
                loader="bcc",
                bcc_paths=reporting_bcc(tmp_path, REPORTING_BCC),
                roots=machine.kernel_of_this_machine,
            )
        )

    reported = json.loads((tmp_path / "bcc/reported").read_text())
    environment = reported.pop("environment")
    # The loader itself sets the directory of the headers for libbcc.
    assert environment.keys() <= {"PATH", "LC_ALL", "LC_CTYPE", "HOME", "TMPDIR", "BCC_KERNEL_SOURCE"}
    assert reported.pop("temporary") == environment["TMPDIR"] == environment["HOME"]
    assert environment["TMPDIR"].startswith(tempfile.gettempdir() + "/gpu-agent-probe-")
    # Standard files, the channel, and the directory that is being listed.
    assert len(reported.pop("files")) == 5
    assert reported == {
        "directory": "/",
        "mask": 0o077,
        "limits": [0, 256],
        "signal_at_end_of_parent": signal.SIGKILL,
        "no_new_privileges": 1,
        "session": True,
        "mode": 0o700,
    }


def test_processes_that_the_loader_started_are_killed_with_it(tmp_path: Path) -> None:
    script = f"sleep 1000 & echo $! > {tmp_path}/pid; exec sleep 1000"

    error = load_error(Request(), launcher=("sh", "-c", script), deadline_s=0.5)

    assert error.code == "loader_timeout"
    assert has_ended(int((tmp_path / "pid").read_text()))


def test_processes_left_running_after_an_answer_are_killed_too(core: dict[str, Any], tmp_path: Path) -> None:
    script = f'sleep 1000 & echo $! > {tmp_path}/pid; exec "$@"'
    request = Request(doubles=DOUBLES, tier="syscalls", **core)

    loaded(request, launcher=("sh", "-c", script, "sh")).close()

    assert has_ended(int((tmp_path / "pid").read_text()))


def test_the_process_dies_when_the_agent_is_killed(tmp_path: Path, machine: Machine) -> None:
    machine.with_headers("modules/6.1.0-9-amd64/build")
    paths = reporting_bcc(tmp_path, WAITING_BCC)
    agent = agent_that_loads(Request(loader="bcc", bcc_paths=paths, roots=machine.kernel_of_this_machine))
    while not (tmp_path / "bcc/waits").exists():
        time.sleep(0.01)

    agent.kill()
    agent.wait()

    # Would it live on, this would never end.
    while not has_ended(int((tmp_path / "bcc/waits").read_text())):
        time.sleep(0.01)


def test_a_process_that_starts_after_the_agent_was_killed_does_nothing(
    tmp_path: Path, machine: Machine
) -> None:
    machine.with_headers("modules/6.1.0-9-amd64/build")
    paths = reporting_bcc(tmp_path, WAITING_BCC)
    script = (
        f'echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; while kill -0 $0; do :; done; exec "$@"'
    )
    agent = agent_that_loads(
        Request(loader="bcc", bcc_paths=paths, roots=machine.kernel_of_this_machine),
        launcher=("sh", "-c", script),
    )
    while not (tmp_path / "pid").exists():
        time.sleep(0.01)

    agent.kill()
    agent.wait()

    while not has_ended(int((tmp_path / "pid").read_text())):
        time.sleep(0.01)
    assert not (tmp_path / "bcc/waits").exists()


def agent_that_loads(request: Request, launcher: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
    """Start a process that loads the probe; its own number is the last word of the launcher."""
    code = f"""
import asyncio, os
from agent.probe.loading import load
from agent.probe.request import Request
launcher = {launcher!r} and (*{launcher!r}, str(os.getpid()))
asyncio.run(load(Request.from_json({request.to_json()!r}), launcher=launcher))
"""
    return subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or a zombie; one that was killed is so a moment later."""
    until_s = time.monotonic() + 30.0
    try:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            if time.monotonic() >= until_s:
                return False
            time.sleep(0.01)
    except OSError:
        pass
    return True


def test_an_invalid_answer_is_reported() -> None:
    with pytest.raises(ProbeLoadError, match="sent an invalid answer"):
        read_reply(b"{")


# ---- what stays out of the agent ----


def test_neither_bcc_nor_llvm_nor_libbpf_is_ever_in_the_agent(loader: dict[str, Any]) -> None:
    code = f"""
import asyncio, sys
from agent.probe.loading import load
from agent.probe.request import Doubles, Request
probe = asyncio.run(load(Request(tier="syscalls", doubles=Doubles(nvidia_major=1), **{loader!r})))
probe.read_objects(); probe.scan(); probe.ring.read()
mapped = open("/proc/self/maps").read()
assert not [name for name in ("libbcc", "LLVM", "libclang", "libbpf", "libelf") if name in mapped], mapped
wrong = {{"bcc", "agent.probe.loader", "agent.probe.bcc_loader", "agent.probe.core_loader"}}
assert not wrong & sys.modules.keys()
print(probe.loader)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == loader["loader"]


def test_programs_and_maps_are_removed_when_the_agent_exits(loader: dict[str, Any]) -> None:
    code = f"""
import asyncio, os
from agent.probe import syscalls
from agent.probe.loading import load
from agent.probe.request import Doubles, Request
probe = asyncio.run(load(Request(tier="syscalls", doubles=Doubles(nvidia_major=1), **{loader!r})))
print(syscalls.map_info(probe.maps["objects"]).number, flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )

    assert done.returncode == -9
    # The kernel takes its time, and a probe that stayed would let this never end.
    while map_exists(int(done.stdout)):
        time.sleep(0.01)


def map_exists(number: int) -> bool:
    get_descriptor_by_number = 14
    try:
        os.close(syscalls.bpf(get_descriptor_by_number, struct.pack("=III", number, 0, 0)))
    except FileNotFoundError:
        return False
    return True


# ---- the words ----

VERIFIER_LOG = """\
libbpf: prog 'x': -- BEGIN PROG LOAD LOG --
5: (85) call bpf#4
R2 unbounded memory access
processed 9 insns (limit 1000000)
-- END PROG LOAD LOG --
libbpf: failed to load object
"""


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("", "no reason was given"),
        ("a.c:1: error: first\na.c:2: error: second\n", "a.c:1: error: first (1 line(s) omitted)"),
        (VERIFIER_LOG, "R2 unbounded memory access (5 line(s) omitted)"),
        ("libbpf: Error loading vmlinux BTF: -2\n", "libbpf: Error loading vmlinux BTF: -2"),
    ],
)
def test_one_line_of_many_is_reported(output: str, line: str) -> None:
    assert last_useful_line(output) == line


def test_a_request_arrives_as_it_was_sent() -> None:
    request = Request(
        loader="core",
        tier="driver",
        doubles=Doubles(filesystem=7),
        bcc_paths=("/a", "/b"),
        roots=Roots(sys="/s"),
    )

    assert Request.from_json(request.to_json()) == request
    assert Request.from_json(Request().to_json()) == Request()


def test_doubles_have_to_be_requested() -> None:
    assert Request().doubles is None
