"""NVML as typed calls: where pynvml is loaded and called, and where its errors are translated.

Invariants: one method is one NVML call, and it is reported to a CallObserver before it is made, since
it may never return. Every method may block and raises NvmlError; none is to be called on the loop.
A library that was loaded stays loaded: the driver's own code keeps pointers into it. Only this module,
readings and hotplug import pynvml; whatever they call goes through ``Nvml.call``.
"""

import ctypes
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NewType, Protocol, TypeVar

import msgspec
import pynvml

from agent.errors import NvmlCode, NvmlError, SourceError

Handle = NewType("Handle", object)
"""An NVML device handle, of a GPU or a MIG device."""

EventSet = NewType("EventSet", object)
"""An NVML event set."""

SONAME: Final = "libnvidia-ml.so.1"

DRIVER_LIBRARY_DIRECTORIES: Final = (
    "usr/lib64",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/nvidia/current",
    "usr/lib/aarch64-linux-gnu/nvidia/current",
    "usr/lib",
    "lib64",
    "lib/x86_64-linux-gnu",
    "lib/aarch64-linux-gnu",
    "lib",
)
"""Where distributions and the driver container install the library, under the driver root."""

XID_EVENT: Final = int(pynvml.nvmlEventTypeXidCriticalError)
HEALTH_EVENTS: Final = XID_EVENT | int(
    pynvml.nvmlEventTypeDoubleBitEccError | pynvml.nvmlEventTypeSingleBitEccError
)
"""The events that NVIDIA's plugin registers for. Source: NVIDIA/k8s-device-plugin:internal/rm/health.go."""

GPU_INSTANCE_PROFILES: Final = int(pynvml.NVML_GPU_INSTANCE_PROFILE_COUNT)

FIRST_HANDLE: Final = "nvmlDeviceGetHandleByIndex"
INIT: Final = "nvmlInitWithFlags"
EVENT_WAIT: Final = "nvmlEventSetWait_v2"

FINDINGS: Final = frozenset({NvmlCode.GPU_IS_LOST, NvmlCode.RESET_REQUIRED})
"""Codes that count whichever call returns them; others only where the GPU is unusable without the answer."""

T = TypeVar("T")


class LibraryMissingError(SourceError):
    """No NVML library could be loaded; it may appear later."""


class CallObserver(Protocol):
    """Notes which call a thread is about to make, and its return."""

    def began(self, call: str) -> None:
        """Note a call by its NVML name."""

    def ended(self) -> None:
        """Note that the last one returned."""


class Versions(msgspec.Struct, frozen=True):
    """The versions of driver, NVML and CUDA."""

    driver: str
    nvml: str
    cuda: tuple[int, int]


class NvmlEvent(msgspec.Struct, frozen=True):
    """One event of an event set."""

    device: int | None
    """Address of the device's handle, see ``address_of``; None if the driver named no device."""
    type: int
    data: int
    """The XID, for XID_EVENT."""
    gi: int
    ci: int


class MigAttributes(msgspec.Struct, frozen=True):
    """How large a MIG device is."""

    gpu_slices: int
    compute_slices: int
    memory_bytes: int
    engines: tuple[int, ...] = ()
    """Copy engines, decoders, encoders, JPEG and OFA engines: in these ``+me`` and its like differ."""


class Nvml:
    """The calls that one thread makes, to the library that ``load`` found."""

    def __init__(self, observer: CallObserver) -> None:
        self._observer = observer

    def call(self, function: Callable[..., Any], *arguments: object, **named: object) -> Any:
        """Make a call of pynvml's; only for the modules that import pynvml."""
        name = function.__name__
        self._observer.began(name)
        try:
            return function(*arguments, **named)
        except pynvml.NVMLError as error:
            raise NvmlError(name, int(error.value), str(error)) from None
        except (ValueError, OverflowError, MemoryError) as error:
            # The binding trusts the driver's sizes and texts.
            raise NvmlError(name, NvmlCode.UNKNOWN, f"Invalid answer: {type(error).__name__}") from None
        finally:
            self._observer.ended()

    def text(self, function: Callable[..., Any], *arguments: object) -> str:
        """Make a call of pynvml's whose answer is a text of any bytes; see ``printable``."""
        # The binding decodes strictly what its own function returns as bytes.
        return printable(self.call(getattr(function, "__wrapped__", function), *arguments))

    def observed(self, name: str, work: Callable[[], T]) -> T:
        """Do work that is no NVML call and may block like one."""
        self._observer.began(name)
        try:
            return work()
        finally:
            self._observer.ended()

    def init(self) -> None:
        """Initialise NVML; counted, so that one ``shutdown`` is needed for each."""
        self.call(pynvml.nvmlInitWithFlags, 0)

    def shutdown(self) -> None:
        """Release the driver and every handle."""
        self.call(pynvml.nvmlShutdown)

    def versions(self) -> Versions:
        """Return the versions of driver, NVML and CUDA."""
        cuda = int(self.call(pynvml.nvmlSystemGetCudaDriverVersion))
        return Versions(
            driver=self.text(pynvml.nvmlSystemGetDriverVersion),
            nvml=self.text(pynvml.nvmlSystemGetNVMLVersion),
            cuda=(cuda // 1000, cuda % 1000 // 10),
        )

    def count(self) -> int:
        """Return how many GPUs NVML lists."""
        return int(self.call(pynvml.nvmlDeviceGetCount))

    def handle_by_index(self, index: int) -> Handle:
        """Return a GPU's handle; the first time, the driver may initialise the GPU."""
        return Handle(self.call(pynvml.nvmlDeviceGetHandleByIndex, index))

    def handle_by_pci(self, bus_id: str) -> Handle:
        """Return the handle of the GPU at a PCI address; NOT_FOUND if there is none."""
        return Handle(self.call(pynvml.nvmlDeviceGetHandleByPciBusId, bus_id.encode()))

    def uuid(self, handle: Handle) -> str:
        """Return the UUID of a GPU or MIG device."""
        return self.text(pynvml.nvmlDeviceGetUUID, handle)

    def index(self, handle: Handle) -> int:
        """Return the index NVML has for a GPU now."""
        return int(self.call(pynvml.nvmlDeviceGetIndex, handle))

    def minor(self, handle: Handle) -> int:
        """Return N of /dev/nvidiaN."""
        return int(self.call(pynvml.nvmlDeviceGetMinorNumber, handle))

    def name(self, handle: Handle) -> str:
        """Return the product name; a MIG device's ends with its profile."""
        return self.text(pynvml.nvmlDeviceGetName, handle)

    def pci_bus_id(self, handle: Handle) -> str:
        """Return the PCI address as NVML writes it: ``00000000:3B:00.0``."""
        return printable(_bytes_in(self.call(pynvml.nvmlDeviceGetPciInfo_v3, handle), "busId"))

    def memory_bytes(self, handle: Handle) -> int:
        """Return the total memory."""
        return int(self.call(pynvml.nvmlDeviceGetMemoryInfo, handle).total)

    def temperature_celsius(self, handle: Handle) -> int:
        """Return the temperature of the GPU."""
        return int(self.call(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU))

    def compute_capability(self, handle: Handle) -> tuple[int, int]:
        """Return the CUDA compute capability."""
        major, minor = self.call(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
        return int(major), int(minor)

    def serial(self, handle: Handle) -> str:
        """Return the board's serial number."""
        return self.text(pynvml.nvmlDeviceGetSerial, handle)

    def part_number(self, handle: Handle) -> str:
        """Return the board's part number."""
        return self.text(pynvml.nvmlDeviceGetBoardPartNumber, handle)

    def vbios(self, handle: Handle) -> str:
        """Return the version of the VBIOS."""
        return self.text(pynvml.nvmlDeviceGetVbiosVersion, handle)

    def inforom(self, handle: Handle) -> str:
        """Return the version of the InfoROM image."""
        return self.text(pynvml.nvmlDeviceGetInforomImageVersion, handle)

    def coherent(self, handle: Handle) -> bool:
        """Return whether the GPU shares the CPU's address space, by address translation services."""
        mode = self.call(pynvml.nvmlDeviceGetAddressingMode, handle)
        return int(mode) == int(pynvml.NVML_DEVICE_ADDRESSING_MODE_ATS)

    def mig_enabled(self, handle: Handle) -> bool:
        """Return whether MIG mode is on now; NOT_SUPPORTED where the GPU has none."""
        current, _pending = self.call(pynvml.nvmlDeviceGetMigMode, handle)
        return int(current) == int(pynvml.NVML_DEVICE_MIG_ENABLE)

    def mig_maximum(self, handle: Handle) -> int:
        """Return how many MIG devices a GPU can have."""
        return int(self.call(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle))

    def mig_handle(self, handle: Handle, index: int) -> Handle:
        """Return the handle of a GPU's n-th MIG device; NOT_FOUND if there is none."""
        return Handle(self.call(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index))

    def mig_instances(self, mig: Handle) -> tuple[int, int]:
        """Return the GPU instance and compute instance ids of a MIG device."""
        return (
            int(self.call(pynvml.nvmlDeviceGetGpuInstanceId, mig)),
            int(self.call(pynvml.nvmlDeviceGetComputeInstanceId, mig)),
        )

    def mig_attributes(self, mig: Handle) -> MigAttributes:
        """Return the size of a MIG device."""
        attributes = self.call(pynvml.nvmlDeviceGetAttributes_v2, mig)
        return MigAttributes(
            gpu_slices=int(attributes.gpuInstanceSliceCount),
            compute_slices=int(attributes.computeInstanceSliceCount),
            memory_bytes=int(attributes.memorySizeMB) << 20,
            engines=(
                int(attributes.sharedCopyEngineCount),
                int(attributes.sharedDecoderCount),
                int(attributes.sharedEncoderCount),
                int(attributes.sharedJpegCount),
                int(attributes.sharedOfaCount),
            ),
        )

    def gpu_instance_profile(self, handle: Handle, gi: int) -> int:
        """Return the profile id of a GPU instance; needs the rights of root."""
        instance = self.call(pynvml.nvmlDeviceGetGpuInstanceById, handle, gi)
        return int(self.call(pynvml.nvmlGpuInstanceGetInfo, instance).profileId)

    def profile_name(self, handle: Handle, number: int) -> tuple[int, str]:
        """Return id and name (``MIG 1g.10gb+me``) of a GPU's n-th instance profile."""
        info = self.call(pynvml.nvmlDeviceGetGpuInstanceProfileInfo, handle, number)
        return int(info.id), printable(_bytes_in(info, "name"))

    def supported_events(self, handle: Handle) -> int:
        """Return the mask of event types a GPU can send."""
        return int(self.call(pynvml.nvmlDeviceGetSupportedEventTypes, handle))

    def create_event_set(self) -> EventSet:
        """Return an empty event set."""
        return EventSet(self.call(pynvml.nvmlEventSetCreate))

    def free_event_set(self, events: EventSet) -> None:
        """Free an event set that no thread waits on."""
        self.call(pynvml.nvmlEventSetFree, events)

    def register_events(self, handle: Handle, types: int, events: EventSet) -> None:
        """Register a GPU's events with a set; NOT_SUPPORTED where the GPU sends none."""
        self.call(pynvml.nvmlDeviceRegisterEvents, handle, types, events)

    def wait_event(self, events: EventSet, timeout_ms: int) -> NvmlEvent:
        """Return the next event; NvmlError with code TIMEOUT if there was none."""
        data = self.call(pynvml.nvmlEventSetWait_v2, events, timeout_ms)
        return NvmlEvent(
            device=_address(data.device),
            type=int(data.eventType),
            data=int(data.eventData),
            gi=int(data.gpuInstanceId),
            ci=int(data.computeInstanceId),
        )

    def address_of(self, handle: Handle) -> int | None:
        """Return the value of NvmlEvent.device for this handle; no call to the driver."""
        return _address(handle)

    def uuid_at(self, address: int) -> str:
        """Return the UUID of the device whose handle is at an address."""
        handle = ctypes.cast(ctypes.c_void_p(address), pynvml.c_nvmlDevice_t)
        return self.uuid(Handle(handle))


def printable(value: object) -> str:
    """Return a text of the driver with invalid UTF-8 and control characters escaped.

    Terminals, logs, labels and files get it as it is, so it is made harmless where it enters.
    """
    text = value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)


def _bytes_in(record: ctypes.Structure, name: str) -> object:
    """Return a field as the driver filled it; the binding decodes it strictly."""
    return ctypes.Structure.__getattribute__(record, name)


def _address(handle: Any) -> int | None:
    address: int | None = ctypes.cast(handle, ctypes.c_void_p).value
    return address


def not_supported(error: NvmlError) -> bool:
    """Whether an error only means that this GPU, driver or user cannot have the answer."""
    return error.code in (NvmlCode.NOT_SUPPORTED, NvmlCode.NO_PERMISSION, NvmlCode.FUNCTION_NOT_FOUND)


class LibraryLocation(msgspec.Struct, frozen=True):
    """Where to search for libnvidia-ml.so.1."""

    path: Path | None = None
    """``--nvml-library``: if given, the only candidate. A simulated node must never fall through to
    the machine's own driver."""
    driver_root: Path = Path("/")
    """Where the driver is installed, as this process sees it."""

    def candidates(self) -> Iterable[str]:
        """Yield what to try, in order: the given path, the SONAME, then under the driver root."""
        if self.path is not None:
            yield str(self.path)
            return
        yield SONAME
        for directory in DRIVER_LIBRARY_DIRECTORIES:
            path = self.driver_root / directory / SONAME
            if path.exists():
                yield str(path)

    def describe(self) -> str:
        """Return where the library was searched for, for a sentence."""
        if self.path is not None:
            return f"at {self.path}"
        return f"in the library path (as {SONAME}) or under {self.driver_root}"


class LoadedLibrary(msgspec.Struct, frozen=True):
    """The library in use, and its file when it was loaded."""

    name: str
    identity: tuple[int, int, int] | None
    """Device, inode and modification time; None if the file could not be found."""

    def was_replaced(self) -> bool:
        """Whether a different file is at its path now: a new driver was installed."""
        return self.identity is not None and _identity_of(self.name) not in (None, self.identity)


def load(location: LibraryLocation) -> LoadedLibrary:
    """Load the first library that can be loaded and hand it to pynvml. Blocks.

    Raises LibraryMissingError, which names the next step.
    """
    problem = ""
    for name in location.candidates():
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            # The message begins with the name of the missing file, which may be a dependency's.
            is_missing = str(error).startswith(f"{name}: ") and "No such file" in str(error)
            problem = problem or ("" if is_missing else str(error))
            continue
        _use(library)
        path = _path_of(library, name)
        return LoadedLibrary(name=path, identity=_identity_of(path))
    if problem:
        raise LibraryMissingError(
            f"The NVIDIA driver library cannot be loaded: {problem}; reinstall the driver, or name another"
            " libnvidia-ml.so.1 with --nvml-library"
        )
    raise LibraryMissingError(
        f"No NVIDIA driver library was found {location.describe()}: install the NVIDIA driver, "
        "or name its libnvidia-ml.so.1 with --nvml-library"
    )


def _use(library: ctypes.CDLL) -> None:
    # pynvml keeps one library and the functions found in it, both for the whole process.
    if pynvml.nvmlLib is None or pynvml.nvmlLib._handle != library._handle:  # noqa: SLF001 - no public way
        pynvml.nvmlLib = library
        pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001 - see above


class _DlInfo(ctypes.Structure):
    _fields_ = (
        ("file_name", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    )


def _path_of(library: ctypes.CDLL, name: str) -> str:
    """Return the file the loader chose for a name."""
    info = _DlInfo()
    try:
        address = ctypes.cast(library.nvmlInitWithFlags, ctypes.c_void_p)
        found = ctypes.CDLL(None).dladdr(address, ctypes.byref(info))
    except AttributeError:
        return name
    return os.fsdecode(info.file_name) if found and info.file_name else name


def _identity_of(path: str) -> tuple[int, int, int] | None:
    try:
        seen = os.stat(path)  # noqa: PTH116 - a name, not a Path
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_mtime_ns
