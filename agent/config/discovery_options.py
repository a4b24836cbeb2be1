"""The options of NVIDIA's GPU feature discovery, which shares the configuration file.

Source: NVIDIA/k8s-device-plugin:cmd/gpu-feature-discovery/main.go, api/config/v1/duration.go.
"""

from typing import Final

from agent.config.option import Option
from agent.config.values import bool_from, duration, path_from

_INFINITE: Final = "infinite"


def sleep_interval_from(text: str) -> int | None:
    """Parse the time between two sets of labels, in nanoseconds; None: labels are made once."""
    if text == _INFINITE:
        return None
    # A bare number is one of nanoseconds, as Go marshals durations.
    return duration("1s", "240h")(f"{text}ns" if text.isascii() and text.isdigit() else text)


DISCOVERY_OPTIONS: Final = (
    Option(
        "oneshot",
        "false",
        bool_from,
        "BOOL",
        "Make the labels once and exit",
        "GFD_ONESHOT",
        "flags.gfd.oneshot",
        is_switch=True,
        fills="gfd.oneshot",
    ),
    Option(
        "no-timestamp",
        "false",
        bool_from,
        "BOOL",
        "Omit the label with the time of the labels",
        "GFD_NO_TIMESTAMP",
        "flags.gfd.noTimestamp",
        is_switch=True,
        fills="gfd.no_timestamp",
    ),
    Option(
        "sleep-interval",
        "60s",
        sleep_interval_from,
        "TIME",
        "Time between two sets of labels, or infinite",
        "GFD_SLEEP_INTERVAL",
        "flags.gfd.sleepInterval",
        fills="gfd.sleep_interval_ns",
    ),
    Option(
        "output-file",
        "/etc/kubernetes/node-feature-discovery/features.d/gfd",
        path_from,
        "PATH",
        "The file of labels that Node Feature Discovery reads",
        "GFD_OUTPUT_FILE",
        "flags.gfd.outputFile",
        aliases=("output", "o"),
        empty_means="standard output",
        fills="gfd.output_file",
    ),
    Option(
        "machine-type-file",
        "/sys/class/dmi/id/product_name",
        path_from,
        "PATH",
        "The file with the machine's type",
        "GFD_MACHINE_TYPE_FILE",
        "flags.gfd.machineTypeFile",
        empty_means="it is unknown",
        fills="gfd.machine_type_file",
    ),
    Option(
        "use-node-feature-api",
        "true",
        bool_from,
        "BOOL",
        "Publish the labels by the NodeFeature API instead of a file",
        "GFD_USE_NODE_FEATURE_API",
        "flags.useNodeFeatureAPI",
        other_environment=("USE_NODE_FEATURE_API",),
        is_switch=True,
        fills="gfd.use_node_feature_api",
    ),
)
