"""The use of the GPUs as documents and as the tables of contexts, owners and status."""

import json
from typing import Any

import pytest

from agent.commands.contexts import context_lines, notes
from agent.commands.owners import owner_lines
from agent.commands.status import status_lines
from agent.model.facts import GpusEnumerated, ProbeSeen
from agent.model.ids import Placement
from agent.model.structs import replace
from agent.model.usage import GpuTotal, PodRef, ProbeView, ProcessUse, Usage
from agent.views import documents
from agent.views import usage as views
from agent.views.documents import probe as probe_document
from agent.views.documents import usage_summary
from tests.core.build import START_NS, U0, U1, Node, S, mig_gpu
from tests.core.use import POD_A, POD_B, allocated, hold, memory, node, orphan, process, seen, user

MIB = 2**20
NOW_NS = START_NS
RUNNING = ProbeView(
    "running",
    tier="syscalls",
    loader="core",
    attached=("enter_ioctl",),
    missing=(("exit_open", "the kernel has no syscalls/sys_exit_open"),),
    load_ms=84,
    attach_ms=3,
)


def time_of(at_ns: int) -> str:
    return f"at {at_ns // S} s"


def contexts_of(on: Node) -> dict[str, Any]:
    return as_json(views.contexts(on.snapshot(), time_of))


def owners_of(on: Node) -> dict[str, Any]:
    return as_json(views.ownership(on.snapshot(), time_of))


def as_json(document: object) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(json.dumps(document))
    return read


def in_use() -> Node:
    """Return a node with a pod's process with two contexts, a partial one, the agent and an orphan."""
    made = node()
    made.apply(
        ProbeSeen(RUNNING),
        allocated((U0, "ns1/job-a")),
        memory(user(4711, 512), used=600),
        memory(user(80, None), on=U1, used=0),
        seen(
            process(1, hold(U0, 0), hold(U1, 0), comm="gpu-agent", is_agent=True, partial=True),
            process(
                80,
                hold(U1, 1, freed=3),
                comm="dcgm-exporter",
                service="dcgm-exporter",
                partial=True,
                since_ns=80 * S,
            ),
            process(4711, hold(U0, 2), pod=POD_A, comm="train", since_ns=60 * S),
            orphans=[orphan(4000, 4711)],
            totals=(GpuTotal(U0, 2, 6), GpuTotal(U1, 2, 1)),
            at_ns=START_NS,
        ),
    )
    return made


def test_a_process_has_its_pod_its_contexts_and_its_memory() -> None:
    document = contexts_of(in_use())

    assert document["processes"][1] == {
        "pid": 4711,
        "start_ticks": 4711,
        "comm": "train",
        "state": "S",
        "killable": True,
        "owner": "pod",
        "pod": "ns1/job-a",
        "pod_uid": POD_A,
        "container_id": None,
        "cgroup": "/",
        "files": 3,
        "fds": 9,
        "partial": False,
        "contexts_unplaced": 0,
        "gpus": [
            {
                "gpu_uuid": U0,
                "gpu": 0,
                "fds": 5,
                "contexts": 2,
                "contexts_compute": None,
                "contexts_allocated": 2,
                "contexts_freed": 0,
                "memory_bytes": 512 * MIB,
                "slices": [],
            }
        ],
        "since": "at 60 s",
        "since_monotonic_ns": 60 * S,
        "exiting_since": None,
        "exiting_since_monotonic_ns": 0,
    }


def test_the_usage_summary_has_its_certainty() -> None:
    document = contexts_of(in_use())

    summary = {
        name: value for name, value in document.items() if name not in {"processes", "orphans", "probe"}
    }
    assert summary == {
        "apiVersion": "gpu-agent/v1",
        "complete": True,
        "incomplete_because": "",
        "certainty": "verified",
        "seen_by": "probe",
        "events_lost": 0,
        "evicted": 0,
        "seen": "at 90 s",
        "seen_monotonic_ns": START_NS,
        "gpus": [
            {"gpu_uuid": U0, "gpu": 0, "processes": 2, "contexts": 6},
            {"gpu_uuid": U1, "gpu": 1, "processes": 2, "contexts": 1},
        ],
    }


def test_an_orphan_has_its_holders() -> None:
    (left,) = contexts_of(in_use())["orphans"]

    assert {name: left[name] for name in ("gpu_uuid", "gpu", "clients", "contexts", "holders", "ended")} == {
        "gpu_uuid": U0,
        "gpu": 0,
        "clients": 1,
        "contexts": 4,
        "holders": [4711],
        "ended": "at 90 s",
    }
    assert {name: left["owner"][name] for name in ("pid", "comm", "pod", "state", "killable")} == {
        "pid": 4000,
        "comm": "train",
        "pod": "ns1/job-a",
        "state": "gone",
        "killable": False,
    }


def test_what_is_not_known_is_null() -> None:
    made = node()
    nothing = contexts_of(made)
    assert (nothing["complete"], nothing["processes"], nothing["probe"]) == (None, [], None)
    assert [(each["holders"], each["memory_used_bytes"]) for each in owners_of(made)["owners"]] == [
        (None, None)
    ] * 2

    made.apply(seen(process(4711, hold(U0, None), pod=POD_B), source="proc", totals=(GpuTotal(U0, 1, None),)))
    document = contexts_of(made)
    (use,) = document["processes"]
    assert (use["gpus"][0]["contexts"], use["gpus"][0]["memory_bytes"]) == (None, None)
    assert document["gpus"][0]["contexts"] is None


def test_a_gpu_has_its_allocation_and_its_holders() -> None:
    first = owners_of(in_use())["owners"][0]

    holders = first.pop("holders")
    assert first == {
        "uuid": U0,
        "gpu": 0,
        "gpu_uuid": U0,
        "gi": None,
        "ci": None,
        "given_to": [{"device": U0, "pod": "ns1/job-a"}],
        "memory_used_bytes": 600 * MIB,
        "memory_total_bytes": 80 * 1024 * MIB,
        "memory_unclaimed_bytes": 88 * MIB,
        "nvml_process_info": "ok",
    }
    assert [(each["pid"], each["is_agent"]) for each in holders] == [(1, True), (4711, False)]
    assert holders[1] == {
        "pid": 4711,
        "start_ticks": 4711,
        "comm": "train",
        "owner": "pod",
        "pod": "ns1/job-a",
        "state": "S",
        "contexts": 2,
        "memory_bytes": 512 * MIB,
        "service": False,
        "partial": False,
        "is_agent": False,
        "since": "at 60 s",
        "since_monotonic_ns": 60 * S,
    }


def test_a_process_that_only_nvml_reports_is_a_holder_of_unknown_owner() -> None:
    made = node()
    made.apply(memory(user(999, 100)))

    (holder,) = owners_of(made)["owners"][0]["holders"]
    assert (holder["pid"], holder["owner"], holder["comm"], holder["since"]) == (999, "unknown", "", None)


def test_a_pod_without_a_known_name_has_its_uid() -> None:
    made = node()
    unknown = "dddddddd-0000-4000-8000-000000000000"
    use = process(5)
    stranger = replace(use, status=replace(use.status, pod=PodRef(unknown, None, None)))  # type: ignore[arg-type]
    made.apply(seen(stranger))

    assert contexts_of(made)["processes"][0]["pod"] == unknown


def test_a_finding_has_no_number_as_an_xid_has() -> None:
    made = node()
    made.apply(seen(process(8), orphans=[orphan(7, 8, ended_ns=0)]))

    (condition,) = as_json(documents.conditions(made.snapshot(), time_of))["conditions"]
    assert (condition["code"], condition["number"]) == ("context_leak", None)


# ---- tables ----


def test_the_agent_has_every_gpu_open_and_is_in_no_form_of_contexts() -> None:
    document = contexts_of(in_use())

    assert [process["pid"] for process in document["processes"]] == [80, 4711]
    for is_wide in (False, True):
        lines = context_lines(document, now_ns=NOW_NS, is_wide=is_wide)
        assert not any("gpu-agent" in line for line in lines)


def test_the_table_of_contexts_has_a_row_for_each_gpu_of_a_process() -> None:
    assert context_lines(contexts_of(in_use()), now_ns=NOW_NS, is_wide=False) == [
        "PID   COMM           GPU  CONTEXTS  MEMORY     STATE  SINCE  POD",
        "80    dcgm-exporter  1    1+        <unknown>  S      10s    <none>",
        "4711  train          0    2         512MiB     S      30s    ns1/job-a",
        "",
        "Left by processes that exited:",
        "ENDED-PID  COMM   GPU  CONTEXTS  ENDED  HELD-BY  POD",
        "4000       train  0    4         0s     4711     ns1/job-a",
    ]


def test_some_of_many_holders_of_contexts_are_named() -> None:
    made = node()
    made.apply(seen(orphans=[orphan(4000, 5, 6, 7, 8, contexts=None)], at_ns=START_NS))

    lines = context_lines(contexts_of(made), now_ns=NOW_NS, is_wide=False)
    assert lines[-1].split() == ["4000", "train", "0", "<unknown>", "0s", "5,6,+2", "ns1/job-a"]
    wide = context_lines(contexts_of(made), now_ns=NOW_NS, is_wide=True)
    assert wide[-1].split()[5] == "5,6,7,8"


def test_the_wide_table_of_contexts_has_more_numbers() -> None:
    lines = context_lines(contexts_of(in_use()), now_ns=NOW_NS, is_wide=True)

    assert lines[0].split()[-4:] == ["FDS", "ALLOCATED", "FREED", "CGROUP"]
    assert [line.split()[0] for line in lines[1:3]] == ["80", "4711"]
    assert lines[1].split()[-4:] == ["9", "4", "3", "/"]


def test_the_table_of_owners_has_a_row_for_each_holder_but_the_agent() -> None:
    assert owner_lines(owners_of(in_use()), is_wide=False) == [
        "GPU  GIVEN-TO   HELD-BY         PID   CONTEXTS  MEMORY",
        "0    ns1/job-a  ns1/job-a       4711  2         512MiB",
        "1    <none>     host (service)  80    1+        <unknown>",
    ]


def test_a_gpu_that_only_the_agent_holds_has_no_holder() -> None:
    made = node()
    made.apply(seen(process(1, hold(U0, 0), is_agent=True)))

    assert owner_lines(owners_of(made), is_wide=False)[1].split() == ["0", *["<none>"] * 5]


def test_a_mig_device_is_named_by_its_instances() -> None:
    made = node()
    made.apply(GpusEnumerated((mig_gpu(0, (3, 0, "3g.40gb"), (5, 0, "3g.40gb")),)))
    made.apply(seen(process(7, hold(U0, 1, slices=(Placement(U0, 5, 0),)))))

    rows = [line.split()[:4] for line in owner_lines(owners_of(made), is_wide=False)[1:]]
    assert rows[:2] == [["0/gi3/ci0", "<none>", "<none>", "<none>"], ["0/gi5/ci0", "<none>", "host", "7"]]


LONG_POD = "a-rather-long-namespace/a-training-job-with-a-long-name-7d4b9c6f8-x2x9p"


def long_names() -> dict[str, Any]:
    """Return documents with the longest names."""
    made = in_use()
    document = {"contexts": contexts_of(made), "owners": owners_of(made)}
    text = json.dumps(document).replace("ns1/job-a", LONG_POD).replace('"train"', '"fifteen-letters"')
    read: dict[str, Any] = json.loads(text.replace("4711", "4194303"))
    return read


@pytest.mark.usefixtures("_on_a_terminal")
def test_tables_fit_a_terminal_whatever_pods_are_called() -> None:
    document = long_names()
    lines = [
        *context_lines(document["contexts"], now_ns=NOW_NS, is_wide=False),
        *owner_lines(document["owners"], is_wide=False),
    ]

    assert max(map(len, lines)) <= 80
    assert any("a-rather-lo…-x2x9p  a-rather-lo…-x2x9p  4194303" in line for line in lines)


def test_wide_tables_cut_no_name() -> None:
    document = long_names()

    assert LONG_POD in context_lines(document["contexts"], now_ns=NOW_NS, is_wide=True)[2]
    assert LONG_POD in owner_lines(document["owners"], is_wide=True)[2]


def test_the_notes_name_the_limits_of_the_table() -> None:
    made = node()
    assert list(notes(contexts_of(made))) == ["Nothing was read yet, or the probe is off (--probe-tier)"]

    made.apply(ProbeSeen(ProbeView("disabled", tier="procfs", code="kernel_lockdown", message="Locked down")))
    made.apply(seen(process(5, hold(U0, None)), source="proc"))
    assert list(notes(contexts_of(made))) == ["Contexts are unknown, only open files are known: Locked down"]

    document = contexts_of(in_use())
    assert list(notes(document)) == []
    assert list(notes(document | {"certainty": "unverified"})) == [
        "Contexts are inferred, of compute or graphics: not verified with CUDA on this driver version"
    ]
    assert list(notes(document | {"complete": False, "incomplete_because": "events were lost"})) == [
        "Incomplete: events were lost"
    ]


def test_the_tables_show_unknown_values_as_unknown() -> None:
    made = node()
    made.apply(seen(process(5, hold(U0, None)), unplaced(6), source="proc"))

    lines = context_lines(contexts_of(made), now_ns=NOW_NS, is_wide=False)
    assert lines[1].split()[2:5] == ["0", "<unknown>", "<unknown>"]
    assert lines[2].split()[2:5] == ["<none>", "<none>", "<none>"]


def unplaced(pid: int) -> ProcessUse:
    """Return a process that has the driver open, and no GPU."""
    return replace(process(pid), holds=())


# ---- status ----


def status_of(probe: ProbeView | None, usage: Usage | None = None) -> list[str]:
    lines = status_lines(
        {
            "agent": {"version": "1", "phase": "serving", "uptime_s": 5, "pid": 7},
            "driver": {"ready": None, "message": ""},
            "probe": None if probe is None else as_json(probe_document(probe)),
            "gpus": [],
            "ready": True,
            "reasons": [],
            "resources": [],
            "usage": usage_summary(usage),
        },
        now_ns=0,
    )
    return lines[2 : lines.index("GPUs     <none>")]


def test_the_status_shows_what_the_usage_data_lacks() -> None:
    assert status_of(None, None) == status_of(None, Usage(at_ns=0)) == []
    partly = Usage(at_ns=0, complete=False, incomplete_because="too much: 7", events_lost=3, evicted=40)
    assert status_of(None, partly) == [
        "         incomplete: too much: 7",
        "         so far 3 lost events and 40 evicted objects or files",
    ]
    assert status_of(None, Usage(at_ns=0, evicted=1)) == ["         so far 1 evicted object or file"]


@pytest.mark.parametrize(
    ("probe", "lines"),
    [
        (None, []),
        (ProbeView("loading"), ["Probe    being loaded"]),
        (
            RUNNING,
            [
                "Probe    tier syscalls, loader core",
                "         each system call costs 10 to 55 ns more, each ioctl 90 to 270, by CPU",
                "         exit_open is not attached: the kernel has no syscalls/sys_exit_open",
            ],
        ),
        (
            ProbeView("running", tier="driver", loader="bcc", headers="6.1.0-50-amd64"),
            [
                "Probe    tier driver, loader bcc, headers=6.1.0-50-amd64",
                "         only driver calls cost more",
            ],
        ),
        (
            ProbeView("disabled", tier="procfs", code="kernel_lockdown", message="Locked down"),
            [
                "Probe    off (kernel_lockdown): Locked down",
                "         The agent loads it at its start: restart it once that is fixed",
            ],
        ),
    ],
)
def test_the_status_shows_the_probe_and_its_overhead(probe: ProbeView | None, lines: list[str]) -> None:
    assert status_of(probe) == lines
