"""Derives the holder of each device from the kubelet's lists: pure.

The kubelet also lists finished pods, with devices that it allocates again, and does not mark which pods
are finished. What follows from the lists alone:

- A device has one holder at most, and is allocated again only after its holder has finished. So where
  a pod is listed with a device that others had before, those others have finished, all their devices
  included, until they are listed with a different device (a new pod of the same name).
- Where several pods are listed with a device and none of them is newer, one of them holds it, and which
  is unknown. All are named then, with `` or `` between them.
- A finished pod that is alone with its device counts as its holder, unless it is known to have finished
  (pods.finished): the device may still be in use.

Source: kubernetes pkg/kubelet/cm/devicemanager/manager.go (UpdateAllocatedDevices),
pkg/kubelet/apis/podresources/server_v1.go.
"""

from collections.abc import Collection, Mapping

from agent.model.ids import DeviceId
from agent.sources.pods.wire import Claims

SEVERAL = " or "


class DeviceHolders:
    """Tracks the holders from one list to the next."""

    def __init__(self) -> None:
        self._before: Claims | None = None
        self._finished: set[str] = set()

    def forget(self) -> None:
        """Forget the last list: it is too old to compare the next one with."""
        self._before = None
        self._finished = set()

    def after(self, claims: Claims, finished: Collection[str] = ()) -> Mapping[DeviceId, str]:
        """Return the holder of each device, from the present list and the one before.

        ``finished`` are pods that are known to have finished.
        """
        claimants: dict[str, list[str]] = {}
        for pod, devices in claims.items():
            for device in devices:
                claimants.setdefault(device, []).append(pod)
        self._update_finished(claims, claimants)
        self._before = claims
        holders: dict[DeviceId, str] = {}
        for device, pods in sorted(claimants.items()):
            left = sorted(pod for pod in pods if pod not in self._finished and pod not in finished)
            if left:
                holders[DeviceId(device)] = SEVERAL.join(left)
        return holders

    def _update_finished(self, claims: Claims, claimants: Mapping[str, list[str]]) -> None:
        before = self._before
        if before is None:
            return
        self._finished = {
            pod for pod in self._finished if pod in claims and claims[pod] <= before.get(pod, frozenset())
        }
        for device, pods in claimants.items():
            came = [pod for pod in pods if device not in before.get(pod, frozenset())]
            if came:
                self._finished.update(pod for pod in pods if pod not in came)
