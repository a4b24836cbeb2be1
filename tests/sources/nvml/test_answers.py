"""Invalid answers of a driver: texts of any bytes, and impossible counts."""

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml
import pytest

from agent.errors import MISSING_RIGHT, NvmlCode, NvmlError
from agent.sources.nvml.library import Handle, Nvml, printable
from agent.sources.nvml.readings import IMPOSSIBLE, MAX_PROCESSES, Readings

HANDLE = Handle(object())
INSUFFICIENT_SIZE = 7


class Unobserved:
    """Notes nothing."""

    def began(self, call: str) -> None:
        """Note nothing."""

    def ended(self) -> None:
        """Note nothing."""


def answering(monkeypatch: pytest.MonkeyPatch, answer: Callable[..., int]) -> Nvml:
    """NVML whose every function is one of ours."""
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer", lambda _name: answer)
    return Nvml(Unobserved())


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"NVIDIA H100", "NVIDIA H100"),
        (b"NVIDIA \xff\xfe", "NVIDIA \\xff\\xfe"),
        (b"\x1b[31mred\r\n", "\\x1b[31mred\\x0d\\x0a"),
        ("\u202eevil".encode(), "\\x202eevil"),
    ],
)
def test_a_name_of_any_bytes_is_a_harmless_text(
    monkeypatch: pytest.MonkeyPatch, raw: bytes, text: str
) -> None:
    def fill(_handle: object, buffer: ctypes.Array[ctypes.c_char], _size: object) -> int:
        buffer.value = raw
        return 0

    nvml = answering(monkeypatch, fill)
    for read in (nvml.name, nvml.uuid, nvml.serial):
        assert read(HANDLE) == text
    assert printable(raw) == text


def test_an_address_of_any_bytes_is_a_text(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(_handle: object, info: Any) -> int:
        ctypes.memset(info, 0xFF, ctypes.sizeof(pynvml.nvmlPciInfo_t))
        return 0

    assert set(answering(monkeypatch, fill).pci_bus_id(HANDLE)) == set("\\xf")


@pytest.mark.parametrize("count", [MAX_PROCESSES + 1, 2**30, 2**32 - 1])
def test_no_room_is_made_for_more_processes_than_there_can_be(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    asked = []

    def claim(_handle: object, number: Any, records: object) -> int:
        asked.append(records)
        number._obj.value = count
        return INSUFFICIENT_SIZE

    assert Readings(answering(monkeypatch, claim)).compute_processes(HANDLE) == (IMPOSSIBLE,)
    assert asked == [None]


def test_a_list_that_claims_more_than_it_was_given_room_for_is_read_as_far_as_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def claim(_handle: object, number: Any, records: object) -> int:
        number._obj.value = 2 if records is None else 2**30
        return INSUFFICIENT_SIZE if records is None else 0

    assert len(Readings(answering(monkeypatch, claim)).compute_processes(HANDLE)) == 2 * 2 + 5


@pytest.mark.parametrize("failure", [MemoryError(), OverflowError(), ValueError("x")])
def test_what_the_binding_chokes_on_is_an_error_of_that_call(
    monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    def choke(*_: object) -> int:
        raise failure

    with pytest.raises(NvmlError, match="Invalid answer") as raised:
        answering(monkeypatch, choke).count()
    assert raised.value.code == NvmlCode.UNKNOWN


def test_a_missing_right_is_named_and_no_other_error_is_one() -> None:
    assert str(NvmlError("nvmlInit", NvmlCode.NO_PERMISSION, "No")).endswith(MISSING_RIGHT)
    assert MISSING_RIGHT not in str(NvmlError("nvmlInit", NvmlCode.UNKNOWN, "Unknown"))
