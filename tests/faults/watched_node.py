"""The NVML source and the core together, without a kubelet: from a driver's answer to a verdict."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from agent.bus import Inbox, Latest
from agent.core.freshness import Terms
from agent.core.health.snapshot import snapshot_of
from agent.core.health.state import initial_state
from agent.engine import Engine
from agent.model.facts import Fact
from agent.model.health import Health, Reason
from agent.model.ids import GpuUuid
from agent.model.policy import SECOND_NS, Policy
from agent.model.snapshot import Device, GpuView, Snapshot
from agent.proofs import Proofs
from agent.sources.nvml.source import NvmlSettings
from tests.sources.recorder import PATIENCE_S
from tests.sources.simulated import QUICK, Node, running_source

QUICK_RECOVERY = Policy(recovery_clean_probes=2, recovery_quiet_ns=0)


class Watched:
    """A node under watch, and every verdict on it."""

    def __init__(self, node: Node, latest: Latest[Snapshot], put: Callable[[Fact], None]) -> None:
        """``put`` puts a fact of another source into the inbox."""
        self.node = node
        self.put = put
        self._latest = latest
        self.ever_unhealthy: set[GpuUuid] = set()

    @property
    def resources(self) -> dict[str, tuple[Device, ...]]:
        """The devices of each resource."""
        return {str(each.name): each.devices for each in self._latest.value.resources}

    def note(self) -> None:
        """Note which devices are unhealthy now."""
        self.ever_unhealthy |= {uuid for uuid, health in self.health.items() if health is Health.UNHEALTHY}

    @property
    def gpus(self) -> tuple[GpuView, ...]:
        """Every GPU as the newest snapshot has it."""
        return self._latest.value.gpus

    @property
    def health(self) -> dict[GpuUuid, Health]:
        return {view.gpu.uuid: view.health for view in self._latest.value.gpus}

    def indexes(self) -> dict[GpuUuid, int]:
        """Return NVML's index of each GPU that is not lost."""
        healthy = {uuid for uuid, health in self.health.items() if health is Health.HEALTHY}
        return {view.gpu.uuid: view.gpu.index for view in self._latest.value.gpus if view.gpu.uuid in healthy}

    def reasons(self, gpu: int) -> set[Reason]:
        """Return the reasons on a GPU, by its slot."""
        wanted = self.node.uuid(gpu)
        views = [view for view in self._latest.value.gpus if view.gpu.uuid == wanted]
        return {condition.reason for view in views for condition in view.conditions}

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return once a condition on the newest verdicts holds."""
        version = self._latest.version
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    version = await self._latest.wait_newer(version)
        except TimeoutError:
            raise AssertionError(f"still not so: {self.health}, {self._latest.value.durable}") from None

    async def until_unhealthy(self, *gpus: int) -> None:
        """Return once exactly these GPUs are Unhealthy and all the others Healthy."""
        broken = {self.node.uuid(gpu) for gpu in gpus}
        wanted = {uuid: Health.UNHEALTHY if uuid in broken else Health.HEALTHY for uuid in self.node.uuids()}
        await self.until(lambda: self.health == wanted)


@asynccontextmanager
async def watched_node(
    directory: Path,
    hardware: str | dict[str, object],
    settings: NvmlSettings = QUICK,
    policy: Policy = QUICK_RECOVERY,
) -> AsyncIterator[Watched]:
    """Watch a simulated node; at the start every GPU is Healthy."""
    inbox: Inbox[Fact] = Inbox(clock=time.monotonic_ns)
    state = initial_state(policy, None, now_ns=time.monotonic_ns())
    latest = Latest(snapshot_of(state))
    node = Node.make(directory, hardware)
    watched = Watched(node, latest, inbox.put)
    engine = Engine(
        inbox=inbox,
        state=state,
        latest=latest,
        perform=lambda _effect: None,
        after_step=lambda _now_ns: watched.note(),
        clock=time.monotonic_ns,
        proofs=Proofs(clock=time.monotonic_ns),
        probe_terms=Terms(10 * SECOND_NS, 5 * SECOND_NS),
    )
    try:
        async with running_source(node, inbox, settings), asyncio.TaskGroup() as group:
            task = group.create_task(engine.run(), name="engine")
            await watched.until_unhealthy()
            watched.ever_unhealthy.clear()
            yield watched
            task.cancel()
    finally:
        node.close()
    inbox.close()
