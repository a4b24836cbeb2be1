"""The lines of the status below a reason's message: GPUs and processes."""

from typing import Any

from agent.commands.status import MAX_PROCESSES, involved_processes, places

GPUS: list[dict[str, Any]] = [
    {"uuid": "GPU-a", "index": 0, "pci": "0000:1b:00.0", "present": True},
    {"uuid": "GPU-b", "index": 1, "pci": "0000:43:00.0", "present": True},
    {"uuid": "GPU-c", "index": None, "pci": "0000:61:00.0", "present": False},
]


def test_a_gpu_is_named_by_index_address_and_uuid() -> None:
    assert list(places(["GPU-b"], GPUS)) == ["on GPU 1 at 0000:43:00.0 (GPU-b)"]


def test_a_lost_gpu_has_no_index() -> None:
    assert list(places(["GPU-c", "GPU-a"], GPUS)) == [
        "on 0000:61:00.0 (GPU-c)",
        "on GPU 0 at 0000:1b:00.0 (GPU-a)",
    ]


def test_a_reason_of_every_gpu_takes_one_line() -> None:
    assert list(places(["GPU-a", "GPU-b", "GPU-c"], GPUS)) == ["on all 3 GPUs"]
    assert list(places(["GPU-a"], GPUS[:1])) == ["on GPU 0 at 0000:1b:00.0 (GPU-a)"]


def test_a_gpu_that_is_not_listed_keeps_its_uuid() -> None:
    assert list(places(["GPU-z"], GPUS)) == ["on GPU-z"]


LEAK = {"code": "context_leak", "message": "Kept; and more"}


def involved(pid: int, **more: Any) -> dict[str, Any]:
    return {
        "pid": pid,
        "comm": "train",
        "owner": "host",
        "pod": None,
        "state": "S",
        "killable": True,
        "contexts": 1,
        "used_bytes": 2**30,
        "role": "holder",
        **more,
    }


def finding(*found: dict[str, Any], lasts: bool = True, more: int = 0) -> dict[str, Any]:
    details = {"culprits": list(found), "more": more}
    return {"code": "context_leak", "message": "Kept", "lasts": lasts, "details": details}


def test_processes_have_what_an_operator_needs_to_act() -> None:
    owner = involved(
        7, role="owner", pod="ml/a", owner="pod", state="R", killable=False, contexts=4, used_bytes=None
    )
    child = involved(8, pod="ml/a", owner="pod", contexts=0, used_bytes=None)
    stuck = involved(9, state="D", killable=False, contexts=None)
    assert list(involved_processes(LEAK, [finding(owner, child), finding(stuck)])) == [
        "pid 7 (train), ml/a, exited, contexts: 4",
        "pid 8 (train), ml/a",
        "pid 9 (train), host, contexts: <unknown>, 1024MiB, cannot be killed now (state D)",
    ]


def test_some_of_many_processes_are_named_and_the_rest_counted() -> None:
    lines = list(involved_processes(LEAK, [finding(*map(involved, range(1, 7)), more=3)]))
    assert len(lines) == MAX_PROCESSES + 1
    assert lines[-1] == "and 5 more"


def test_a_finding_that_clears_names_no_process() -> None:
    assert list(involved_processes(LEAK, [finding(involved(7), lasts=False)])) == [
        "no longer observed; clears after clean probes and a quiet time"
    ]
    assert not list(involved_processes(LEAK | {"message": "Of another GPU"}, [finding(involved(7))]))
    assert not list(involved_processes(LEAK | {"code": "foreign_process"}, [finding(involved(7))]))
