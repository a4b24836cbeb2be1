"""The names of a GPU: UUID, serial, PCI address in any form, index."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.errors import UsageError
from agent.model.gpu import MigDevice
from agent.model.ids import GpuUuid
from agent.model.snapshot import Snapshot
from agent.model.structs import replace
from agent.runtime.control import known_gpu, selector_and_gpu
from tests.sinks.snapshots import node, uuid

UUID = uuid(3)


def listed(*, mig: bool = False, lost: int | None = None) -> Snapshot:
    """Eight GPUs; GPU 3 has the address 0000:03:00.0 and the serial 1324523000003."""
    made = node()
    slices = (MigDevice("MIG-1", 1, 0, "1g.5gb", 1),) if mig else ()
    views = tuple(
        replace(
            view,
            gpu=replace(view.gpu, serial=f"13245230000{number:02}", mig_devices=slices),
            present=number != lost,
        )
        for number, view in enumerate(made.gpus)
    )
    return replace(made, gpus=views)


@pytest.mark.parametrize(
    "text",
    [
        "3",
        "0000:03:00.0",
        "00000000:03:00.0",
        "0:3:0.0",
        "03:00.0",
        "03:00",
        "1324523000003",
        UUID,
        UUID.upper(),
    ],
)
def test_each_form_names_the_gpu(text: str) -> None:
    assert known_gpu(text, listed()).uuid == uuid(3)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("3", uuid(3)),
        (uuid(3).upper(), uuid(3)),
        ("00000000:03:00", "0000:03:00.0"),
        ("1324523000003", "1324523000003"),
    ],
)
def test_a_gpu_is_kept_by_a_name_that_stays(text: str, name: str) -> None:
    assert selector_and_gpu(text, listed()) == (name, known_gpu("3", listed()))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("GPU-ABCDEF00-0000-4000-8000-000000000099", "GPU-abcdef00-0000-4000-8000-000000000099"),
        ("10000:AB:00.0", "10000:ab:00.0"),
        ("af:00", "0000:af:00.0"),
        ("1563221009876", "1563221009876"),
    ],
)
def test_a_gpu_that_is_not_there_is_kept_by_what_it_would_be_called(text: str, name: str) -> None:
    assert selector_and_gpu(text, listed()) == (name, None)


@pytest.mark.parametrize(
    "text", ["", "99", "GPU-3", "card", "03:00.8", "gpu 3", "x" * 200, "GPU-" + "0" * 32]
)
def test_what_is_no_name_is_rejected_with_what_would_be_one(text: str) -> None:
    for ask in (selector_and_gpu, known_gpu):
        with pytest.raises(UsageError, match="give its UUID, serial, PCI address or index"):
            ask(text, listed())


def test_a_mig_device_is_not_its_gpu() -> None:
    with pytest.raises(UsageError, match=f"MIG-1 is a MIG device; name its GPU, {uuid(0)}"):
        known_gpu("MIG-1", listed(mig=True))


def test_before_any_gpu_is_known_the_error_is_that() -> None:
    with pytest.raises(UsageError, match="no GPU is known yet"):
        known_gpu("0", replace(node(), gpus=()))


def test_of_two_gpus_at_one_place_the_one_that_is_there_is_meant() -> None:
    made = listed(lost=3)
    newcomer = replace(made.gpus[3], gpu=replace(made.gpus[3].gpu, uuid=GpuUuid(uuid(9))), present=True)
    both = replace(made, gpus=(*made.gpus, newcomer))
    assert known_gpu("0000:03:00.0", both).uuid == uuid(9)
    assert known_gpu("3", both).uuid == uuid(9)
    assert known_gpu(uuid(3), both).uuid == uuid(3)


def test_an_index_that_moved_from_a_lost_gpu_to_another_is_rejected() -> None:
    made = listed(lost=3)
    moved = tuple(
        replace(view, gpu=replace(view.gpu, index=number - 1)) if number > 3 else view
        for number, view in enumerate(made.gpus)
    )
    both = replace(made, gpus=moved)
    for ask in (selector_and_gpu, known_gpu):
        with pytest.raises(UsageError, match=rf"names 2 GPUs; give one of {uuid(3)} \(lost\), {uuid(4)}$"):
            ask("3", both)
        assert ask("2", both) == ask(uuid(2), both)
        assert ask("4", both) == ask(uuid(5), both)


def test_two_gpus_of_one_board_share_its_serial() -> None:
    made = listed()
    twin = replace(made.gpus[4], gpu=replace(made.gpus[4].gpu, serial="1324523000003"))
    both = replace(made, gpus=(*made.gpus[:4], twin))
    with pytest.raises(UsageError, match=f"names 2 GPUs; give one of {uuid(3)}, {uuid(4)}"):
        known_gpu("1324523000003", both)
    assert selector_and_gpu("1324523000003", both)[0] == "1324523000003"


@given(st.text(max_size=100))
def test_any_text_names_one_gpu_or_is_rejected_in_a_sentence(text: str) -> None:
    for ask in (selector_and_gpu, known_gpu):
        with contextlib.suppress(UsageError):
            ask(text, listed())
