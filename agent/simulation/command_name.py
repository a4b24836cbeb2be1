"""How a person starts this program, for hints that can be typed as they are."""

import os
import shlex
import shutil
import sys
from pathlib import Path

NAME = "gpu-agent"


def this_command() -> str:
    """Return ``gpu-agent`` where PATH finds this installation's, else its path, short in a checkout."""
    beside = Path(sys.executable).with_name(NAME)
    found = shutil.which(NAME)
    if not beside.exists() or (found is not None and os.path.realpath(found) == os.path.realpath(beside)):
        return NAME
    here = Path.cwd()
    return shlex.quote(str(beside.relative_to(here) if beside.is_relative_to(here) else beside))
