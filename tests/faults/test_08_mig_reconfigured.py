"""Fault 8: MIG is reconfigured while the agent runs, and so is what is asked of it.

Right: the placement map is rebuilt with each layout. What is advertised is exactly what there is, each device
once and under one name; a fault of an instance takes that instance out and no other, however many share a
GPU; and Allocate gives what the id names.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.allocation.injection import VISIBLE_DEVICES, ContainerAnswer
from agent.core.allocation.requests import allocate
from agent.model.facts import PolicyChanged
from agent.model.gpu import Gpu, MigDevice
from agent.model.health import Health
from agent.model.ids import ALL, ResourceName
from agent.model.policy import MigStrategy, Policy
from agent.model.sharing import Sharing
from agent.model.structs import replace
from agent.simulation import actions
from agent.simulation.presets import MigDeviceSpec
from tests.core.build import GPU, Node, enumerated, gpu, passed, ready, uuid, xid
from tests.faults.watched_node import QUICK_RECOVERY, watched_node
from tests.harness import flags_of, running, simulated_node, wait_allocatable

CARDS: Final = 3
SLICES: Final = 7
QUICK = Policy(mig_strategy="mixed", recovery_clean_probes=1, recovery_quiet_ns=0)
RESET_XID: Final = 48

Layout = tuple[str, ...] | None
"""Profiles in the order of their instances; None: not in MIG mode."""

LAYOUTS: list[Layout] = [
    None,
    (),
    ("1g.10gb",) * SLICES,
    ("7g.80gb",),
    ("3g.40gb", "1g.10gb", "1g.10gb"),
    ("3g.40gb", "3g.40gb"),
    ("2g.20gb", "1g.10gb+me"),
    ("4g.40gb",),
]


def card(number: int, layout: Layout, made: int) -> Gpu:
    """A card with a layout; instances made later have other UUIDs and the same numbers."""
    slices = tuple(
        MigDevice(f"MIG-{number}-{made}-{place}", place + 1, 0, profile, 2**30, index=place)
        for place, profile in enumerate(layout or ())
    )
    return replace(gpu(number), mig_enabled=layout is not None, mig_devices=slices)


@dataclass
class Cards:
    """What is true of a node whose layouts change, reported to a core that has to follow."""

    node: Node = field(default_factory=lambda: Node(QUICK))
    layouts: list[Layout] = field(default_factory=lambda: [None] * CARDS)
    made: list[int] = field(default_factory=lambda: [0] * CARDS)
    broken: set[str] = field(default_factory=set)
    """UUIDs of the GPUs and MIG devices that are unhealthy."""
    strategy: MigStrategy = "mixed"
    replicas: int | None = None

    def cards(self) -> list[Gpu]:
        return [card(each, self.layouts[each], self.made[each]) for each in range(CARDS)]

    def report(self) -> None:
        self.node.apply(enumerated(*self.cards()), *(passed(uuid(each)) for each in range(CARDS)))

    def lay_out(self, number: int, layout: Layout) -> None:
        """Destroy what is there and make something else, or the same anew."""
        gone = {mig.uuid for mig in self.cards()[number].mig_devices}
        self.broken -= gone
        self.layouts[number] = layout
        self.made[number] += 1
        self.report()

    def fault_at(self, number: int, place: int) -> None:
        """Let an instance of a card fail, or the card where it has none."""
        slices = self.cards()[number].mig_devices
        if not slices:
            self.broken.add(uuid(number))
            self.node.apply(xid(RESET_XID, uuid(number)))
            return
        chosen = slices[place % len(slices)]
        self.broken.add(chosen.uuid)
        self.node.apply(xid(RESET_XID, uuid(number), gi=chosen.gi, ci=chosen.ci))

    def ask(self, strategy: MigStrategy, replicas: int | None) -> None:
        """Change the policy."""
        self.strategy, self.replicas = strategy, replicas
        names = [GPU, ResourceName("nvidia.com/mig-1g.10gb")]
        sharing = Sharing.of({} if replicas is None else dict.fromkeys(names, replicas))
        self.node.apply(PolicyChanged(replace(QUICK, mig_strategy=strategy, sharing=sharing)))

    def expected(self) -> dict[str, dict[str, str]]:
        """What there is by resource: the UUID behind each id that is to be advertised."""
        parts = [
            (part, each) for each in self.cards() for part in (each.mig_devices if each.mig_enabled else ())
        ]
        whole = [each for each in self.cards() if not each.mig_enabled]
        if self.strategy == "none":
            parts, whole = [], self.cards()
        if self.strategy == "single" and any(each.mig_enabled for each in self.cards()):
            profiles = {part.profile for part, _ in parts}
            empty = [each for each in self.cards() if each.mig_enabled and not each.mig_devices]
            if whole or empty or len(profiles) != 1:
                parts, whole = [], []
        found: dict[str, dict[str, str]] = {}
        for each in whole:
            self._add(found, GPU, each.uuid)
        for part, _ in parts:
            named = "nvidia.com/mig-" + part.profile.replace("+", ".")
            self._add(found, named if self.strategy == "mixed" else GPU, part.uuid)
        return found

    def _add(self, found: dict[str, dict[str, str]], name: str, of: str) -> None:
        is_shared = self.replicas is not None and name in {GPU, "nvidia.com/mig-1g.10gb"}
        ids = [f"{of}::{number}" for number in range(self.replicas or 0)] if is_shared else [of]
        found.setdefault(name, {}).update(dict.fromkeys(ids, of))

    def check(self) -> None:
        """What must be so at every moment."""
        snapshot = self.node.snapshot()
        advertised = {
            str(each.name): {str(device.id): device.uuid for device in each.devices}
            for each in snapshot.resources
            if each.devices
        }
        assert advertised == self.expected()
        every_id = Counter(str(device.id) for each in snapshot.resources for device in each.devices)
        assert set(every_id.values()) <= {1}
        of_card = {part.uuid: each.uuid for each in self.cards() for part in each.mig_devices}
        for resource in snapshot.resources:
            for device in resource.devices:
                parts = [part for part, whole in of_card.items() if whole == device.uuid]
                is_broken = bool(self.broken & {device.uuid, of_card.get(device.uuid, ""), *parts})
                assert (device.health is Health.UNHEALTHY) == is_broken
                if not is_broken:
                    answer = allocate(snapshot, resource, [device.id])
                    assert isinstance(answer, ContainerAnswer)
                    assert answer.envs == {VISIBLE_DEVICES: device.uuid}


STEPS = st.one_of(
    st.tuples(st.just("layout"), st.integers(0, CARDS - 1), st.sampled_from(LAYOUTS)),
    st.tuples(st.just("fault"), st.integers(0, CARDS - 1), st.integers(0, SLICES - 1)),
    st.tuples(st.just("ask"), st.sampled_from(["none", "single", "mixed"]), st.sampled_from([None, 3])),
)


@settings(deadline=None)
@given(st.lists(STEPS, max_size=12))
def test_whatever_the_layouts_become_exactly_what_there_is_is_advertised(
    steps: list[tuple[str, object, object]],
) -> None:
    cards = Cards()
    cards.node.apply(ready())
    cards.report()
    cards.check()
    for step in steps:
        match step:
            case ("layout", int(number), layout):
                assert layout is None or isinstance(layout, tuple)
                cards.lay_out(number, layout)
            case ("fault", int(number), int(place)):
                cards.fault_at(number, place)
            case ("ask", ("none" | "single" | "mixed") as strategy, replicas):
                assert replicas is None or isinstance(replicas, int)
                cards.ask(strategy, replicas)
            case _:
                raise AssertionError(step)
        cards.check()


@given(st.integers(0, SLICES - 1), st.sampled_from([ALL, 0]))
def test_of_seven_slices_of_one_card_exactly_the_one_with_the_fault_is_unhealthy(place: int, ci: int) -> None:
    cards = Cards()
    cards.node.apply(ready())
    cards.lay_out(0, ("1g.10gb",) * SLICES)
    cards.node.apply(xid(RESET_XID, uuid(0), gi=place + 1, ci=ci))
    assert cards.node.unhealthy(ResourceName("nvidia.com/mig-1g.10gb")) == {f"MIG-0-1-{place}"}


# Over the simulated library


@pytest.mark.parametrize("seed", range(3))
async def test_layouts_that_change_in_nvml_are_followed_with_their_faults(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    policy = replace(QUICK_RECOVERY, mig_strategy="mixed")
    hardware: dict[str, object] = {"preset": "8x-a100", "gpus": 2}
    async with watched_node(tmp_path, hardware, policy=policy) as watched:
        state = watched.node.state
        there: dict[int, dict[str, str]] = {index: {state.uuid(index): GPU} for index in range(2)}

        def advertised() -> dict[str, str]:
            return {str(d.id): name for name, devices in watched.resources.items() for d in devices}

        def unhealthy() -> set[str]:
            listed = (device for devices in watched.resources.values() for device in devices)
            return {str(device.id) for device in listed if device.health is not Health.HEALTHY}

        for _ in range(5):
            index = chance.randrange(2)
            layout = chance.choice([each for each in LAYOUTS if each != () and each is not None] + [None])
            specs = [MigDeviceSpec(profile=profile) for profile in layout or ()]
            uuids = state.set_mig(index, specs, enabled=layout is not None)
            names = ["nvidia.com/mig-" + each.replace("+", ".") for each in layout or ()]
            there[index] = dict(zip(uuids, names, strict=True)) if layout else {state.uuid(index): GPU}
            await watched.until(
                lambda: advertised() == {k: v for each in there.values() for k, v in each.items()}
            )
            await watched.until(lambda: unhealthy() == set())
            if layout:
                row = chance.randrange(len(uuids))
                gi, ci = state.number(index, "mig_gi", row), state.number(index, "mig_ci", row)
                state.push_xid(index, RESET_XID, gi=gi, ci=ci)
                broken = uuids[row]
                await watched.until(lambda broken=broken: unhealthy() == {broken})  # type: ignore[misc]
                state.set_mig(index, [])
                await watched.until(lambda broken=broken: broken not in advertised())  # type: ignore[misc]
                there[index] = {}
                await watched.until(lambda: unhealthy() == set())


# With the nodes that containers are given


@pytest.mark.slow
async def test_nodes_that_go_with_their_instances_are_not_missed_and_others_are() -> None:
    layouts = {"7x1g.10gb": ("nvidia.com/mig-1g.10gb", 14), "3g.40gb": ("nvidia.com/mig-3g.40gb", 2)}
    flags = {"mig-strategy": "mixed", "pass-device-specs": "true", "poll": "2s"}
    hardware = {"preset": "8x-a100", "gpus": 2}
    async with simulated_node(hardware) as node, running(flags_of(node, **flags)) as agent:
        for profiles, (name, number) in [*layouts.items()] * 2:
            await actions.parse("mig", {"gpu": "all", "devices": profiles}).action.apply(node)
            await wait_allocatable(node.kubelet, number, resource=name)
        assert not [line for line in agent.log if line.get("reason") == "device_node_missing"]
        nodes = (node.directory.dev / "nvidia-caps").iterdir()
        # Those of instances have the highest numbers.
        lost = max(nodes, key=lambda each: int(each.name.removeprefix("nvidia-cap")))
        lost.unlink()
        await wait_allocatable(node.kubelet, 1, resource="nvidia.com/mig-3g.40gb")
        line = await agent.wait_line("A condition was raised", reason="device_node_missing")
        assert lost.name in str(line)
