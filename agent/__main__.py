"""``python -m agent`` is ``gpu-agent``."""

import sys

from agent.cli import main

sys.exit(main())
