"""Runs in the guest: plays every scenario with each loader, prints a line for each; exits 1 if one failed.

``python -m tests.vm.guest FOLDER [LOADER or PART...]``
"""

import asyncio
import os
import platform
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, get_args

from agent.errors import ProbeLoadError
from agent.probe.loading import load
from agent.probe.probe import Probe
from agent.probe.request import Request
from agent.simulation.gpu_processes import process
from agent.sources.ebpf import source as ebpf
from tests.probe import test_workloads, watcher
from tests.probe.test_workloads import GPUS, Machine
from tests.probe.watcher import Watcher, watching
from tests.sources import recorder
from tests.vm.module import OLDER_VERSION, VERSION, DriverModule
from tests.vm.scenarios import (
    FOLLOWING_THE_DRIVER,
    OF_DRIVER,
    READING_MAPS,
    Scenario,
    Stage,
    contexts_are_counted_exactly,
    every_call_is_traced,
    without_btf,
)

Loader = Literal["core", "bcc"]
Tier = Literal["driver", "syscalls"]

LOAD_S: Final = 600.0
"""A compiler takes up to a minute where every instruction is emulated, and five where others use the CPUs."""
WAIT_S: Final = LOAD_S + 60.0
SCENARIO_S: Final = 1_200.0

Workload = Callable[[Machine], Awaitable[None]]

WORKLOADS: Final[dict[str, Workload]] = {
    name: function for name, function in vars(test_workloads).items() if name.startswith("test_")
}
"""The tests that are run on the double in user space too."""


class Report:
    """What was played, and what came of it."""

    def __init__(self) -> None:
        self.passed = 0
        self.failed = 0

    async def play(self, where: str, name: str, scenario: Callable[[], Awaitable[object]]) -> None:
        """Play one scenario and print a line; why it failed is below it."""
        began = time.monotonic()
        why = ""
        try:
            async with asyncio.timeout(SCENARIO_S):
                await scenario()
        except Exception:  # noqa: BLE001 - it is reported, and the others go on
            why = traceback.format_exc()
        self.failed += bool(why)
        self.passed += not why
        verdict = "FAILED" if why else "ok"
        _print(f"{verdict:<7}{time.monotonic() - began:6.1f} s  {where:<14} {_words(name)}")
        for line in why.splitlines():
            self.print(line)

    def print(self, line: str) -> None:
        """Print something about the scenario before."""
        _print(f"        {line}")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _words(name: str) -> str:
    return name.removeprefix("test_").replace("_", " ")


@dataclass(frozen=True, slots=True)
class Guest:
    """What the host put into a folder, played with one loader."""

    report: Report
    folder: Path
    loader: Loader

    async def play(self, parts: Collection[str]) -> None:
        """Play these parts, or everything."""
        of_part = {
            "driver": self.follow_the_driver,
            "branches": self.follow_other_branches,
            "work": self.work_in_each_tier,
            "trace": self.trace,
            "no-btf": self.do_without_btf,
        }
        for name, play in of_part.items():
            if name in parts or not parts:
                await play()

    def driver(self, *, counts_uvm: bool = False, variant: str = "", version: str = VERSION) -> DriverModule:
        """Return the driver, not loaded, or one that differs."""
        module = DriverModule(self.folder / f"driver{variant}", counts_uvm=counts_uvm, version=version)
        module.unload_if_loaded()
        return module

    def request(self, *, trace_tgid: int = 0) -> Request:
        """Return how the probe is loaded."""
        made = str(self.folder / "gpu_probe.bpf.o")
        return Request(loader=self.loader, tier="driver", object_path=made, trace_tgid=trace_tgid)

    async def follow_the_driver(self) -> None:
        """One probe of tier driver, loaded before the driver is."""
        await self._probe_on("driver", self.driver(), self.request(), FOLLOWING_THE_DRIVER)

    async def follow_other_branches(self) -> None:
        """One source, there before any driver: whatever is loaded, it takes the best tier there can be."""
        where = f"{self.loader} branches"
        older = self.driver(variant="-frontend", version=OLDER_VERSION)
        steps = {
            "an older branch has its own entry points": (older, "driver", "nvidia_frontend_unlocked_ioctl"),
            "one that is not known is traced by system calls": (
                self.driver(variant="-unknown"),
                "syscalls",
                "",
            ),
            "a driver of today is traced again": (self.driver(), "driver", "nvidia_unlocked_ioctl"),
            "one that may not be traced is by system calls": (
                self.driver(variant="-nokprobe"),
                "syscalls",
                "",
            ),
        }
        async with AsyncExitStack() as stack:
            watched = await stack.enter_async_context(
                watching(older, GPUS, replace(self.request(), tier="auto"), tier="auto")
            )
            for name, (driver, tier, entry_point) in steps.items():
                step = partial(_comes, driver, watched, tier, entry_point)
                await self.report.play(where, name, step)

    async def trace(self) -> None:
        """A probe that reports every call of this process."""
        driver = self.driver()
        driver.load()
        await self._probe_on("trace", driver, self.request(trace_tgid=os.getpid()), (every_call_is_traced,))

    async def do_without_btf(self) -> None:
        """bcc has the kernel's own headers; the precompiled object cannot do without, and reports it."""
        driver = self.driver()
        driver.load()
        with without_btf():
            if self.loader == "bcc":
                await self._probe_on("no BTF", driver, self.request(), (contexts_are_counted_exactly,))
            else:
                await self.report.play("core no BTF", "its error has its code", self._is_rejected)

    async def work_in_each_tier(self) -> None:
        """Work in both."""
        for tier in get_args(Tier):
            await self.work(tier)

    async def work(self, tier: Tier) -> None:
        """Processes like CUDA programs, followed by the agent's source and checked by the driver's books."""
        where = f"{self.loader} {tier}"
        driver = self.driver(counts_uvm=tier == "syscalls")
        driver.load()
        async with AsyncExitStack() as stack:

            async def begin() -> None:
                following = watching(driver, GPUS, self.request(), tier=tier)
                begun.append(await stack.enter_async_context(following))

            begun: list[Watcher] = []
            await self.report.play(where, "source loads the probe", begin)
            for watched in begun:
                await self._work(where, driver, watched)
                if tier == "driver":
                    await self.report.play(
                        where, "source follows a reload", partial(_reload, driver, watched)
                    )

    async def _work(self, where: str, driver: DriverModule, watched: Watcher) -> None:
        for name, workload in WORKLOADS.items():
            await self.report.play(where, name, partial(_compare, driver, watched, workload))
        await self._play_all(where, Stage(watched.probe, driver), READING_MAPS)

    async def _probe_on(
        self, where: str, driver: DriverModule, request: Request, scenarios: tuple[Scenario, ...]
    ) -> None:
        where = f"{self.loader} {where}"
        probes: list[Probe] = []

        async def load_one() -> None:
            probes.append(await load(request, deadline_s=LOAD_S))

        await self.report.play(where, "load", load_one)
        for probe in probes:
            self.report.print(f"{probe.load_ms} ms to load, {probe.attach_ms} ms to attach")
            await self._play_all(where, Stage(probe, driver), scenarios)
            probe.close()

    async def _play_all(self, where: str, stage: Stage, scenarios: tuple[Scenario, ...]) -> None:
        for scenario in scenarios:
            await self.report.play(where, scenario.__name__, partial(_played, scenario, stage))

    async def _is_rejected(self) -> None:
        try:
            probe = await load(self.request(), deadline_s=LOAD_S)
        except ProbeLoadError as error:
            code = error.code
        else:
            probe.close()
            code = "none"
        assert code == "bpf_unsupported", code


async def _played(scenario: Scenario, stage: Stage) -> None:
    scenario(stage)


async def _compare(driver: DriverModule, watched: Watcher, workload: Workload) -> None:
    driver.begin_anew()
    async with AsyncExitStack() as processes:
        await workload(Machine(driver, watched, processes, driver.version))


async def _comes(driver: DriverModule, watched: Watcher, tier: str, entry_point: str) -> None:
    """Load a driver under the source, and work on it."""
    driver.load()
    await recorder.until(lambda: _is_followed(watched.probe, tier, entry_point))
    assert bool(watched.probe.why_not_driver) == (tier != "driver"), watched.probe.why_not_driver
    for workload in (
        test_workloads.test_contexts_that_are_created_and_destroyed,
        test_workloads.test_a_child_that_keeps_the_files,
    ):
        await _compare(driver, watched, workload)


def _is_followed(probe: Probe, tier: str, entry_point: str) -> bool:
    traced = set(probe.entry_points.values())
    return probe.tier == tier and not probe.missing and (entry_point in traced if entry_point else not traced)


async def _reload(driver: DriverModule, watched: Watcher) -> None:
    """Load the driver anew under the source, and work on it."""
    driver.unload()
    await recorder.until(lambda: set(watched.probe.missing) == OF_DRIVER)
    driver.load()
    await recorder.until(lambda: not watched.probe.missing)
    await _compare(driver, watched, test_workloads.test_an_exit_that_frees_nothing)


async def play(folder: Path, loaders: tuple[Loader, ...], parts: Collection[str]) -> int:
    """Play these parts with these loaders; returns the exit status."""
    report = Report()
    for loader in loaders:
        await Guest(report, folder, loader).play(parts)
    _print(f"{report.passed} passed, {report.failed} failed on Linux {platform.release()}")
    return 1 if report.failed or not report.passed else 0


def main() -> int:
    """Play what is asked for."""
    folder, *names = sys.argv[1:]
    loaders = tuple(name for name in get_args(Loader) if name in names or not names)
    parts = [name for name in names if name not in loaders]
    # Every wait of theirs is for a machine that is not emulated.
    for module in (recorder, watcher):
        vars(module)["PATIENCE_S"] = WAIT_S
    vars(process)["ANSWERS_WITHIN_S"] = WAIT_S
    vars(ebpf)["load"] = partial(load, deadline_s=LOAD_S)
    return asyncio.run(play(Path(folder), loaders, parts))


if __name__ == "__main__":
    sys.exit(main())
