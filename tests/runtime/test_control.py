"""Commands of operators: each is checked, applied by the core, and answered with its outcome."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.bus import Inbox, Latest
from agent.core.freshness import Terms
from agent.core.health.commands import MAX_HOLDS
from agent.core.health.snapshot import snapshot_of
from agent.engine import Engine
from agent.errors import AgentError, UsageError
from agent.model.effects import Effect, ReleaseDriver, ResumeDriver
from agent.model.facts import OPERATOR, DriverReleased, Fact, HoldRequested
from agent.model.health import Health
from agent.model.ids import GpuUuid
from agent.model.policy import SECOND_NS
from agent.model.snapshot import Snapshot
from agent.proofs import Proofs
from agent.runtime.control import Control, NotExecutedError
from tests.core.build import U0, U1, U2, U3, gpu, registered_node, uuid, xid
from tests.sources.recorder import PATIENCE_S


@dataclass
class Made:
    """A bundle."""

    document: dict[str, object] = field(default_factory=lambda: {"gpu": {}})
    path: str | None = "/x/1.json"
    trouble: str | None = None


class Agent:
    """A node of four GPUs under an engine, and the commands for it."""

    def __init__(
        self,
        *,
        lets_go: bool = True,
        executed_within_s: float = PATIENCE_S,
        emit: Callable[[Fact], None] | None = None,
    ) -> None:
        state = registered_node(*(gpu(number) for number in range(4))).state
        self.inbox: Inbox[Fact] = Inbox(clock=time.monotonic_ns)
        self.latest: Latest[Snapshot] = Latest(snapshot_of(state))
        self.done: list[Effect] = []
        self.made: Made | None = Made()
        self.releases = lets_go
        self.engine = Engine(
            inbox=self.inbox,
            state=state,
            latest=self.latest,
            perform=self._perform,
            after_step=lambda _: None,
            clock=time.monotonic_ns,
            proofs=Proofs(clock=time.monotonic_ns),
            probe_terms=Terms(10 * SECOND_NS, 5 * SECOND_NS),
        )
        self.control = Control(
            emit=self.inbox.put if emit is None else emit,
            latest=self.latest,
            make_bundle=self._make_bundle,
            time_of=lambda at_ns: f"t+{at_ns}",
            why_not_kept=self._why_not_kept,
            executed_within_s=executed_within_s,
        )
        self.not_kept: str | None = None

    async def _why_not_kept(self) -> str | None:
        return self.not_kept

    def _perform(self, effect: Effect) -> None:
        self.done.append(effect)
        if isinstance(effect, ReleaseDriver) and self.releases:
            self.inbox.put(DriverReleased())

    async def _make_bundle(self, _gpu: GpuUuid) -> Made | None:
        return self.made

    async def execute(self, name: str, **command: object) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            return await self.control.execute(
                name, {key.rstrip("_"): value for key, value in command.items()}
            )

    async def emit(self, *facts: Fact) -> None:
        """Emit facts and wait until they are applied."""
        version = self.latest.version
        for fact in facts:
            self.inbox.put(fact)
        await self.latest.wait_newer(version)

    def health(self) -> dict[GpuUuid, Health]:
        return {view.gpu.uuid: view.health for view in self.latest.value.gpus}

    def unhealthy(self) -> set[GpuUuid]:
        return {gpu for gpu, health in self.health().items() if health is not Health.HEALTHY}


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    made = Agent()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(made.engine.run(), name="engine")
        yield made
        task.cancel()
    made.inbox.close()


# Hold and unhold


async def test_a_hold_is_answered_when_the_gpu_is_out(agent: Agent) -> None:
    answer = await agent.execute("hold", selector="3", why=" noisy fan ")
    assert answer == {
        "apiVersion": "gpu-agent/v1",
        "order": "hold",
        "message": f"GPU 3 ({U3}) is held: noisy fan",
        "selector": U3,
        "gpu_uuid": U3,
        "why": "noisy fan",
    }
    assert agent.unhealthy() == {U3}


async def test_the_answer_reports_a_hold_that_a_restart_would_not_know(agent: Agent) -> None:
    agent.not_kept = "No space left on device"
    why = "since it could not be written to the state file: No space left on device)"
    answer = await agent.execute("hold", selector="3", why="noisy fan")
    assert answer["message"] == f"GPU 3 ({U3}) is held: noisy fan (this ends with the agent, {why}"
    answer = await agent.execute("unhold", selector="3")
    assert answer["message"] == f"GPU 3 ({U3}) is held no more (this counts until a restart, {why}"


async def test_a_hold_by_address_names_the_slot(agent: Agent) -> None:
    answer = await agent.execute("hold", selector="00000000:13:00", why="slot under test")
    assert (answer["selector"], answer["gpu_uuid"]) == ("0000:13:00.0", U3)
    assert agent.unhealthy() == {U3}
    await agent.execute("unhold", selector="3")
    assert agent.unhealthy() == set()


async def test_a_new_reason_takes_the_place_of_the_old_one(agent: Agent) -> None:
    await agent.execute("hold", selector="3", why="one")
    await agent.execute("hold", selector="3", why="two")
    assert agent.latest.value.holds == {U3: "two"}


async def test_a_gpu_that_is_not_there_is_held_only_where_that_is_meant(agent: Agent) -> None:
    absent = uuid(9)
    with pytest.raises(UsageError, match=r"is no GPU of this node now; .* --even-if-absent"):
        await agent.execute("hold", selector=absent, why="x")
    answer = await agent.execute("hold", selector=absent, why="x", even_if_absent=True)
    assert answer["message"] == f"{absent} is not there now and will be held when it appears: x"
    assert agent.latest.value.holds == {absent: "x"}
    await agent.execute("unhold", selector=absent)
    assert agent.latest.value.holds == {}


async def test_what_is_no_name_is_not_held_even_if_absent(agent: Agent) -> None:
    with pytest.raises(UsageError, match="No GPU is named"):
        await agent.execute("hold", selector="card 7", why="x", even_if_absent=True)


@pytest.mark.parametrize("why", [None, "", "  ", "x" * 201, "two\nlines", "\x1b[31m", 7])
async def test_a_hold_needs_a_reason_that_can_be_shown(agent: Agent, why: object) -> None:
    with pytest.raises(UsageError, match="A hold needs a reason"):
        await agent.execute("hold", selector="3", why=why)
    assert agent.unhealthy() == set()


async def test_holds_are_bounded(agent: Agent) -> None:
    await agent.emit(*(HoldRequested(uuid(100 + number), "x") for number in range(MAX_HOLDS)))
    with pytest.raises(AgentError, match="end one with gpu-agent unhold"):
        await agent.execute("hold", selector="3", why="one too many")


async def test_what_is_not_held_cannot_be_given_back(agent: Agent) -> None:
    with pytest.raises(UsageError, match=r"GPU 3 \(.*\) is not held"):
        await agent.execute("unhold", selector="3")


# Recover


async def test_recover_shows_what_ended_and_what_stays_and_why(agent: Agent) -> None:
    await agent.emit(xid(79, U2), xid(48, U2))
    await agent.execute("hold", selector="2", why="x")
    answer = await agent.execute("recover", gpu="2")
    assert answer["message"] == f"GPU 2 ({U2}) is still Unhealthy: conditions ended: 2, staying: 1"
    assert [each["number"] for each in answer["cleared"]] == [79, 48]
    (stays,) = answer["staying"]
    assert (stays["code"], stays["stays_because"]) == ("held", "a hold ends with gpu-agent unhold")
    assert not answer["well"]


async def test_after_recover_a_gpu_is_advertised_again(agent: Agent) -> None:
    await agent.emit(xid(64, U2))
    assert agent.unhealthy() == {U2}
    answer = await agent.execute("recover", gpu=U2)
    assert (answer["well"], answer["staying"]) == (True, [])
    assert agent.unhealthy() == set()


async def test_a_well_gpu_can_be_declared_well(agent: Agent) -> None:
    assert (await agent.execute("recover", gpu="1"))["well"]


# Release and resume


async def test_a_release_is_answered_when_the_driver_is_let_go_of(agent: Agent) -> None:
    answer = await agent.execute("release", gpus=["1", "2"], for_="10m", wait_s=30)
    assert answer["driver_released"]
    assert answer["gpus"] == [U1, U2]
    assert answer["message"] == "The driver is released: no file of it is open"
    assert agent.unhealthy() == {U1, U2}
    assert [type(effect) for effect in agent.done if isinstance(effect, ReleaseDriver)] == [ReleaseDriver]


async def test_a_release_of_all_is_of_every_gpu(agent: Agent) -> None:
    await agent.execute("release", gpus="all", for_="1s", wait_s=0)
    assert agent.unhealthy() == {U0, U1, U2, U3}


async def test_a_driver_that_is_not_released_is_reported(agent: Agent) -> None:
    agent.releases = False
    answer = await agent.execute("release", gpus="all", for_="10m", wait_s=0.05)
    assert not answer["driver_released"]
    assert "a call is under way in it" in answer["message"]


async def test_a_second_release_lets_go_anew(agent: Agent) -> None:
    await agent.execute("release", gpus="all", for_="10m", wait_s=30)
    await agent.execute("resume")
    agent.releases = False
    assert not (await agent.execute("release", gpus="all", for_="10m"))["driver_released"]


async def test_resume_ends_a_release(agent: Agent) -> None:
    await agent.execute("release", gpus=["0"], for_="10m")
    await agent.execute("resume")
    # Answered when it is applied; the effect is performed a moment later.
    async with asyncio.timeout(60):
        while not any(isinstance(effect, ResumeDriver) for effect in agent.done):
            await asyncio.sleep(0)
    with pytest.raises(UsageError, match="nothing to resume"):
        await agent.execute("resume")


@pytest.mark.parametrize("for_", [None, "", "0s", "24h1s", "10", 10, "soon", "9" * 400 + "h"])
async def test_a_release_is_bounded_in_time(agent: Agent, for_: object) -> None:
    with pytest.raises(UsageError, match='between "1s" and "24h"'):
        await agent.execute("release", gpus="all", for_=for_)


@pytest.mark.parametrize("gpus", [None, [], "0", [0], ["0"] * 65, {"0": 1}])
async def test_a_release_names_its_gpus(agent: Agent, gpus: object) -> None:
    with pytest.raises(UsageError, match='"gpus" must'):
        await agent.execute("release", gpus=gpus, for_="1m")


@pytest.mark.parametrize("wait_s", [-1, 46, "1", True, None])
async def test_a_wait_is_bounded(agent: Agent, wait_s: object) -> None:
    with pytest.raises(UsageError, match='"wait_s" must be'):
        await agent.execute("release", gpus="all", for_="1m", wait_s=wait_s)


# Bundle


async def test_a_bundle_is_answered_with_where_it_is(agent: Agent) -> None:
    answer = await agent.execute("bundle", gpu="0")
    assert (answer["message"], answer["path"], answer["bundle"]) == ("/x/1.json", "/x/1.json", {"gpu": {}})


async def test_a_bundle_that_the_disk_rejected_is_answered_all_the_same(agent: Agent) -> None:
    agent.made = Made(path=None, trouble="No space left on device")
    answer = await agent.execute("bundle", gpu="0")
    assert answer["message"] == "The bundle could not be kept: No space left on device"
    assert answer["bundle"] == {"gpu": {}}


async def test_a_gpu_that_has_just_gone_has_no_bundle(agent: Agent) -> None:
    agent.made = None
    with pytest.raises(UsageError, match="is not known any more"):
        await agent.execute("bundle", gpu="0")


# Any command


@pytest.mark.parametrize("command", [None, [], "hold", 3])
async def test_a_command_is_an_object(agent: Agent, command: object) -> None:
    with pytest.raises(UsageError, match="A command is a JSON object"):
        await agent.control.execute("hold", command)


@pytest.mark.parametrize("name", ["hold", "unhold", "recover", "release", "resume", "bundle"])
async def test_what_is_unknown_in_a_command_is_rejected(agent: Agent, name: str) -> None:
    with pytest.raises(UsageError, match="Unknown in this command: colour"):
        await agent.execute(name, colour="green")


async def test_a_command_that_the_core_does_not_apply_is_reported() -> None:
    stuck = Agent(executed_within_s=0.02)
    with pytest.raises(NotExecutedError, match=r"not applied within 0.02 s"):
        await stuck.execute("hold", selector="3", why="x")
    stuck.inbox.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KEYS = st.sampled_from(["selector", "why", "even_if_absent", "gpu", "gpus", "for", "wait_s", "x"])


@given(
    st.sampled_from(["hold", "unhold", "recover", "release", "resume", "bundle"]),
    st.dictionaries(KEYS, JSON, max_size=4),
)
def test_any_command_is_rejected_or_one_fact(name: str, command: dict[str, object]) -> None:
    facts: list[Fact] = []

    async def execute() -> None:
        made = Agent(emit=facts.append)
        try:
            async with asyncio.timeout(0.001):
                await made.control.execute(name, command)
        except (UsageError, TimeoutError):
            return
        finally:
            made.inbox.close()

    asyncio.run(execute())
    assert len(facts) <= 1
    assert all(fact.source == OPERATOR for fact in facts)
