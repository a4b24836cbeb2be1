"""What can be broken in the agent, and what is to come of it: the table that the suite is made of."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

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

Outcome = Literal["sick one out", "all out", "process ends"]
"""What the kubelet has of a node on which a GPU broke: all but that one, nothing, or no agent."""


@dataclass(frozen=True, slots=True)
class Case:
    """One part that can be broken."""

    fault: Literal["gpu lost", "xid", "kernel xid"] = "gpu lost"
    """The real fault that follows."""
    outcomes: dict[How, Outcome] = field(default_factory=dict)
    """Where it is not only the sick GPU that is out."""
    kubelet_restarts: bool = False
    """Whether the part does nothing before the kubelet connects anew."""
    unnamed: tuple[How, ...] = ()
    """Ways of which nothing is said, because nothing rests on the part: others do it, a little later."""


ALL_OUT: Final[dict[How, Outcome]] = {"raises always": "all out"}
ENDS: Final[dict[How, Outcome]] = {"raises always": "process ends"}

CASES: Final[dict[str, Case]] = {
    "task|cdi": Case(),
    "task|cdi directory": Case(unnamed=("hangs",)),
    "task|cdi files": Case(),
    "task|cdi snapshots": Case(unnamed=("hangs",)),
    "task|config-watch": Case(),
    "task|device lists": Case(outcomes=ENDS, unnamed=("hangs",)),
    "task|device-plugin": Case(outcomes=ENDS),
    "task|engine": Case("xid", ENDS),
    "task|eventlog": Case(),
    "task|evidence": Case(),
    "task|http": Case(),
    "task|kernel-log": Case("kernel xid"),
    "task|kubelet": Case(),
    "task|kubelet directory": Case(),
    "task|kubelet own sockets": Case(unnamed=("hangs",)),
    "task|list-and-watch": Case(outcomes=ALL_OUT),
    "task|nvml": Case(outcomes=ALL_OUT),
    "task|nvml-events": Case("xid", ALL_OUT, unnamed=("hangs",)),
    "task|nvml-gpu": Case(outcomes=ALL_OUT),
    "task|nvml-node": Case(outcomes=ALL_OUT),
    "task|pods": Case(),
    "task|probe": Case(),
    "task|statefile": Case(),
    "task|sysfs": Case(),
    "task|sysfs scans": Case(),
    "task|sysfs new nodes": Case(unnamed=("hangs",)),
    "thread|config-links": Case(),
    "thread|evidence-writer": Case(),
    "thread|kubelet-count": Case(),
    "thread|nvml": Case(outcomes=ALL_OUT),
    "thread|nvml-gpu-N": Case(outcomes=ALL_OUT),
    "thread|pods-list": Case(),
    "thread|statefile-writer": Case(),
    "thread|sysfs-scan": Case(),
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
    "task|http listeners": Case(),
    "task|kubelet-count": Case(),
    "thread|config-fingerprint": Case(),
    "thread|eventlog-writer": Case(),
    "thread|nvml-event-wait": Case("xid"),
    "thread|nvml-events": Case("xid"),
    "thread|probe-reader": Case(),
    "start|http-import": Case(),
    "start|config-watch-import": Case(),
    "start|probe-import": Case(),
    "start|leftover-sweeper": Case(),
    "start|kubelet-count-import": Case(),
    "callback|http-accept-control": Case(),
    "callback|http-read-control": Case(),
    "write|eventlog-writer": Case(),
    "callback|grpc-accept": Case(outcomes=ENDS, kubelet_restarts=True),
    "callback|inotify": Case(kubelet_restarts=True),
    "callback|journal": Case(),
    "callback|nvml-deadline": Case(),
}


OWNERS: Final = {
    "cdi directory": "cdi",
    "cdi files": "cdi",
    "config-links": "config-watch",
    "http listeners": "http",
    "config-fingerprint": "config-watch",
    "kubelet directory": "kubelet",
    "pods-list": "pods",
    "probe-reader": "probe",
    "sysfs-scan": "sysfs",
    "sysfs scans": "sysfs",
    "nvml-event-wait": "nvml-event",
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
        return self.case.outcomes.get(self.how, "sick one out")

    @property
    def owner(self) -> str:
        """What is named: the part, or the task it belongs to."""
        name = self.part.partition("|")[2].removesuffix("-N")
        return OWNERS.get(name, name.removesuffix("-writer").removesuffix("-import"))

    def __str__(self) -> str:
        """Return its name in the output of tests."""
        return f"{self.part} {self.how}".replace("|", " ").replace(" ", "-")


def rows(part: str) -> Iterator[Row]:
    """Yield the rows of a part."""
    for how in HOWS[part.partition("|")[0]]:
        yield Row(part, how, CASES[part])


def table() -> str:
    """Return the table as it stands in INJECTED.md."""
    lines = [
        "# What is broken, and what the kubelet has then",
        "",
        "Each row breaks one part of a running agent on a node with four GPUs, and then a GPU. The kubelet",
        "never gives that GPU to a pod; where others are out too, or the process ends, the row says so.",
        "The agent names the part in /readyz or in its log, but where nothing rests on it. Made by",
        "`python -m tests.faults.injected`; played by `make test ARGS=tests/faults/test_26_injected.py`.",
        "",
        "| part | how | then | the kubelet has | named |",
        "|---|---|---|---|---|",
    ]
    for part in CASES:
        for row in rows(part):
            kind, _, name = part.partition("|")
            named = "nothing rests on it" if row.how in row.case.unnamed else row.owner
            cells = (f"{kind} {name}", row.how, row.case.fault, row.outcome, named)
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
