"""How thoroughly hypothesis looks: always the same examples by default, so that a run can be repeated.

``HYPOTHESIS_PROFILE=deep`` searches anew, ``mutation`` is for thousands of runs of the suite.
"""

import os

from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "default",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=40,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", settings.get_profile("default"), derandomize=False, max_examples=1_000)
settings.register_profile(
    "mutation",
    settings.get_profile("default"),
    max_examples=20,
    phases=[Phase.explicit, Phase.generate],
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
