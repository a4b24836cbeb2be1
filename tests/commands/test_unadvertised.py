"""The status shows a healthy GPU that is not advertised."""

from typing import Any

from agent.commands.status import status_lines
from agent.model.facts import GpusEnumerated
from agent.model.policy import Policy
from agent.views import documents
from tests.core.build import U1, gpu, mig_gpu, registered_node


def test_a_gpu_in_mig_mode_without_a_mig_device_is_named() -> None:
    node = registered_node(gpu(0), policy=Policy(mig_strategy="mixed"))
    node.apply(GpusEnumerated((gpu(0), mig_gpu(1))))
    document: dict[str, Any] = documents.state(node.snapshot(), str)
    assert document["unoffered"] == [
        {"gpu_uuid": U1, "message": "A GPU in MIG mode without a MIG device is not advertised", "detail": ""}
    ]
    agent = {"version": "1", "phase": "serving", "uptime_s": 5, "pid": 7}
    lines = status_lines(document | {"agent": agent}, now_ns=0)
    place = lines.index("         A GPU in MIG mode without a MIG device is not advertised")
    assert U1 in lines[place + 1]
