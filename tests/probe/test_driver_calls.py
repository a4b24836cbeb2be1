"""The driver's calls by name."""

import errno
import struct

import pytest

from agent.probe.driver_calls import DriverCall, device_name, named
from agent.probe.kernel import Majors
from agent.probe.layout import TracedCall

MAJORS = Majors(195, 509, 507)
CONTROL, GPU_3, UVM = 195 << 20 | 255, 195 << 20 | 3, 509 << 20
CLIENT, HANDLE = 0xC1D00007, 0x5C000013


def call(
    number: int,
    block: bytes = b"",
    *,
    device: int = CONTROL,
    size: int | None = None,
    result: int = 0,
    took_ns: int = 1_000,
    branch: int = 570,
) -> DriverCall:
    read = block[:64]
    traced = TracedCall(
        entered_ns=5,
        took_ns=took_ns,
        argument=0,
        tgid=10,
        pid=11,
        device=device,
        fd=3,
        number=number,
        size=(0 if device == UVM else len(block)) if size is None else size,
        result=result,
        block_bytes=len(read),
        block=read.ljust(64, b"\0"),
    )
    return named(traced, MAJORS, branch=branch)


def words(*numbers: int) -> bytes:
    return struct.pack(f"={len(numbers)}I", *numbers)


def described(one: DriverCall) -> tuple[str, str | None, int | None, int | None, str | None]:
    return one.name, one.about, one.client, one.handle, one.answer


def test_an_allocation_is_named_with_its_class() -> None:
    block = words(CLIENT, 2, HANDLE, 0x9067, 0, 0, 0, 0, 0, 0, 0, 0)

    assert described(call(0x2B, block)) == ("RM_ALLOC", "FERMI_CONTEXT_SHARE_A", CLIENT, HANDLE, "OK")


def test_a_client_that_is_allocated_is_its_own_handle() -> None:
    block = words(0, 0, CLIENT, 0x41, *[0] * 8)

    assert described(call(0x2B, block)) == ("RM_ALLOC", "NV01_ROOT_CLIENT", CLIENT, CLIENT, "OK")


@pytest.mark.parametrize(
    ("numbers", "at", "branch"),
    [(12, 10, 570), (10, 9, 525), (8, 7, 535), (8, 6, 530)],
)
def test_the_status_of_an_allocation_is_where_the_size_and_the_driver_have_it(
    numbers: int, at: int, branch: int
) -> None:
    block = [CLIENT, 2, HANDLE, 0x80, *[0] * (numbers - 4)]
    block[at] = 0x1A

    one = call(0x2B, words(*block), branch=branch)
    assert (one.answer, one.failed) == ("INSUFFICIENT_RESOURCES", True)


@pytest.mark.parametrize(
    ("number", "block", "expected"),
    [
        (0x29, words(CLIENT, 0, HANDLE, 0), ("RM_FREE", None, CLIENT, HANDLE, "OK")),
        (0x29, words(CLIENT, 0, HANDLE, 0x23), ("RM_FREE", None, CLIENT, HANDLE, "INVALID_CLIENT")),
        (
            0x2A,
            words(CLIENT, HANDLE, 0x20800102, 0, 0, 0, 0, 0x56),
            ("RM_CONTROL", "0x20800102", CLIENT, HANDLE, "NOT_SUPPORTED"),
        ),
        (
            0x34,
            words(CLIENT, 1, HANDLE, 9, 8, 0, 0x57),
            ("RM_DUP_OBJECT", None, CLIENT, HANDLE, "OBJECT_NOT_FOUND"),
        ),
        (
            0x27,
            words(CLIENT, 1, HANDLE, 0x3E, *[0] * 6, 0x51, 0, 0, 0),
            ("RM_ALLOC_MEMORY", "NV01_MEMORY_SYSTEM", CLIENT, HANDLE, "NO_MEMORY"),
        ),
        (
            0x4A,
            words(CLIENT, 1, 2, 0, 0, 0x0F, *[0] * 40),
            ("RM_VID_HEAP_CONTROL", None, CLIENT, None, "GPU_IS_LOST"),
        ),
        (0x4E, words(CLIENT, 1, HANDLE, *[0] * 11), ("RM_MAP_MEMORY", None, CLIENT, HANDLE, "OK")),
        (
            0x57,
            words(CLIENT, 1, 4, HANDLE, *[0] * 8, 0x65, 0),
            ("RM_MAP_MEMORY_DMA", None, CLIENT, HANDLE, "TIMEOUT"),
        ),
        (
            0x57,
            words(CLIENT, 1, 4, HANDLE, *[0] * 10, 0x65, 0),
            ("RM_MAP_MEMORY_DMA", None, CLIENT, HANDLE, "TIMEOUT"),
        ),
        (200, b"\0" * 2304, ("CARD_INFO", None, None, None, "OK")),
        (201, words(3), ("REGISTER_FD", None, None, None, "OK")),
        (0xEE, b"", ("ioctl 0xee", None, None, None, "OK")),
        (0x29, words(CLIENT, 0, HANDLE, 0x9999), ("RM_FREE", None, CLIENT, HANDLE, "status 0x9999")),
    ],
)
def test_calls_are_named_with_their_objects(
    number: int, block: bytes, expected: tuple[str, str | None, int | None, int | None, str | None]
) -> None:
    assert described(call(number, block)) == expected


@pytest.mark.parametrize(
    ("number", "block", "expected"),
    [
        (0x30000001, words(0, 0, 0), ("UVM_INITIALIZE", None, None, None, "OK")),
        (
            25,
            bytes(16) + words(7, CLIENT, HANDLE, 0x12),
            ("UVM_REGISTER_GPU_VASPACE", None, CLIENT, HANDLE, "GPU_UUID_NOT_FOUND"),
        ),
        (
            27,
            bytes(16) + words(7, CLIENT, HANDLE, *[0] * 7),
            ("UVM_REGISTER_CHANNEL", None, CLIENT, HANDLE, "OK"),
        ),
        (0x2B, words(*[0] * 16), ("UVM_UNSET_PREFERRED_LOCATION", None, None, None, "OK")),
        (999, words(*[0] * 16), ("UVM_999", None, None, None, "OK")),
    ],
)
def test_unified_memory_has_numbers_of_its_own(
    number: int, block: bytes, expected: tuple[str, str | None, int | None, int | None, str | None]
) -> None:
    assert described(call(number, block, device=UVM)) == expected


@pytest.mark.parametrize(
    ("branch", "number", "block", "expected"),
    [
        (580, 28, bytes(16) + words(CLIENT, HANDLE, 0x21), (CLIENT, HANDLE, "INVALID_CHANNEL")),
        (590, 28, words(CLIENT, HANDLE, 0x21), (CLIENT, HANDLE, "INVALID_CHANNEL")),
        (0, 28, words(CLIENT, HANDLE, 0x21), (None, None, "OK")),
        (515, 34, words(1, 0, 2, 0, 0x1E, 0), (None, None, "INVALID_ADDRESS")),
        (595, 34, words(1, 0, 0x1E, 0), (None, None, "INVALID_ADDRESS")),
    ],
    ids=["channel 580", "channel 590", "channel of an unknown driver", "free 515", "free 595"],
)
def test_a_layout_without_a_member_is_read_as_the_driver_has_it(
    branch: int, number: int, block: bytes, expected: tuple[int | None, int | None, str]
) -> None:
    one = call(number, block, device=UVM, branch=branch)

    assert (one.client, one.handle, one.answer) == expected


def test_the_kernels_result_takes_precedence_over_the_status() -> None:
    one = call(0x29, words(CLIENT, 0, HANDLE, 0), result=-errno.EINVAL)

    assert (one.answer, one.failed) == ("EINVAL", True)


def test_unreadable_parameters_are_unknown() -> None:
    one = call(0x2B, b"", size=48)

    assert (one.name, one.about, one.client, one.handle, one.status, one.answer) == (
        "RM_ALLOC",
        None,
        None,
        None,
        None,
        "OK",
    )


def test_a_call_that_has_not_returned_has_no_answer() -> None:
    one = call(0x29, words(CLIENT, 0, HANDLE, 0x23), took_ns=0)

    assert (one.took_ns, one.status, one.answer, one.failed) == (None, None, None, False)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        (CONTROL, "nvidiactl"),
        (GPU_3, "nvidia3"),
        (195 << 20 | 254, "nvidia-modeset"),
        (UVM, "nvidia-uvm"),
        (UVM | 1, "nvidia-uvm-tools"),
        (507 << 20 | 21, "nvidia-cap21"),
    ],
)
def test_devices_have_the_names_of_their_files(device: int, name: str) -> None:
    assert device_name(device, MAJORS) == name


def test_without_unified_memory_no_device_counts_as_its_own() -> None:
    assert device_name(0, Majors(195, 0, 0)) == "nvidia0"
