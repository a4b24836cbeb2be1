"""A directory for the logs of each pod, by whose name others learn the pod's UID.

Source: kubernetes pkg/kubelet/kuberuntime/helpers.go (BuildPodLogsDirectory).
"""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from agent.simulation.kubelet.pods import Pod


def show_pods(directory: Path, pods: Iterable[Pod]) -> None:
    """Let the directory hold one of each pod, and none of any other."""
    wanted = {f"{pod.namespace}_{pod.name}_{pod.uid}" for pod in pods}
    # A folder that is gone is a fault under test; a real kubelet logs it and goes on.
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
        there = {path.name for path in directory.iterdir()}
        for name in there - wanted:
            (directory / name).rmdir()
        for name in wanted - there:
            (directory / name).mkdir()
