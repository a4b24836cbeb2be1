"""The systemd unit, its sample configuration and the image, as files."""

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from agent import __version__
from agent.config.flags import parse
from agent.config.load import load
from agent.config.options import OPTIONS
from agent.config.settings import changes_that_need_a_restart
from agent.sinks.notify import EXTEND_BY_S, EXTEND_EVERY_S
from agent.sources.nvml.source import MAX_THREADS

ROOT = Path(__file__).parents[2]
UNIT = ROOT / "systemd" / "gpu-agent.service"
SAMPLE = ROOT / "systemd" / "gpu-agent.yaml"
CONTAINERFILE = ROOT / "Containerfile"

needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def unit() -> configparser.ConfigParser:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(UNIT, encoding="utf-8")
    return parser


def test_readiness_means_serving_so_the_unit_is_not_ordered_against_the_kubelet() -> None:
    section = unit()["Unit"]
    assert "kubelet" not in section["After"]
    assert "Before" not in section
    assert unit()["Service"]["Type"] == "notify"


def test_the_command_line_of_the_unit_is_one_the_agent_understands() -> None:
    words = unit()["Service"]["ExecStart"].split()
    assert words[:2] == ["/opt/gpu-agent/bin/gpu-agent", "run"]
    values, problems = parse(words[2:], OPTIONS.values())
    assert problems == []
    # A service waits for the driver; ten failed starts would leave the node without an agent.
    assert values["fail-on-init-error"] == "false"


def test_the_directories_of_the_unit_are_the_agents_defaults() -> None:
    service = unit()["Service"]
    settings = load({}, {})
    assert f"/var/lib/{service['StateDirectory']}" == settings.state_dir
    assert f"/run/{service['RuntimeDirectory']}/control.sock" == settings.control_socket
    assert f"-{Path(settings.kubelet_socket).parent}" in service["ReadWritePaths"].split()


def test_the_watchdog_and_the_limits_leave_room_for_what_the_agent_promises() -> None:
    service = unit()["Service"]
    assert int(service["TimeoutStopSec"]) > 5
    assert int(service["WatchdogSec"]) / 4 > 5  # a step at least every five seconds
    assert int(service["TasksMax"]) > MAX_THREADS + 16
    assert EXTEND_BY_S > 2 * EXTEND_EVERY_S


def test_nothing_is_taken_away_that_the_agent_needs() -> None:
    service = unit()["Service"]
    for option in ("PrivateDevices", "DeviceAllow", "ProtectKernelModules", "ProtectKernelTunables"):
        assert option not in service
    for option in ("ProtectKernelLogs", "ProtectClock", "MemoryDenyWriteExecute", "PrivateUsers"):
        assert option not in service
    assert "AF_NETLINK" in service["RestrictAddressFamilies"]


def test_the_pipes_of_a_hosts_mps_daemon_are_seen_and_nothing_is_written_where_they_are() -> None:
    service = unit()["Service"]
    assert "PrivateTmp" not in service
    assert service["ProtectSystem"] == "strict"
    assert "/tmp" not in service["ReadWritePaths"]
    # So the loader's files go elsewhere.
    assert f"TMPDIR=/var/cache/{service['CacheDirectory']}" in UNIT.read_text(encoding="utf-8")


def test_a_kernel_that_kills_a_helper_leaves_the_agent() -> None:
    service = unit()["Service"]
    assert (service["OOMPolicy"], service["Restart"]) == ("continue", "on-failure")


@needs_systemd
def test_the_unit_is_well_formed(tmp_path: Path) -> None:
    # The commands may not be installed here, so their place is taken by one that is.
    text = UNIT.read_text(encoding="utf-8")
    for command in ("/opt/gpu-agent/bin/gpu-agent", "/bin/kill"):
        text = text.replace(command, "/bin/true")
    copy = tmp_path / "gpu-agent.service"
    copy.write_text(text, encoding="utf-8")
    result = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, check=False
    )
    complaints = [line for line in result.stderr.splitlines() if "gpu-agent" in line]
    assert complaints == []


@needs_systemd
def test_the_unit_exposes_little(tmp_path: Path) -> None:
    result = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=40", str(UNIT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_sample_configuration_is_taken_without_a_warning() -> None:
    settings = load({"config-file": str(SAMPLE)}, {})
    assert settings.warnings == ()
    assert settings.policy == load({}, {}).policy


def test_what_the_sample_comments_out_are_the_defaults(tmp_path: Path) -> None:
    lines = SAMPLE.read_text(encoding="utf-8").splitlines()
    shown = [re.sub(r"^(\s*)# (\s*\w+:)", r"\1\2", line) for line in lines if "sharing" not in line]
    unset = re.compile(r"\s*#|.*(timeSlicing|resources|name:|replicas)")
    text = "\n".join(line for line in shown if not unset.match(line))
    copy = tmp_path / "config.yaml"
    copy.write_text(text, encoding="utf-8")
    settings, default = load({"config-file": str(copy)}, {}), load({}, {})
    assert settings.warnings == ()
    assert set(changes_that_need_a_restart(settings, default)) == set()
    assert settings.policy == default.policy
    assert len([origin for origin in settings.origins.values() if str(copy) in origin]) >= 5


def test_the_image_ends_on_sigterm_and_waits_for_the_driver() -> None:
    text = CONTAINERFILE.read_text(encoding="utf-8")
    assert "STOPSIGNAL SIGTERM" in text
    assert 'ENTRYPOINT ["nvidia-device-plugin"]' in text
    assert "CMD " not in text
    assert "--require-hashes" in text
    assert "compileall" in text
    assert "HEALTHCHECK" not in text
    assert text.count("FROM docker.io/library/debian:12-slim") == 2


def test_the_version_of_the_image_is_the_packages() -> None:
    assert f'image.version="{__version__}"' in CONTAINERFILE.read_text(encoding="utf-8")
