"""Processes in a simulated node's /proc, which hold GPUs and are nowhere else."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from agent.simulation.node import SimulatedNode

CONTAINER = "c0" * 32
BY_PROC = {"probe_tier": "procfs", "pods_poll": "200ms"}
"""Flags of an agent that reads holders off the node's /proc."""


class SimulatedProcesses:
    """The processes of one node, as proc(5) shows them."""

    def __init__(self, node: SimulatedNode) -> None:
        self._proc = node.directory.proc
        self._pod_logs = node.directory.pod_logs
        self._cgroup_root = node.directory.agent_flags()["kubelet-cgroup-root"]

    def add(
        self,
        pid: int,
        *gpus: int,
        pod: str | None = None,
        comm: str = "python3",
        state: str = "S",
        start: int | None = None,
    ) -> None:
        """Show a process that has GPUs, by minor, open; ``pod`` is ``namespace/name``."""
        draft = self._proc / f".{pid}"
        (draft / "fd").mkdir(parents=True)
        for number, target in enumerate(_targets(gpus)):
            (draft / "fd" / str(number)).symlink_to(target)
        numbers = " ".join(["0"] * 18)
        (draft / "stat").write_text(f"{pid} ({comm}) {state} {numbers} {pid if start is None else start} 0\n")
        (draft / "status").write_text("SigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n")
        (draft / "cgroup").write_text(f"0::{'/' if pod is None else self._cgroup(pod)}\n")
        # A reader sees all of it or nothing.
        draft.rename(self._proc / str(pid))

    def end(self, pid: int) -> None:
        """Let a process end."""
        gone = self._proc / f".{pid}"
        (self._proc / str(pid)).rename(gone)
        shutil.rmtree(gone)

    def _cgroup(self, pod: str) -> str:
        prefix = pod.replace("/", "_", 1) + "_"
        (uid,) = (
            path.name.removeprefix(prefix)
            for path in self._pod_logs.iterdir()
            if path.name.startswith(prefix)
        )
        return f"{self._cgroup_root}/kubepods/burstable/pod{uid}/{CONTAINER}"


def _targets(gpus: Sequence[int]) -> list[Path]:
    return [Path("/dev/nvidiactl"), *(Path(f"/dev/nvidia{minor}") for minor in gpus)]
