"""Pods from a folder of manifests, as a kubelet without an API server runs them.

Guarantees: a file that comes is one pod, and its pod goes with it; a file that is no manifest of a pod, or
whose name begins with a dot, is none. The folder is read at each event of inotify.

Source: kubernetes pkg/kubelet/config/file.go: the pod's name is followed by the node's.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

import yaml

from agent.directory_watch import ChangeWaiter, DirectoryWatch
from agent.errors import AgentError
from agent.simulation.kubelet.pods import Requests

NODE_NAME: Final = "emulated"
MAX_MANIFEST_BYTES: Final = 1_048_576
_RECHECK_NS: Final = 20_000_000_000
"""How often the folder is read without an event: the kubelet's fileCheckFrequency."""


class Runner(Protocol):
    """What runs pods."""

    async def run_pod(self, name: str, namespace: str, containers: Requests) -> object:
        """Admit a pod."""

    def delete_pod(self, name: str, namespace: str) -> None:
        """Remove a pod."""


class StaticPods:
    """The pods of one folder; ``spawn`` owns the tasks in which they are admitted."""

    def __init__(
        self,
        directory: Path,
        runner: Runner,
        spawn: Callable[[Coroutine[Any, Any, object], str], asyncio.Task[Any]],
    ) -> None:
        self._directory = directory
        self._runner = runner
        self._spawn = spawn
        self._pods: dict[str, tuple[str, str, asyncio.Task[Any]]] = {}

    async def run(self) -> None:
        """Follow the folder until cancelled."""
        waiter = ChangeWaiter()
        try:
            waiter.use(DirectoryWatch(self._directory))
            while True:
                self._scan()
                await waiter.wait(_RECHECK_NS)
        finally:
            waiter.close()

    def _scan(self) -> None:
        there = {path.name for path in self._directory.iterdir() if not path.name.startswith(".")}
        for gone in self._pods.keys() - there:
            name, namespace, admitting = self._pods.pop(gone)
            if admitting.done():
                self._runner.delete_pod(name, namespace)
            else:
                admitting.cancel()
        for file in sorted(there - self._pods.keys()):
            manifest = _pod(self._directory / file)
            if manifest is not None:
                name, namespace, requests = manifest
                task = self._spawn(
                    self._runner.run_pod(name, namespace, requests), f"kubelet-static-pod-{name}"
                )
                self._pods[file] = name, namespace, task


def _pod(path: Path) -> tuple[str, str, Requests] | None:
    """Return a manifest's pod: name, namespace, and what each container asks for; None: it is none."""
    try:
        with path.open("rb") as file:
            document: Any = yaml.safe_load(file.read(MAX_MANIFEST_BYTES))
        if document["kind"] != "Pod":
            return None
        name = f"{document['metadata']['name']}-{NODE_NAME}"
        requests = {str(each["name"]): _limits(each) for each in document["spec"]["containers"]}
        return name, str(document["metadata"].get("namespace") or "default"), requests
    except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError, AgentError):
        return None


def _limits(container: Any) -> dict[str, int]:
    limits = container.get("resources", {}).get("limits", {})
    # Other resources (cpu, memory) no plugin serves.
    return {str(name): int(amount) for name, amount in limits.items() if "/" in str(name)}
