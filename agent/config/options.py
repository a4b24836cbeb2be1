"""The options of ``gpu-agent run``: one table that drives flags, environment, file keys and help."""

from typing import Final

from agent.config.leak_options import LEAK_OPTIONS
from agent.config.nvidia_options import NVIDIA_OPTIONS
from agent.config.our_options import OUR_OPTIONS

OPTIONS: Final = {option.name: option for option in NVIDIA_OPTIONS + OUR_OPTIONS + LEAK_OPTIONS}
