"""Node presets: real machines as data, and nodes written inline on top of them.

A preset is a YAML file beside this module. An inline node is the same mapping, with `preset:` to start from
one; its `gpu:` then changes every GPU, and `gpus:` is either a list with one mapping of changes for each GPU
or the number of GPUs to keep of the preset.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from agent.simulation.presets.mig import (
    PlacedMigDevice,
    PresetError,
    gpu_uuid,
    mig_uuid,
    place_mig_devices,
)
from agent.simulation.presets.spec import (
    MAX_NVLINKS,
    ClockSpec,
    FabricSpec,
    GpuSpec,
    InforomSpec,
    MigDeviceSpec,
    MigProfileSpec,
    MigSpec,
    NodeSpec,
    NvLinkSpec,
    PcieSpec,
    ThermalSpec,
)

__all__ = [
    "ClockSpec",
    "FabricSpec",
    "GpuSpec",
    "InforomSpec",
    "MigDeviceSpec",
    "MigProfileSpec",
    "MigSpec",
    "NodeSpec",
    "NvLinkSpec",
    "PcieSpec",
    "PlacedMigDevice",
    "PresetError",
    "ThermalSpec",
    "gpu_uuid",
    "load_preset",
    "mig_uuid",
    "place_mig_devices",
    "preset_names",
]

_Record = TypeVar("_Record", bound=msgspec.Struct)
_DIRECTORY = Path(__file__).parent
_NODE_KEYS = ("driver_version", "nvml_version", "cuda_version")


def preset_names() -> list[str]:
    """List the presets that come with the package."""
    return sorted(path.stem for path in _DIRECTORY.glob("*.yaml"))


def load_preset(node: str | Mapping[str, object]) -> NodeSpec:
    """Build the node of a preset's name or of an inline mapping. Raises PresetError with the key's path."""
    raw = _named(node) if isinstance(node, str) else _inline(node)
    gpus = [_gpu(position, gpu) for position, gpu in enumerate(_gpu_mappings(raw))]
    spec = _convert({key: raw.get(key) for key in _NODE_KEYS} | {"gpus": gpus}, NodeSpec, "")
    _reject_duplicates(spec)
    return spec


def _named(name: str) -> dict[str, object]:
    if name not in preset_names():
        raise PresetError(f"preset: there is no {name!r}, choose from {', '.join(preset_names())}")
    loaded = yaml.safe_load((_DIRECTORY / f"{name}.yaml").read_text(encoding="utf-8"))
    return _mapping(loaded, f"preset {name}")


def _inline(node: Mapping[str, object]) -> dict[str, object]:
    raw = dict(_mapping(node, "node"))
    unknown = sorted(set(raw) - {"preset", "gpu", "gpus", *_NODE_KEYS})
    if unknown:
        raise PresetError(
            f"{unknown[0]}: unknown key of a node, it accepts preset, gpu, gpus, {', '.join(_NODE_KEYS)}"
        )
    name = raw.pop("preset", None)
    if name is None:
        return raw
    if not isinstance(name, str):
        raise PresetError("preset: expected a preset's name")
    return _on_top(_named(name), raw)


def _on_top(base: dict[str, object], changes: dict[str, object]) -> dict[str, object]:
    merged = base | {key: changes[key] for key in _NODE_KEYS if key in changes}
    common = _mapping(changes.get("gpu", {}), "gpu")
    gpus = [_merge(_mapping(gpu, "gpus"), common) for gpu in _gpu_mappings(base)]
    wanted = changes.get("gpus", len(gpus))
    if isinstance(wanted, list):
        own = [_mapping(gpu, f"gpus[{position}]") for position, gpu in enumerate(wanted)]
    elif isinstance(wanted, int) and not isinstance(wanted, bool):
        own = [{} for _ in range(wanted)]
    else:
        raise PresetError("gpus: expected a number or a list")
    if len(own) > len(gpus):
        raise PresetError(f"gpus: {len(own)} wanted, the preset has {len(gpus)}")
    merged["gpus"] = [_merge(gpu, mine) for gpu, mine in zip(gpus, own, strict=False)]
    merged["gpu"] = {}
    return merged


def _gpu_mappings(raw: Mapping[str, object]) -> list[dict[str, object]]:
    common = _mapping(raw.get("gpu", {}), "gpu")
    own = raw.get("gpus", [])
    if not isinstance(own, list):
        raise PresetError("gpus: expected a list")
    return [_merge(common, _mapping(gpu, f"gpus[{position}]")) for position, gpu in enumerate(own)]


def _gpu(position: int, raw: dict[str, object]) -> GpuSpec:
    filled = {"uuid": gpu_uuid(position), "minor": position, "serial": f"13216200{position:05d}"} | raw
    gpu = _convert(filled, GpuSpec, f"gpus[{position}]")
    if gpu.nvlink is not None and len(gpu.nvlink.ends()) > MAX_NVLINKS:
        raise PresetError(f"gpus[{position}].nvlink.peers: more than {MAX_NVLINKS} links")
    if gpu.mig is not None:
        try:
            place_mig_devices(position, gpu.mig.profiles, gpu.mig.devices)
        except PresetError as error:
            raise PresetError(f"gpus[{position}].{error}") from None
    return gpu


def _reject_duplicates(spec: NodeSpec) -> None:
    for key in ("uuid", "pci_bus_id", "minor"):
        seen: dict[object, int] = {}
        for position, gpu in enumerate(spec.gpus):
            value = getattr(gpu, key)
            if value in seen:
                raise PresetError(f"gpus[{position}].{key}: {value} is gpus[{seen[value]}]'s already")
            seen[value] = position


def _mapping(value: object, where: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise PresetError(f"{where}: expected a mapping")
    for key in value:
        if not isinstance(key, str):
            raise PresetError(f"{where}: the key {key!r} is not a text")
    return dict(value)


def _merge(base: Mapping[str, object], changes: Mapping[str, object]) -> dict[str, object]:
    """Lay changes over a mapping: nested mappings are merged, everything else is replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merge(_mapping(old, key), _mapping(value, key)) if both else value
    return merged


def _convert(raw: Mapping[str, object], record: type[_Record], where: str) -> _Record:
    try:
        return msgspec.convert(raw, record)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `$")
        path = (where + place.rstrip("`")).removeprefix(".")
        raise PresetError(f"{path or 'node'}: {problem[0].lower()}{problem[1:]}") from None
