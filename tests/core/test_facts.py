"""How facts stand for one another while they wait, and how things are named."""

import pytest

from agent.model.facts import DriverUnavailable, Fact, FactsLost, KernelXidSeen, SwitchErrorSeen, XidReported
from agent.model.health import Reason
from agent.model.ids import ALL, Placement, ResourceName, pci_sysfs_name, replica_id, socket_name
from agent.model.structs import replace
from tests.core.build import GPU, KMSG, U0, U1, place, xid
from tests.core.histories import ONE_OF_EACH

COUNTED = (KernelXidSeen, SwitchErrorSeen, XidReported, FactsLost)


@pytest.mark.parametrize("fact", ONE_OF_EACH, ids=lambda fact: type(fact).__name__)
def test_every_fact_has_a_key_so_none_is_ever_lost(fact: Fact) -> None:
    assert fact.key is not None
    assert hash(fact.key) == hash(replace(fact).key)


def test_no_two_kinds_of_fact_have_one_key() -> None:
    assert len({fact.key for fact in ONE_OF_EACH}) == len(ONE_OF_EACH)


@pytest.mark.parametrize(
    "fact",
    [fact for fact in ONE_OF_EACH if not isinstance(fact, COUNTED)],
    ids=lambda fact: type(fact).__name__,
)
def test_of_two_states_the_newer_one_is_the_truth(fact: Fact) -> None:
    newer = replace(fact, source=KMSG)
    assert fact.merged_with(newer) == newer  # type: ignore[arg-type]


def test_counts_are_added_up() -> None:
    assert xid(79, count=2).merged_with(xid(79, count=3)) == xid(79, count=5)
    assert FactsLost(KMSG, count=2).merged_with(FactsLost(KMSG, count=3)) == FactsLost(KMSG, count=5)


@pytest.mark.parametrize("first", [True, False])
def test_a_driver_that_was_unloaded_once_stays_evidence_of_a_reset(*, first: bool) -> None:
    one = DriverUnavailable(Reason.DRIVER_NOT_LOADED, "not loaded", unloaded=first)
    two = DriverUnavailable(Reason.NVML_VERSION_MISMATCH, "mismatch", unloaded=not first)
    assert one.merged_with(two) == replace(two, unloaded=True)


# Names


@pytest.mark.parametrize(
    ("bus_id", "name"),
    [
        ("00000000:3B:00.0", "0000:3b:00.0"),
        ("0000:3b:00.0", "0000:3b:00.0"),
        ("00010002:AF:1F.7", "0002:af:1f.7"),
        ("1:3B:00.0", "0001:3b:00.0"),
        (" 00000000:3B:00.0\n", "0000:3b:00.0"),
        ("3B:00.0", "3b:00.0"),
        ("nonsense", "nonsense"),
    ],
)
def test_a_pci_address_is_written_as_sysfs_writes_it(bus_id: str, name: str) -> None:
    """Case G3."""
    assert pci_sysfs_name(bus_id) == name


def test_a_share_is_numbered_after_its_device() -> None:
    assert replica_id("GPU-1", 0) == "GPU-1::0"
    assert replica_id("GPU-1", None) == "GPU-1"


def test_a_plugin_socket_is_named_as_nvidias_plugin_names_it() -> None:
    assert socket_name(GPU) == "nvidia-gpu.sock"
    assert socket_name(ResourceName("nvidia.com/mig-1g.10gb")) == "nvidia-mig-1g.10gb.sock"


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (place(), place(), True),
        (place(), place(U1), False),
        (place(), place(gi=1, ci=0), True),
        (place(gi=1), place(gi=1, ci=3), True),
        (place(gi=1, ci=0), place(gi=1, ci=1), False),
        (place(gi=1, ci=0), place(gi=2, ci=0), False),
        (place(gi=1, ci=0), place(U1, gi=1, ci=0), False),
        (place(gi=1), place(gi=2), False),
    ],
)
def test_a_place_overlaps_with_what_contains_it(one: Placement, other: Placement, *, overlap: bool) -> None:
    assert one.overlaps(other) is overlap
    assert other.overlaps(one) is overlap
    assert place(U0, ALL, ALL) == Placement(U0)
