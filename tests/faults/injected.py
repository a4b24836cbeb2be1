"""What can be broken in the agent, and what is to come of it: the table that the suite is made of."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from agent.model import components, facts
from agent.model.ids import SourceName

How = Literal["ends", "raises once", "raises always", "hangs"]

HOWS: Final[dict[str, tuple[How, ...]]] = {
    "task": ("ends", "raises once", "raises always", "hangs"),
    "thread": ("ends", "raises once", "raises always", "hangs"),
    # One that hangs stops the loop, which is a case of its own: test_24_blocked_loop.
    "callback": ("raises once", "raises always"),
    "write": ("raises once", "raises always", "hangs"),
    "start": ("raises always", "hangs"),
}
"""Ways to break, by kind; ``start`` are threads that do one thing at the start."""

Outcome = Literal["one unhealthy", "all unhealthy", "process ends"]
"""What the kubelet has of a node on which a GPU broke: all but that one, nothing, or no agent."""

Needs = Literal["nothing", "cdi", "mps", "processes"]
"""What the part works on: CDI files, GPUs shared by MPS, or processes that the probe in the kernel sees."""

Loss = Literal["spec file", "control node", "plugin socket", "device node"]
"""What else is lost meanwhile, which the part alone would notice at once."""


class Cover(NamedTuple):
    """What does the work of a part that hangs and is never missed."""

    by: str
    """The part, and the period of it in which the loss is noticed."""
    loss: Loss
    voucher: SourceName
    """The row of the freshness table whose limit the notice keeps."""


@dataclass(frozen=True, slots=True)
class Case:
    """One part that can be broken."""

    fault: Literal["gpu lost", "xid", "kernel xid"] = "gpu lost"
    """The real fault that follows."""
    outcomes: dict[How, Outcome] = field(default_factory=dict)
    """Where not only the broken GPU is unhealthy."""
    kubelet_restarts: bool = False
    """Whether the part does nothing before the kubelet connects anew."""
    governor: SourceName | None = None
    """The row of the freshness table that bounds the kubelet's count; None: that of the fault's witness."""
    check: str | None = None
    """What /readyz names while the part raises or hangs; None: its owner; "": nothing, none rests on it."""
    raising: str | None = None
    """The same while it raises, where that is another."""
    is_mute: bool = False
    """Whether nothing is answered while the part raises or hangs: it is what answers."""
    cover: Cover | None = None
    """What covers a part that hangs without being named."""
    needs: Needs = "nothing"
    is_over_at_restart: bool = False
    """Whether what hangs does so once: the kubelet's count needs it."""
    stays: bool = False
    """Whether a hanging thread is waited for, as the kernel may keep it: a second one would hang too."""
    unlisted: tuple[How, ...] = ()
    """Ways that keep the kubelet from having anything, so that the GPU breaks when they are over."""


ALL_OUT: Final[dict[How, Outcome]] = {"raises always": "all unhealthy"}
ENDS: Final[dict[How, Outcome]] = {"raises always": "process ends"}

CASES: Final[dict[str, Case]] = {
    "task|cdi": Case(needs="cdi"),
    "task|cdi directory": Case(needs="cdi", cover=Cover("cdi files", "spec file", components.CDI)),
    "task|cdi files": Case(needs="cdi"),
    "task|cdi snapshots": Case(needs="cdi", cover=Cover("cdi files", "control node", components.CDI)),
    "thread|cdi-writer": Case(needs="cdi"),
    "write|cdi-writer": Case(needs="cdi"),
    "task|config-watch": Case(),
    "task|device lists": Case(outcomes=ENDS, governor=components.LIST_AND_WATCH, check="list-and-watch"),
    "task|device-plugin": Case(outcomes=ENDS, governor=components.LIST_AND_WATCH, check="list-and-watch"),
    "task|engine": Case("xid", ENDS, governor=components.ENGINE, check="event-loop", is_over_at_restart=True),
    "task|eventlog": Case(),
    "task|evidence": Case(),
    "task|http": Case(is_mute=True),
    "task|kernel-log": Case("kernel xid"),
    "task|kubelet": Case(),
    "task|kubelet directory": Case(),
    "task|kubelet own sockets": Case(cover=Cover("kubelet directory", "plugin socket", facts.KUBELET)),
    "task|list-and-watch": Case(
        outcomes=ALL_OUT,
        governor=components.LIST_AND_WATCH,
        check="list-and-watch",
        raising="kubelet-registered",
    ),
    "task|nvml": Case(outcomes=ALL_OUT),
    "task|nvml-events": Case("xid"),
    "task|nvml-gpu": Case(outcomes=ALL_OUT),
    "task|nvml-node": Case(outcomes=ALL_OUT),
    "task|pods": Case(),
    "task|probe": Case(),
    "task|statefile": Case(),
    "task|sysfs": Case(),
    "task|sysfs scans": Case(),
    "task|sysfs new nodes": Case(cover=Cover("sysfs scans", "device node", facts.SYSFS)),
    "thread|config-links": Case(),
    "thread|evidence-writer": Case(),
    "thread|kubelet-count": Case(),
    "thread|nvml": Case(outcomes=ALL_OUT),
    "thread|nvml-gpu-N": Case(outcomes=ALL_OUT),
    "thread|pods-list": Case(),
    "thread|statefile-writer": Case(),
    "thread|sysfs-scan": Case(stays=True),
    "start|eventlog-import": Case(),
    "start|evidence-import": Case(),
    "start|kernel-log-import": Case("kernel xid"),
    "start|pods-import": Case(),
    "start|statefile-import": Case(),
    "start|sysfs-import": Case(),
    "callback|kernel-log": Case("kernel xid"),
    "callback|nvml-completion": Case(outcomes=ALL_OUT),
    "callback|nvml-completions": Case(outcomes=ALL_OUT),
    "write|evidence-writer": Case(),
    "write|statefile-writer": Case(),
    "task|http listeners": Case(is_mute=True),
    "task|kubelet-count": Case(),
    "thread|config-fingerprint": Case(),
    "thread|eventlog-writer": Case(),
    "thread|nvml-event-wait": Case("xid"),
    "thread|nvml-events": Case("xid"),
    "thread|probe-reader": Case(),
    "start|http-import": Case(is_mute=True),
    "start|config-watch-import": Case(),
    "start|probe-import": Case(),
    "start|leftover-sweeper": Case(check="", unlisted=("hangs",)),
    "start|kubelet-count-import": Case(),
    "callback|http-accept-control": Case(is_mute=True),
    "callback|http-read-control": Case(is_mute=True),
    "write|eventlog-writer": Case(),
    "callback|grpc-accept": Case(outcomes=ENDS, kubelet_restarts=True, governor=components.LIST_AND_WATCH),
    # It stays broken where the test itself makes events: beside the configuration.
    "callback|inotify": Case(kubelet_restarts=True, check="config-watch"),
    "callback|journal": Case(check=""),
    "callback|nvml-deadline": Case(check="nvml"),
    "task|mps": Case(needs="mps"),
    "thread|mps-read": Case(needs="mps"),
    "start|probe-loader": Case(needs="processes"),
    "callback|probe-ring": Case(needs="processes"),
    "callback|process-end": Case(needs="processes"),
    "thread|process-ends": Case(needs="processes"),
}


OWNERS: Final = {
    "cdi directory": "cdi",
    "cdi files": "cdi",
    "cdi snapshots": "cdi",
    "config-links": "config-watch",
    "http listeners": "http",
    "config-fingerprint": "config-watch",
    "kubelet directory": "kubelet",
    "kubelet own sockets": "kubelet",
    "pods-list": "pods",
    "mps-read": "mps",
    "probe-loader": "probe",
    "probe-reader": "probe",
    "probe-ring": "probe",
    "process-end": "probe",
    "process-ends": "probe",
    "sysfs-scan": "sysfs",
    "sysfs scans": "sysfs",
    "sysfs new nodes": "sysfs",
    "nvml-event-wait": "nvml-events",
    "http-accept-control": "http",
    "http-read-control": "http",
    "grpc-accept": "device-plugin",
    "nvml-completion": "nvml",
    "nvml-completions": "nvml",
    "nvml-deadline": "nvml",
    "leftover-sweeper": "device-plugin",
}
"""The task of a part that has another name."""


class Row(NamedTuple):
    """One line of the table."""

    part: str
    how: How
    case: Case

    @property
    def outcome(self) -> Outcome:
        """What the kubelet is to have."""
        return self.case.outcomes.get(self.how, "one unhealthy")

    @property
    def owner(self) -> str:
        """What the log names: the part, or the task it belongs to."""
        name = self.part.partition("|")[2].removesuffix("-N")
        return OWNERS.get(name, name.removesuffix("-writer").removesuffix("-import"))

    @property
    def cover(self) -> Cover | None:
        """What does the work of the part, if there is such a part."""
        return self.case.cover if self.how == "hangs" else None

    @property
    def lasts(self) -> bool:
        """Whether the part stays broken until the test mends it, or for good."""
        return self.how in {"raises always", "hangs"}

    @property
    def asks_status(self) -> bool:
        """Whether ``gpu-agent status`` is run, which costs as much as the row: it is once for each part."""
        return self.how == ("hangs" if self.part.startswith("start") else "raises once")

    @property
    def check(self) -> str:
        """What a check of /readyz that fails while the part is broken is named after; "": none has to."""
        if not self.lasts or self.case.is_mute or self.cover or self.outcome == "process ends":
            return ""
        if self.how == "raises always" and self.case.raising is not None:
            return self.case.raising
        return self.owner if self.case.check is None else self.case.check

    @property
    def governor(self) -> SourceName:
        """The row of the freshness table whose limit the kubelet's count keeps."""
        if self.case.governor is not None:
            return self.case.governor
        return components.NVML_EVENTS if self.case.fault == "xid" else components.GPU_PROBER

    @property
    def codes(self) -> frozenset[str]:
        """The reasons of which /preflight gives one at least."""
        if self.outcome == "all unhealthy" and self.governor != components.LIST_AND_WATCH:
            return frozenset({"not_probed"})
        return frozenset({"xid" if self.case.fault == "xid" else "gpu_lost"})

    def __str__(self) -> str:
        """Return its name in the output of tests."""
        return f"{self.part} {self.how}".replace("|", " ").replace(" ", "-")


def rows(part: str) -> Iterator[Row]:
    """Yield the rows of a part."""
    for how in HOWS[part.partition("|")[0]]:
        yield Row(part, how, CASES[part])


def plays(part: str) -> Iterator[tuple[Row, ...]]:
    """Yield the rows of a part that one agent plays in turn: those after which it is whole again."""
    once = tuple(row for row in rows(part) if not row.lasts)
    if once:
        yield once
    for row in rows(part):
        if row.lasts:
            yield (row,)


def table() -> str:
    """Return the table as it stands in INJECTED.md."""
    lines = [
        "# What is broken, and what the agent reports of a broken GPU then",
        "",
        "Each row breaks one part of a running agent on a node with four GPUs, and then a GPU. The kubelet",
        "gives that GPU to no pod by the time the part under *within* is stale (three periods and its",
        "deadline, each poll up to a period late) and a probe has ended; where others are unhealthy too,",
        "or the process ends, the row shows it. `/preflight` and `gpu-agent status` give the reason. While",
        "the part is broken `/readyz` names it, and it is 200 again once the part is whole. The log names",
        "it too. Where another part does the same work that one is named, and what was lost meanwhile is",
        "noticed all the same. Made by `python -m tests.faults.injected`; played by `make test",
        "ARGS=tests/faults/test_26_injected.py`.",
        "",
        "| part | how | then | the kubelet has | within | /preflight | /readyz | named |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for part in CASES:
        for row in rows(part):
            kind, _, name = part.partition("|")
            lines.append(f"| {kind} {name} | {row.how} | {' | '.join(_cells(row))} |")
    return "\n".join(lines) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    fault, named = str(row.case.fault), row.owner
    if row.cover is not None:
        fault = f"{fault}, {row.cover.loss} lost"
        named = f"covered by {row.cover.by}"
    if row.outcome == "process ends":
        return fault, row.outcome, str(row.governor), "no answer", "no answer", named
    readyz = row.check or "200"
    if row.case.is_mute and row.lasts:
        readyz = "no answer"
    elif row.how == "hangs" and row.check and not row.case.stays:
        readyz = f"{row.check}, then 200"
    preflight = "no answer" if row.case.is_mute and row.how == "raises always" else ", ".join(row.codes)
    return fault, row.outcome, str(row.governor), preflight, readyz, named


if __name__ == "__main__":
    sys.stdout.write(table())
