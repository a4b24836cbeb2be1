"""The kubelet that the contract suite asks: emulated, or a real one with ``--kubelet-dir``.

pytest tests/contract --kubelet-dir /var/lib/kubelet/device-plugins [--pod-resources-dir DIR]
    [--kubelet-manifests /etc/kubernetes/manifests]
    [--kubelet-restart 'systemctl kill -s $KUBELET_SIGNAL kubelet']

Either is asked in the same way: by its two sockets, a folder of manifests, its read-only port and a command.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agent.simulation.kubelet import EmulatedKubelet
from tests.contract.kubelet_under_test import KubeletUnderTest
from tests.contract.pods_page import pods_page


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kubelet contract")
    group.addoption(
        "--kubelet-dir",
        metavar="DIR",
        help="device-plugins directory of a running kubelet to ask instead of an emulated one",
    )
    group.addoption(
        "--pod-resources-dir",
        metavar="DIR",
        help="its pod-resources directory (default: beside --kubelet-dir)",
    )
    group.addoption(
        "--kubelet-manifests", metavar="DIR", help="its folder of static pods; without it no pod is run"
    )
    group.addoption(
        "--kubelet-pods-url",
        metavar="URL",
        default="http://127.0.0.1:10255/pods",
        help="where it shows its pods, over plain HTTP (kubelet --read-only-port=10255)",
    )
    group.addoption(
        "--kubelet-image",
        metavar="IMAGE",
        default="registry.k8s.io/pause:3.10",
        help="what a static pod runs; it has to be on the node",
    )
    group.addoption(
        "--kubelet-restart",
        metavar="CMD",
        help="shell command after which a new kubelet runs; KUBELET_SIGNAL is TERM or KILL",
    )


def _option(config: pytest.Config, name: str) -> str | None:
    """Return an option, also in a run of the whole suite, where this file's options are not known."""
    value: str | None = config.getoption(name, default=None)
    return value


@pytest.fixture
async def kubelet(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[KubeletUnderTest]:
    """The kubelet under test; an indirect parameter is an emulated one's dial timeout in seconds."""
    directory = _option(request.config, "--kubelet-dir")
    if directory is not None:
        pods = _option(request.config, "--pod-resources-dir") or str(Path(directory).parent / "pod-resources")
        manifests = _option(request.config, "--kubelet-manifests")
        real = KubeletUnderTest(
            Path(directory),
            Path(pods),
            manifests=Path(manifests) if manifests else None,
            pods_url=_option(request.config, "--kubelet-pods-url") or "",
            image=_option(request.config, "--kubelet-image") or "",
            restart=_option(request.config, "--kubelet-restart"),
        )
        async with real:
            yield real
        return
    dial_timeout_s: float = getattr(request, "param", 10.0)
    manifests_dir = tmp_path / "manifests"
    manifests_dir.mkdir()
    async with (
        EmulatedKubelet(
            tmp_path / "dp", tmp_path / "pr", dial_timeout_s=dial_timeout_s, manifests=manifests_dir
        ) as emulated,
        pods_page(emulated) as url,
        KubeletUnderTest(
            emulated.device_plugins,
            emulated.pod_resources,
            manifests=manifests_dir,
            pods_url=url,
            image="none",
            restart=f"if [ $KUBELET_SIGNAL = KILL ]; then kill -USR2 {os.getpid()};"
            f" else kill -USR1 {os.getpid()}; fi",
            capacity=emulated.capacity,
        ) as under_test,
    ):
        loop = asyncio.get_running_loop()
        restarts: set[asyncio.Task[None]] = set()
        for number, kill in ((signal.SIGUSR1, False), (signal.SIGUSR2, True)):
            loop.add_signal_handler(number, _restart, emulated, kill, restarts)
        try:
            yield under_test
        finally:
            for number in (signal.SIGUSR1, signal.SIGUSR2):
                loop.remove_signal_handler(number)
            await asyncio.gather(*restarts)


def _restart(emulated: EmulatedKubelet, kill: bool, restarts: set[asyncio.Task[None]]) -> None:
    restarts.add(asyncio.get_running_loop().create_task(emulated.restart(kill=kill)))
