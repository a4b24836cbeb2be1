"""NVML clients for tests: real pynvml on the library of a simulated node, in this process and in others."""

import contextlib
import ctypes
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pynvml

PATIENCE_S = 60.0
"""How long a test waits for what must happen; only a broken library makes it wait that long."""

_WORKER = """
import ctypes, json, sys
import pynvml
pynvml.nvmlLib = ctypes.CDLL(sys.argv[1])
kept = {}
def value(given):
    return kept[given[1:]] if isinstance(given, str) and given.startswith("$") else given
for line in sys.stdin:
    keep, name, given = json.loads(line)
    try:
        result = getattr(pynvml, name)(*map(value, given))
        answer = {"code": 0}
        if keep:
            kept[keep] = result
        elif isinstance(result, pynvml.c_nvmlEventData_t):
            answer["result"] = [result.eventType, result.eventData, pynvml.nvmlDeviceGetUUID(result.device)]
        else:
            answer["result"] = result
    except pynvml.NVMLError as error:
        answer = {"code": error.value}
    print(json.dumps(answer), flush=True)
"""


class NvmlCallError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(f"NVML answered {code}")
        self.code = code


class NvmlProcess:
    """Another process with pynvml: one call at a time, handles are kept there under names ("$name")."""

    def __init__(self, library: Path) -> None:
        command = [sys.executable, "-c", _WORKER, str(library)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self, name: str, *given: object, keep: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([keep, name, given]) + "\n")
        self._process.stdin.flush()

    def finish(self) -> Any:
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        if answer["code"]:
            raise NvmlCallError(answer["code"])
        return answer.get("result")

    def call(self, name: str, *given: object, keep: str = "") -> Any:
        self.start(name, *given, keep=keep)
        return self.finish()

    def listen(self, gpus: int) -> None:
        """Initialise and register for the XIDs of the first GPUs."""
        self.call("nvmlInit")
        self.call("nvmlEventSetCreate", keep="events")
        for index in range(gpus):
            self.call("nvmlDeviceGetHandleByIndex", index, keep=f"gpu{index}")
            self.call("nvmlDeviceRegisterEvents", f"$gpu{index}", 8, "$events")

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def nvml_process(library: Path) -> Iterator[NvmlProcess]:
    process = NvmlProcess(library)
    try:
        yield process
    finally:
        process.kill()


@contextlib.contextmanager
def nvml_in_process(library: Path) -> Iterator[ModuleType]:
    """Point pynvml of this process to a library; it is shut down and forgotten afterwards."""
    pynvml._nvmlGetFunctionPointer_cache.clear()
    pynvml.nvmlLib = ctypes.CDLL(str(library))
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            while True:
                pynvml.nvmlShutdown()
        pynvml._nvmlGetFunctionPointer_cache.clear()
        pynvml.nvmlLib = None
