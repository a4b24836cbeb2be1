"""``python -m agent`` is ``gpu-agent``."""

import sys

from agent.start import main

sys.exit(main())
