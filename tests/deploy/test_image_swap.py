"""NVIDIA's manifests with this image and nothing else changed.

What a container of NVIDIA's chart or of its static manifests is started with was written down by hand, value
by value. Source: NVIDIA/k8s-device-plugin v0.20.0: deployments/helm/nvidia-device-plugin, deployments/static.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

from agent.config.load import load
from agent.config.settings import Settings
from agent.model.policy import Injection, Policy
from agent.model.sharing import Share, Sharing
from agent.model.structs import replace
from agent.simulation.kubelet import PodOutcome
from agent.simulation.node import SimulatedNode
from tests.harness import (
    GPU,
    ROOT,
    AgentProcess,
    simulated_node,
    started,
    uuids,
    wait_allocatable,
)

CHART: Final = {
    "MPS_ROOT": "/run/nvidia/mps",
    "NVIDIA_VISIBLE_DEVICES": "all",
    "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
}
"""What the chart sets whatever the values."""
MIG_MONITOR: Final = {"NVIDIA_MIG_MONITOR_DEVICES": "all"}
"""What it sets where some configuration may use MIG."""
CONFIG_MAP: Final = {"CONFIG_FILE": "/config/config.yaml"} | MIG_MONITOR

DEFAULT: Final = Policy(injection=Injection(mps_root="/run/nvidia/mps"))
STATIC: Final = Policy()


def injected(**changes: Any) -> Policy:
    return replace(DEFAULT, injection=replace(DEFAULT.injection, **changes))


@dataclass(frozen=True)
class Values:
    """Values of the chart, what the container of the plugin gets for them, and what that comes to."""

    name: str
    environment: Mapping[str, str] = field(default_factory=dict)
    policy: Policy = DEFAULT
    settings: Mapping[str, object] = field(default_factory=dict)
    cdi: Mapping[str, object] = field(default_factory=dict)


TABLE: Final = (
    Values("nothing"),
    Values("migStrategy: none", {"MIG_STRATEGY": "none"}),
    Values(
        "migStrategy: single",
        {"MIG_STRATEGY": "single"} | MIG_MONITOR,
        replace(DEFAULT, mig_strategy="single"),
    ),
    Values(
        "migStrategy: mixed", {"MIG_STRATEGY": "mixed"} | MIG_MONITOR, replace(DEFAULT, mig_strategy="mixed")
    ),
    # A value that is an empty text is rendered as null, which is an empty variable.
    Values("migStrategy: ''", {"MIG_STRATEGY": ""}),
    Values("failOnInitError: true", {"FAIL_ON_INIT_ERROR": "true"}, settings={"fail_on_init_error": True}),
    Values("failOnInitError: false", {"FAIL_ON_INIT_ERROR": "false"}, settings={"fail_on_init_error": False}),
    Values("compatWithCPUManager: true", {"PASS_DEVICE_SPECS": "true"}, injected(pass_device_specs=True)),
    Values("compatWithCPUManager: false", {"PASS_DEVICE_SPECS": "false"}),
    Values("deviceListStrategy: envvar", {"DEVICE_LIST_STRATEGY": "envvar"}),
    Values(
        "deviceListStrategy: volume-mounts",
        {"DEVICE_LIST_STRATEGY": "volume-mounts"},
        injected(strategies=("volume-mounts",)),
    ),
    Values(
        "deviceListStrategy: cdi-annotations",
        {"DEVICE_LIST_STRATEGY": "cdi-annotations"},
        injected(strategies=("cdi-annotations",)),
    ),
    Values(
        "deviceListStrategy: cdi-cri", {"DEVICE_LIST_STRATEGY": "cdi-cri"}, injected(strategies=("cdi-cri",))
    ),
    Values(
        "deviceListStrategy: envvar,cdi-annotations",
        {"DEVICE_LIST_STRATEGY": "envvar,cdi-annotations"},
        injected(strategies=("envvar", "cdi-annotations")),
    ),
    Values("deviceListStrategy: ''", {"DEVICE_LIST_STRATEGY": ""}),
    Values("deviceIDStrategy: uuid", {"DEVICE_ID_STRATEGY": "uuid"}),
    Values("deviceIDStrategy: index", {"DEVICE_ID_STRATEGY": "index"}, injected(ids="index")),
    Values(
        "nvidiaDriverRoot: /",
        {"NVIDIA_DRIVER_ROOT": "/"},
        cdi={"driver_root": "/", "dev_root": "/", "driver_root_ctr_path": "/driver-root"},
    ),
    Values(
        "nvidiaDriverRoot: /run/nvidia/driver",
        {"NVIDIA_DRIVER_ROOT": "/run/nvidia/driver"},
        injected(device_root="/run/nvidia/driver"),
        cdi={"driver_root": "/run/nvidia/driver", "dev_root": "/run/nvidia/driver"},
    ),
    Values(
        "nvidiaDevRoot: ''",
        {"NVIDIA_DRIVER_ROOT": "/run/nvidia/driver", "NVIDIA_DEV_ROOT": ""},
        injected(device_root="/run/nvidia/driver"),
        cdi={"driver_root": "/run/nvidia/driver", "dev_root": "/run/nvidia/driver"},
    ),
    Values(
        "nvidiaDevRoot: /",
        {"NVIDIA_DRIVER_ROOT": "/run/nvidia/driver", "NVIDIA_DEV_ROOT": "/"},
        cdi={"driver_root": "/run/nvidia/driver", "dev_root": "/"},
    ),
    Values(
        "cdi.nvidiaHookPath",
        {"NVIDIA_CDI_HOOK_PATH": "/usr/local/nvidia/toolkit/nvidia-cdi-hook"},
        cdi={"hook_path": "/usr/local/nvidia/toolkit/nvidia-cdi-hook"},
    ),
    Values(
        "cdi.featureFlags",
        {"CDI_FEATURE_FLAGS": "disable-nvsandboxutils,enable-coherent-annotations"},
        cdi={"feature_flags": {"disable-nvsandboxutils", "enable-coherent-annotations"}},
    ),
    Values("cdi.featureFlags: ''", {"CDI_FEATURE_FLAGS": ""}, cdi={"feature_flags": set()}),
    Values("gdrcopyEnabled: true", {"GDRCOPY_ENABLED": "true"}, injected(gdrcopy=True)),
    Values("gdsEnabled: true", {"GDS_ENABLED": "true"}, injected(gds=True)),
    Values("mofedEnabled: true", {"MOFED_ENABLED": "true"}, injected(mofed=True)),
    Values(
        "all three false",
        {"GDRCOPY_ENABLED": "false", "GDS_ENABLED": "false", "MOFED_ENABLED": "false"},
    ),
    Values("deviceDiscoveryStrategy: auto", {"DEVICE_DISCOVERY_STRATEGY": "auto"}),
    Values("deviceDiscoveryStrategy: nvml", {"DEVICE_DISCOVERY_STRATEGY": "nvml"}),
    Values("mps.root: /var/lib/mps", {"MPS_ROOT": "/var/lib/mps"}, injected(mps_root="/var/lib/mps")),
    Values("mps.root: ''", {"MPS_ROOT": ""}, STATIC),
)


def settings_of(values: Values, **flags: str) -> Settings:
    return load(flags, CHART | dict(values.environment))


@pytest.mark.parametrize("values", TABLE, ids=[values.name for values in TABLE])
def test_each_value_of_the_chart_means_what_it_means_to_nvidias_plugin(values: Values) -> None:
    settings = settings_of(values)
    assert settings.policy == values.policy
    assert {name: getattr(settings, name) for name in values.settings} == values.settings
    assert {name: getattr(settings.cdi, name) for name in values.cdi} == values.cdi
    assert settings.warnings == ()


def test_no_variable_of_the_chart_changes_anything_that_is_ours() -> None:
    everything = dict[str, str]()
    for values in TABLE:
        everything |= values.environment
    origins = load({}, CHART | MIG_MONITOR | everything).origins
    of_chart = {name for name, origin in origins.items() if origin != "default"}
    # NVIDIA's two and the runtime's are no settings of the agent.
    unread = {"NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NVIDIA_MIG_MONITOR_DEVICES"}
    assert {origins[name] for name in of_chart} == (CHART | everything).keys() - unread - {
        name for name, text in everything.items() if text == "" and name != "NVIDIA_DEV_ROOT"
    } | {"CDI_FEATURE_FLAGS", "MPS_ROOT"}


CONFIGURATIONS: Final = (
    # The chart's README and values, and what config-manager makes of a node without a configuration.
    ("version: v1\nflags:\n  migStrategy: none\n", DEFAULT),
    ("version: v1\nflags: {migStrategy: mixed}\n", replace(DEFAULT, mig_strategy="mixed")),
    (
        """\
version: v1
flags:
  migStrategy: "none"
  failOnInitError: true
  nvidiaDriverRoot: "/"
  plugin:
    passDeviceSpecs: false
    deviceListStrategy: envvar
    deviceIDStrategy: uuid
""",
        DEFAULT,
    ),
    (
        """\
version: v1
flags:
  migStrategy: none
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 10
""",
        replace(
            DEFAULT,
            sharing=Sharing(strategy="time-slicing", shares=(Share("nvidia.com/gpu", 10),)),  # type: ignore[arg-type]
        ),
    ),
    (
        "sharing: {mps: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}",
        replace(
            DEFAULT,
            sharing=Sharing(
                strategy="mps",
                shares=(Share("nvidia.com/gpu", 4),),  # type: ignore[arg-type]
                rename_by_default=True,
                fail_requests_greater_than_one=True,
            ),
        ),
    ),
)


@pytest.mark.parametrize(("text", "policy"), CONFIGURATIONS)
def test_each_configuration_of_the_chart_is_taken(tmp_path: Path, text: str, policy: Policy) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    settings = load({}, CHART | MIG_MONITOR | {"CONFIG_FILE": str(path)})
    assert settings.policy == policy
    assert settings.warnings == ()


def test_a_node_for_which_config_manager_chose_nothing_has_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.symlink_to("/dev/null")
    settings = load({}, CHART | MIG_MONITOR | {"CONFIG_FILE": str(path)})
    assert (settings.policy, settings.warnings) == (DEFAULT, ())


# In a container as the manifest describes it

CONTAINER: Final = """\
set -e
root=$1; devices=$2; volumes=$3; rights=$4; shift 4
mount --make-rprivate /
mount -t tmpfs -o mode=755 none "$root"
for each in /*; do
  name=${each##*/}
  case $name in dev|run|var|tmp|mnt|media) continue ;; esac
  if [ -L "$each" ]; then cp -P "$each" "$root/$name"
  elif [ -d "$each" ]; then mkdir "$root/$name"; mount --rbind "$each" "$root/$name"; fi
done
mkdir -p "$root/run" "$root/var/lib" "$root/dev/shm"
ln -s ../run "$root/var/run"
mount -t tmpfs none "$root/dev/shm"
for name in null zero full random urandom; do
  touch "$root/dev/$name"; mount --bind "/dev/$name" "$root/dev/$name"
done
for each in "$devices"/nvidia*; do
  [ -d "$each" ] || cp -a /dev/null "$root/dev/${each##*/}"
done
IFS="
"
for each in $volumes; do
  mkdir -p "$root/${each#*:}"
  mount --rbind "${each%%:*}" "$root/${each#*:}"
done
mount -o remount,ro "$root"
unset IFS
[ "$rights" = all ] && exec chroot "$root" "$@"
drop="--bounding-set=$rights --inh-caps=$rights --ambient-caps=-all"
[ "$rights" = -all ] && drop="$drop --no-new-privs"
exec chroot "$root" setpriv $drop "$@"
"""
"""The image is this machine, read only, with the volumes of the manifest and the devices of the runtime."""

PROGRAM: Final = f"""\
#!{sys.executable}
import sys
sys.path.insert(0, {str(ROOT)!r})
from agent.entry_points import device_plugin
sys.exit(device_plugin())
"""

NOTHING_ALLOWED: Final = "-all"
MAY_ADMINISTER: Final = "-all,+sys_admin"
PRIVILEGED: Final = "all"

HOST_PATHS: Final = {
    "var/lib/kubelet/device-plugins": "device-plugins",
    "driver-root": "driver",
    "mps": "mps",
    "dev/shm": "mps/shm",
    "var/run/cdi": "cdi",
}
"""Mount paths in the container, and which directory of the simulated node stands for the host's."""
STATIC_VOLUMES: Final = ("var/lib/kubelet/device-plugins",)
CHART_VOLUMES: Final = (*STATIC_VOLUMES, "mps", "dev/shm", "var/run/cdi")


@contextlib.asynccontextmanager
async def container(
    tmp_path: Path,
    node: SimulatedNode,
    environment: Mapping[str, str],
    *,
    rights: str = NOTHING_ALLOWED,
    volumes: Sequence[str] = CHART_VOLUMES,
    config: str | None = None,
) -> AsyncIterator[AgentProcess]:
    """Run nvidia-device-plugin in a container; beside the manifest's it gets the place of the simulation."""
    program, root = tmp_path / "nvidia-device-plugin", tmp_path / "root"
    program.write_text(PROGRAM)
    program.chmod(0o755)
    root.mkdir()
    host = node.directory.path
    # The image has the program, wherever on this machine it is.
    mounted = [f"{each}:{each}" for each in (ROOT, sys.prefix, sys.base_prefix, host, tmp_path)]
    mounted += [f"{host / HOST_PATHS[each]}:{each}" for each in volumes]
    if config is not None:
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "config.yaml").write_text(config)
        mounted.append(f"{tmp_path / 'config'}:config")
    for each in ("cdi", "mps/shm"):
        (host / each).mkdir(exist_ok=True)
    simulated = {
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "GPU_AGENT_NVML_LIBRARY": f"{host}/lib/libnvidia-ml.so.1",
        "GPU_AGENT_PROC_ROOT": f"{host}/proc",
        "GPU_AGENT_SYS_ROOT": f"{host}/sys",
        "GPU_AGENT_UEVENTS": "false",
        "GPU_AGENT_PROBE_TIER": "off",
        "GPU_AGENT_HTTP_LISTEN": "",
    }
    command = (
        *("unshare", "--mount", "sh", "-c", CONTAINER, "sh"),
        *(str(root), f"{host}/dev", "\n".join(mounted), rights, str(program)),
    )
    async with started(command, {}, simulated | dict(environment)) as agent:
        yield agent


@pytest.fixture
async def _can_contain(tmp_path: Path) -> None:
    """Skip where no container can be made."""
    (tmp_path / "try").mkdir()
    arguments = (str(tmp_path / "try"), "/nonexistent", "", NOTHING_ALLOWED, "true")
    made = await asyncio.create_subprocess_exec(
        "unshare", "--mount", "sh", "-c", CONTAINER, "sh", *arguments, stderr=asyncio.subprocess.DEVNULL
    )
    if await made.wait() != 0:
        pytest.skip("needs the right to make a container")


needs_container = pytest.mark.usefixtures("_can_contain")


async def run_pod(node: SimulatedNode, resource: str = GPU) -> PodOutcome:
    return await node.kubelet.run_pod("job", "ns1", {"main": {resource: 1}})


@pytest.mark.slow
@needs_container
async def test_the_static_manifest(tmp_path: Path) -> None:
    async with (
        simulated_node() as node,
        container(tmp_path, node, {}, volumes=STATIC_VOLUMES) as agent,
    ):
        await wait_allocatable(node.kubelet, 4)
        given = (await run_pod(node)).containers["main"]
        assert given.envs["NVIDIA_VISIBLE_DEVICES"] in uuids(node)
        assert given.device_specs == ()
        logged = {line["message"] for line in agent.log if line["level"] in {"warning", "error"}}
        # What it was not given is off, and no part of it fails for want of it.
        [only] = logged
        assert only.startswith("Some components are disabled: "), logged
        assert await agent.stop() == 0
        assert not (node.directory.device_plugins / "nvidia-gpu.sock").exists()


@pytest.mark.slow
@needs_container
async def test_the_static_manifest_for_the_cpu_manager(tmp_path: Path) -> None:
    async with (
        simulated_node() as node,
        container(tmp_path, node, {"PASS_DEVICE_SPECS": "true"}, rights=PRIVILEGED, volumes=STATIC_VOLUMES),
    ):
        await wait_allocatable(node.kubelet, 4)
        given = (await run_pod(node)).containers["main"]
        gpu = uuids(node).index(given.envs["NVIDIA_VISIBLE_DEVICES"])
        paths = [device.host_path for device in given.device_specs]
        assert f"/dev/nvidia{gpu}" in paths
        assert "/dev/nvidiactl" in paths


@pytest.mark.slow
@needs_container
async def test_the_chart_with_a_driver_container_and_cdi(tmp_path: Path) -> None:
    environment = CHART | {
        "DEVICE_LIST_STRATEGY": "cdi-annotations,cdi-cri",
        "NVIDIA_DRIVER_ROOT": "/run/nvidia/driver",
        "NVIDIA_DEV_ROOT": "/",
        "NVIDIA_CDI_HOOK_PATH": "/usr/local/nvidia/toolkit/nvidia-cdi-hook",
    }
    volumes = (*CHART_VOLUMES, "driver-root")
    async with (
        simulated_node() as node,
        container(tmp_path, node, environment, volumes=volumes) as agent,
    ):
        await wait_allocatable(node.kubelet, 4)
        given = (await run_pod(node)).containers["main"]
        [name] = given.cdi_devices
        kind, _, uuid = name.partition("=")
        assert (kind, uuid in uuids(node)) == ("k8s.device-plugin.nvidia.com/gpu", True)
        assert [text for key, text in given.annotations.items() if key.startswith("cdi.k8s.io/")] == [name]
        spec = json.loads((node.directory.path / "cdi/k8s.device-plugin.nvidia.com-gpu.json").read_text())
        edits = spec["containerEdits"]
        libraries = [mount["hostPath"] for mount in edits["mounts"] if "libcuda" in mount["hostPath"]]
        assert libraries
        assert all(path.startswith("/run/nvidia/driver/usr/lib/") for path in libraries)
        assert {node["hostPath"].rpartition("/")[0] for node in edits["deviceNodes"]} == {"/dev"}
        assert {hook["path"] for hook in edits["hooks"]} == {"/usr/local/nvidia/toolkit/nvidia-cdi-hook"}
        assert await agent.stop() == 0
        # The container has nothing else that it may write, and all pods that use MPS share the other.
        mps = node.directory.path / "mps"
        assert (mps / "gpu-agent" / "state.json").exists()
        assert list((mps / "shm").iterdir()) == []


@pytest.mark.slow
@needs_container
async def test_the_chart_with_a_config_map_and_mps(tmp_path: Path) -> None:
    config = "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n"
    async with (
        simulated_node() as node,
        container(
            tmp_path,
            node,
            CHART | CONFIG_MAP,
            config=config,
            rights=MAY_ADMINISTER,
        ),
    ):
        await node.kubelet.wait_for(lambda kubelet: kubelet.capacity(GPU) == 8, timeout_s=60)
        assert node.kubelet.allocatable(GPU) == 0
        (node.directory.path / "mps" / ".ready").touch()
        await wait_allocatable(node.kubelet, 8)
        given = (await run_pod(node)).containers["main"]
        assert given.envs["CUDA_MPS_PIPE_DIRECTORY"] == "/mps/nvidia.com/gpu/pipe"
        assert [(mount.host_path, mount.container_path) for mount in given.mounts] == [
            ("/run/nvidia/mps/nvidia.com/gpu/pipe", "/mps/nvidia.com/gpu/pipe"),
            ("/run/nvidia/mps/shm", "/dev/shm"),
        ]


@pytest.mark.slow
@needs_container
async def test_the_chart_with_mig(tmp_path: Path) -> None:
    sliced = {
        "preset": "4x-a30",
        "gpus": [{"mig": {"enabled": True, "devices": [{"profile": "2g.12gb"}, {"profile": "1g.6gb"}]}}, {}],
    }
    async with (
        simulated_node(sliced) as node,
        container(tmp_path, node, CHART | MIG_MONITOR | {"MIG_STRATEGY": "mixed"}, rights=MAY_ADMINISTER),
    ):
        await wait_allocatable(node.kubelet, 1)
        await wait_allocatable(node.kubelet, 1, resource="nvidia.com/mig-2g.12gb")
        await wait_allocatable(node.kubelet, 1, resource="nvidia.com/mig-1g.6gb")
        given = (await run_pod(node, "nvidia.com/mig-2g.12gb")).containers["main"]
        assert given.envs["NVIDIA_VISIBLE_DEVICES"].startswith("MIG-")
