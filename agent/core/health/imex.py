"""IMEX channels: where one is required, no device can be used while the node does not have it.

Invariants: a channel that is missing marks every GPU and is nobody's fault on one, so it counts for no
flapping. Until the nodes were looked at nothing is known of a channel, and nothing is said of it.

Source: NVIDIA/k8s-device-plugin:internal/imex/imex.go, whose plugin does not start without a channel that
is required.
"""

from collections.abc import Collection, Iterable

from agent.core.allocation.injection import IMEX_NODE
from agent.core.health.conditions import Conditions
from agent.core.health.needs import with_need, without_need
from agent.model import facts
from agent.model.health import Reason
from agent.model.ids import GpuUuid
from agent.model.policy import Injection


def missing_channels(injection: Injection, control_nodes: Collection[str]) -> tuple[str, ...]:
    """Return the device nodes of channels that every container is to get and that do not exist."""
    wanted = injection.imex_channels if injection.imex_required else ()
    nodes = (f"{IMEX_NODE}{channel}" for channel in wanted)
    return tuple(node for node in nodes if node not in control_nodes)


def with_channels(
    active: Conditions,
    gpus: Iterable[GpuUuid],
    injection: Injection,
    control_nodes: Collection[str] | None,
    *,
    now_ns: int,
) -> Conditions:
    """Return the conditions with one on every GPU while a channel that is required is missing.

    ``control_nodes`` are those that exist; None: nobody looked yet.
    """
    if not injection.imex_required:
        return without_need(active, Reason.IMEX_CHANNEL_MISSING)
    if control_nodes is None:
        return active
    missing = missing_channels(injection, control_nodes)
    return with_need(
        active,
        Reason.IMEX_CHANNEL_MISSING,
        tuple(gpus),
        source=facts.NVML,
        missing=f"{', '.join(missing[:4])} does not exist and is required" if missing else None,
        now_ns=now_ns,
    )
