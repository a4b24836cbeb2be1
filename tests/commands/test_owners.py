"""The table of owners where many pods share a GPU."""

import pytest

from agent.commands.owners import owner_lines


@pytest.mark.parametrize(
    ("is_wide", "shown"),
    [
        (False, "a-long-na…ob-0,+59"),
        (True, ",".join(f"a-long-namespace/job-{number}" for number in range(4)) + ",+56"),
    ],
)
def test_some_of_many_pods_are_named_and_the_rest_counted(*, is_wide: bool, shown: str) -> None:
    pods = [{"device": f"GPU-0::{number}", "pod": f"a-long-namespace/job-{number}"} for number in range(60)]
    owned = {
        "uuid": "GPU-0",
        "gpu": 0,
        "gi": None,
        "given_to": pods,
        "holders": [],
        "memory_used_bytes": 0,
        "memory_unclaimed_bytes": 0,
    }
    assert owner_lines({"owners": [owned]}, is_wide=is_wide)[1].split()[1] == shown
