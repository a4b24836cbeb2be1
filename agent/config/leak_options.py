"""The options on leaks: when a holder of a GPU is a finding, and whether it makes a free GPU Unhealthy."""

from typing import Final

from agent.config.option import Option, ours
from agent.config.values import choice, duration, integer, names, size
from agent.model.policy import MEBIBYTE, SECOND_NS, Policy

_POLICY: Final = Policy().leaks
_LONGEST: Final = "240h"


def _lasting(name: str, field: str, text: str, file_key: str) -> Option:
    """Return an option that is a minimum duration, for a field of LeakPolicy."""
    return ours(
        f"leak-{name}",
        f"{getattr(_POLICY, field) // SECOND_NS}s",
        duration("0s", _LONGEST),
        "TIME",
        text,
        file_key=f"agent.leak.{file_key}",
        fills=f"policy.leaks.{field}",
    )


def _count(name: str, field: str, text: str, file_key: str, *, least: int = 1, most: int = 100_000) -> Option:
    """Return an option that is a numeric threshold, for a field of LeakPolicy."""
    return ours(
        f"leak-{name}",
        f"{getattr(_POLICY, field)}",
        integer(least, most),
        "N",
        text,
        file_key=f"agent.leak.{file_key}",
        fills=f"policy.leaks.{field}",
    )


LEAK_OPTIONS: Final = (
    ours(
        "leak-policy",
        _POLICY.effect,
        choice("warn", "unhealthy-when-free"),
        "POLICY",
        "Effect of a certain leak: warn, or make a GPU Unhealthy that no pod has (unhealthy-when-free), at"
        " most one of the node in --soft-flip-every",
        file_key="agent.leak.policy",
        fills="policy.leaks.effect",
    ),
    ours(
        "leak-allow",
        ",".join(sorted(_POLICY.allowed)),
        names,
        "NAMES",
        "System services and executables of root that are never reported; the list replaces the default",
        file_key="agent.leak.allow",
        is_list=True,
        empty_means="none but the agent itself",
        fills="policy.leaks.allowed",
    ),
    ours(
        "leak-servers",
        ",".join(sorted(_POLICY.servers)),
        names,
        "NAMES",
        "The same for servers that use GPUs for others: they may grow and belong to no pod",
        file_key="agent.leak.servers",
        is_list=True,
        empty_means="none",
        fills="policy.leaks.servers",
    ),
    ours(
        "leak-namespaces",
        ",".join(sorted(_POLICY.namespaces)),
        names,
        "NAMES",
        "Namespaces of administrators only; in their pods both lists match names of processes",
        file_key="agent.leak.namespaces",
        is_list=True,
        empty_means="none",
        fills="policy.leaks.namespaces",
    ),
    _lasting(
        "orphaned-client",
        "orphaned_client_ns",
        "How long others may keep contexts of a process that exited",
        "orphanedClient",
    ),
    _lasting("pod-gone", "pod_gone_ns", "How long a process may hold a GPU after its pod is gone", "podGone"),
    _lasting("stuck-exit", "stuck_exit_ns", "How long an exiting process may hold a GPU", "stuckExit"),
    _lasting(
        "foreign-process",
        "foreign_process_ns",
        "How long a process may use a GPU that is not allocated to it",
        "foreignProcess",
    ),
    _lasting(
        "memory-held",
        "memory_held_ns",
        "How long memory may be used that belongs to no process",
        "memoryHeld.time",
    ),
    ours(
        "leak-memory-size",
        f"{_POLICY.memory_held_bytes // MEBIBYTE}MiB",
        size("1MiB", "1024GiB"),
        "SIZE",
        "Less such memory is not reported",
        file_key="agent.leak.memoryHeld.size",
        fills="policy.leaks.memory_held_bytes",
    ),
    _count(
        "memory-percent",
        "memory_held_percent",
        "The same as a share of the GPU's memory; the larger of both counts",
        "memoryHeld.percent",
        least=0,
        most=100,
    ),
    _lasting("idle", "idle_ns", "How long a pod may have a device that no process opens", "idle"),
    _count(
        "many-contexts",
        "contexts_many",
        "Report a process with more contexts on one GPU",
        "manyContexts",
    ),
    ours(
        "leak-growth-window",
        f"{_POLICY.growth_window_ns // SECOND_NS}s",
        duration("1s", _LONGEST),
        "TIME",
        "The time in which the contexts of a process may grow",
        file_key="agent.leak.growth.window",
        fills="policy.leaks.growth_window_ns",
    ),
    _lasting(
        "growth-warm-up",
        "growth_warm_up_ns",
        "How long a process may initialise before it is watched for growth",
        "growth.warmUp",
    ),
    _count(
        "growth-min-live",
        "growth_min_live",
        "A process with fewer contexts on a GPU does not leak",
        "growth.minLive",
    ),
    _count(
        "growth-min-new",
        "growth_min_new",
        "Nor does one with fewer new contexts in the window",
        "growth.minNew",
    ),
    _count(
        "growth-freed-percent",
        "growth_freed_percent",
        "Nor does one that freed more than this share of the contexts it created in the window",
        "growth.freedPercent",
        least=0,
        most=100,
    ),
    _count(
        "growth-critical-live",
        "growth_critical_live",
        "Growth to so many contexts is critical at once",
        "growth.criticalLive",
    ),
    _count(
        "growth-fds",
        "growth_fds",
        "So many new descriptors in the window are growth where contexts are unknown",
        "growth.fds",
    ),
)
