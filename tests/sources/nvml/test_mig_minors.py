"""Which capability nodes open a MIG device, according to the driver's table."""

from pathlib import Path

import pytest

from agent.model.gpu import Gpu, MigDevice
from agent.model.ids import GpuUuid
from agent.sources.nvml.inventory import DiscoveredGpu, ProbeResult
from agent.sources.nvml.library import Handle
from agent.sources.nvml.mig_minors import MAX_TABLE_BYTES, with_minors

TABLE = """\
config 1
monitor 2
gpu0/gi1/access 12
gpu0/gi1/ci0/access 13
gpu3/gi1/access 417
gpu3/gi1/ci0/access 418
gpu3/gi1/ci1/access 419
"""


def result(*mig_devices: MigDevice, minor: int | None = 3) -> ProbeResult:
    gpu = Gpu(
        uuid=GpuUuid("GPU-0"),
        index=0,
        minor=minor,
        name="",
        pci="0000:17:00.0",
        memory_bytes=0,
        compute_capability=None,
        numa_node=None,
        mig_enabled=True,
        mig_devices=mig_devices,
    )
    return ProbeResult(DiscoveredGpu(gpu, Handle(object()), "00000000:17:00.0"), None)


def mig(ci: int, gi: int = 1) -> MigDevice:
    return MigDevice(uuid=f"MIG-{gi}-{ci}", gi=gi, ci=ci, profile="1g.5gb", memory_bytes=0)


def table(directory: Path, content: str) -> Path:
    path = directory / "driver/nvidia-caps/mig-minors"
    path.parent.mkdir(parents=True)
    path.write_text(content)
    return directory


def minors(probed: ProbeResult) -> list[tuple[int | None, int | None]]:
    return [(each.gi_minor, each.ci_minor) for each in probed.discovered.gpu.mig_devices]


def test_the_nodes_of_a_mig_device_are_those_of_its_instances_on_its_gpu(tmp_path: Path) -> None:
    proc = table(tmp_path, TABLE)
    assert minors(with_minors(result(mig(0), mig(1)), proc)) == [(417, 418), (417, 419)]


@pytest.mark.parametrize("content", ["", "gpu3/gi1/access x\n", "\0" * 100, "gpu3/gi2/access 5\n"])
def test_what_the_table_does_not_list_is_unknown(tmp_path: Path, content: str) -> None:
    assert minors(with_minors(result(mig(0)), table(tmp_path, content))) == [(None, None)]


def test_without_a_table_or_a_minor_of_the_gpu_minors_are_unknown(tmp_path: Path) -> None:
    assert minors(with_minors(result(mig(0)), tmp_path)) == [(None, None)]
    assert minors(with_minors(result(mig(0), minor=None), table(tmp_path, TABLE))) == [(None, None)]


def test_the_table_is_read_for_new_devices_only(tmp_path: Path) -> None:
    known = with_minors(result(mig(0)), table(tmp_path, TABLE))
    assert with_minors(known, tmp_path / "nothing") is known
    unsplit = result()
    assert with_minors(unsplit, tmp_path / "nothing") is unsplit


def test_a_table_is_read_up_to_its_bound(tmp_path: Path) -> None:
    proc = table(tmp_path, "x" * MAX_TABLE_BYTES + "\n" + TABLE)
    assert minors(with_minors(result(mig(0)), proc)) == [(None, None)]
