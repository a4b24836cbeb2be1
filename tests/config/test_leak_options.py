"""The thresholds of leaks in the file and as flags."""

from pathlib import Path

import pytest

from agent.config.load import load
from agent.errors import ConfigError
from agent.model.policy import MEBIBYTE, SECOND_NS, LeakPolicy

FILE = """\
agent:
  leak:
    policy: unhealthy-when-free
    allow: [my-monitor, "two words"]
    servers: []
    orphanedClient: 1s
    podGone: 2s
    stuckExit: 3s
    foreignProcess: 4s
    memoryHeld: {time: 0s, size: 100MiB, percent: 0}
    idle: 2h
    manyContexts: 7
    growth: {window: 60s, warmUp: 0s, minLive: 5, minNew: 6, freedPercent: 8, criticalLive: 9, fds: 10}
"""

SET = LeakPolicy(
    effect="unhealthy-when-free",
    allowed=frozenset({"my-monitor", "two words"}),
    servers=frozenset(),
    orphaned_client_ns=SECOND_NS,
    pod_gone_ns=2 * SECOND_NS,
    stuck_exit_ns=3 * SECOND_NS,
    foreign_process_ns=4 * SECOND_NS,
    memory_held_ns=0,
    memory_held_bytes=100 * MEBIBYTE,
    memory_held_percent=0,
    idle_ns=7200 * SECOND_NS,
    contexts_many=7,
    growth_window_ns=60 * SECOND_NS,
    growth_warm_up_ns=0,
    growth_min_live=5,
    growth_min_new=6,
    growth_freed_percent=8,
    growth_critical_live=9,
    growth_fds=10,
)


def test_every_threshold_can_be_set_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(FILE)

    assert load({"config-file": str(path)}, {}).policy.leaks == SET


def test_given_names_replace_the_default_ones() -> None:
    leaks = load({"leak-allow": "my-monitor, other"}, {}).policy.leaks

    assert leaks.allowed == {"my-monitor", "other"}


def test_an_empty_list_of_names_is_one() -> None:
    assert load({}, {"GPU_AGENT_LEAK_ALLOW": ""}).policy.leaks.allowed == frozenset()


@pytest.mark.parametrize("text", [",".join(f"p{number}" for number in range(257)), "x" * 257, "a\x07b"])
def test_a_list_of_names_is_bounded(text: str) -> None:
    with pytest.raises(ConfigError, match="--leak-allow must be at most 256 printable names"):
        load({"leak-allow": text}, {})
