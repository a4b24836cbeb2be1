"""The emulated kubelet at the real one's place; its view of the node is kept in the file that is named.

Run by the unit kubelet.service of a booted root, with the Python that the simulated node was installed into.
"""

import asyncio
import json
import signal
import sys
from functools import partial
from pathlib import Path

from agent.simulation.kubelet import EmulatedKubelet

RESOURCE = "nvidia.com/gpu"
KUBELET = Path("/var/lib/kubelet")


async def main(shown: Path) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with EmulatedKubelet(KUBELET / "device-plugins", KUBELET / "pod-resources") as kubelet:
        show = asyncio.create_task(follow(kubelet, shown))  # noqa: TID251 - ended below
        await stopped.wait()
        show.cancel()


async def follow(kubelet: EmulatedKubelet, shown: Path) -> None:
    now = numbers(kubelet)
    while True:
        draft = shown.with_suffix(".new")
        draft.write_text(json.dumps(now))
        draft.rename(shown)
        await kubelet.wait_for(partial(has_others_than, now), 1e6)
        now = numbers(kubelet)


def numbers(kubelet: EmulatedKubelet) -> list[int]:
    return [kubelet.capacity(RESOURCE), kubelet.allocatable(RESOURCE)]


def has_others_than(before: list[int], kubelet: EmulatedKubelet) -> bool:
    return numbers(kubelet) != before


asyncio.run(main(Path(sys.argv[1])))
