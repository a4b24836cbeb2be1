"""The one-shot loader process: loads, attaches, sends descriptors over a socket, exits.

agent/probe/loading.py starts it. The compiler's memory is freed with the process; the
descriptors keep programs, maps and attachments alive in the agent.
"""

import ctypes
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from agent.errors import ProbeLoadError
from agent.probe import kernel, syscalls
from agent.probe.attach import Attachment, attach, tracefs
from agent.probe.layout import INDEX, SIZES
from agent.probe.loaded import Loaded, load_error, read_output
from agent.probe.programs import BY_NAME, Tier, of_tier
from agent.probe.request import Reply, Request, failure_message

_NEXT_LOADER: Final = frozenset(
    {"bcc_missing", "kernel_headers_missing", "kernel_headers_mismatch", "compile_failed"}
)
"""Errors after which a precompiled object may still load."""
_CLONE_NEWNS: Final = 0x00020000
_MS_REC_PRIVATE: Final = 0x4000 | 1 << 18
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NO_NEW_PRIVS: Final = 38
_LIMITS: Final = {
    resource.RLIMIT_CORE: 0,
    resource.RLIMIT_NOFILE: 256,
    resource.RLIMIT_FSIZE: 512 << 20,  # the kernel's own headers, unpacked, are a tenth of it
    resource.RLIMIT_MEMLOCK: resource.RLIM_INFINITY,  # kernels before 5.11 charge maps to it
}


def main(descriptor: str, request: str) -> None:
    """Load the probe and send the outcome; does not return."""
    channel = socket.socket(fileno=int(descriptor))
    _be_expendable(channel)
    try:
        reply, descriptors, _owner = _run(Request.from_json(request))
        socket.send_fds(channel, [reply.to_bytes()], descriptors)
    except ProbeLoadError as error:
        channel.send(failure_message(error))
    except OSError as error:
        channel.send(failure_message(_failed(error)))
    # No clean-up: bcc's would detach the programs.
    os._exit(0)


def _failed(error: OSError) -> ProbeLoadError:
    """Return the error for a system call that failed; only one without a file is bpf(2)."""
    if error.filename is None:
        return load_error(error.errno or 0, read_output())
    return ProbeLoadError(
        "loader_failed",
        f"The probe's loader failed: {error}; its whole output is in the log at --log-level debug",
    )


def _be_expendable(channel: socket.socket) -> None:
    """Exit with the agent, or before it when memory runs out; set the same limits everywhere."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # The agent sends nothing, so the channel is only readable if the agent exited before the prctl above.
    if select.select([channel], [], [], 0)[0]:
        os._exit(1)
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    for limit, value in _LIMITS.items():
        with suppress(OSError, ValueError):  # a limit that may not be raised stays
            resource.setrlimit(limit, (value, value))


def _run(request: Request) -> tuple[Reply, list[int], Loaded]:
    roots = request.roots
    kernel.check(roots)
    tier = kernel.choose_tier(request.tier, roots, doubles=request.doubles is not None)
    if tracefs(roots.sys) is None:
        _mount_tracefs(roots.sys)
    try:
        return _run_tier(request, tier)
    except ProbeLoadError as error:
        if tier != "driver" or request.tier != "auto":
            raise
        first = error
    try:
        reply, descriptors, owner = _run_tier(request, "syscalls")
    except ProbeLoadError:
        raise first from None
    return replace(reply, why_not_driver=str(first)), descriptors, owner


def _run_tier(request: Request, tier: Tier) -> tuple[Reply, list[int], Loaded]:
    roots = request.roots
    if tier == "syscalls":
        kernel.check_tracefs(roots)
    began = time.monotonic_ns()
    loaded = _load(request, tier)
    _check_layout(loaded.maps)
    syscalls.map_update(loaded.maps["config"], INDEX.pack(0), request.config().pack())
    loaded_at = time.monotonic_ns()
    wanted = of_tier(tier, traces=bool(request.trace_tgid))
    functions = kernel.entry_points(roots) if tier == "driver" else {}
    attachment = attach(wanted, loaded.programs, sys_root=roots.sys, functions=functions)
    _check_vital(attachment, tier, kernel.majors(roots).nvidia)
    attached_at = time.monotonic_ns()
    # Only these are attached again, after a reload of the driver; the links keep the others alive.
    again = {
        name: fd for name, fd in loaded.programs.items() if BY_NAME[name].kind in {"kprobe", "kretprobe"}
    }
    reply = Reply(
        loader=loaded.loader,
        tier=tier,
        headers=loaded.headers,
        maps=tuple(loaded.maps),
        programs=tuple(again),
        attached=tuple(attachment.attached),
        missing={**attachment.missing, **loaded.missing},
        load_ms=(loaded_at - began) // 1_000_000,
        attach_ms=(attached_at - loaded_at) // 1_000_000,
        entry_points=attachment.entry_points,
        why_not_driver="" if tier == "driver" else kernel.why_not_driver(roots) or "",
    )
    descriptors = [*loaded.maps.values(), *again.values(), *attachment.attached.values()]
    return reply, descriptors, loaded


def _mount_tracefs(sys_root: str) -> None:
    """Mount the trace file system in a private mount namespace; without the right to, skip it."""
    libc = ctypes.CDLL(None)
    target = f"{sys_root}/kernel/tracing".encode()
    if libc.unshare(_CLONE_NEWNS) == 0 and libc.mount(None, b"/", None, _MS_REC_PRIVATE, None) == 0:
        libc.mount(b"nodev", target, b"tracefs", 0, None)


def _load(request: Request, tier: Tier) -> Loaded:
    if request.loader == "core":
        return _load_precompiled(request, tier)
    # Imported here: the precompiled object saves their memory.
    from agent.probe import bcc_loader  # noqa: PLC0415

    try:
        return bcc_loader.load(request, tier)
    except ProbeLoadError as error:
        if request.loader == "bcc" or error.code not in _NEXT_LOADER:
            raise
        try:
            return _load_precompiled(request, tier)
        except ProbeLoadError as other:
            if other.code in {"object_missing", "libbpf_missing"}:
                why = f"{error}. The precompiled probe cannot be used either: {other}"
                raise ProbeLoadError(error.code, why) from None
            raise


def _load_precompiled(request: Request, tier: Tier) -> Loaded:
    from agent.probe import core_loader  # noqa: PLC0415 - as above

    return core_loader.load(request, tier)


def _check_layout(maps: dict[str, int]) -> None:
    """Reject an object built from another version of the header, rather than read it wrongly."""
    for name, (key_bytes, value_bytes) in SIZES.items():
        info = syscalls.map_info(maps[name])
        if (info.key_bytes, info.value_bytes) != (key_bytes, value_bytes):
            raise ProbeLoadError(
                "layout_mismatch",
                f"Map {name} of the precompiled probe has another layout than this version of the agent; "
                "rebuild it with make bpf",
            )


def _check_vital(attachment: Attachment, tier: Tier, nvidia_major: int) -> None:
    missing = [name for name in attachment.missing if BY_NAME[name].vital]
    # Programs for a driver that is not loaded yet are attached when it is.
    if not missing or (tier == "driver" and nvidia_major == 0):
        return
    reasons = ", ".join(f"{name}: {attachment.missing[name]}" for name in missing)
    other = "syscalls" if tier == "driver" else "procfs"
    raise ProbeLoadError(
        "attach_failed", f"The probe could not be attached ({reasons}); use --probe-tier {other}"
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
