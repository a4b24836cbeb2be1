"""What Allocate would answer, for devices named the way people name them."""

from typing import Any

import pytest

from agent.bus import Latest
from agent.errors import AgentError, UsageError
from agent.model.gpu import Gpu
from agent.model.policy import Policy
from agent.model.sharing import Share, Sharing
from agent.model.snapshot import Snapshot
from agent.model.structs import replace
from agent.runtime.control import Control
from agent.runtime.dry_run import MAX_IDS, MAX_NAMED, dry_run, with_injection
from tests.core.build import GPU, U0, U1, enumerated, gpu, healthy_node, mig_gpu, mig_uuid, xid

SLICED = mig_gpu(2, (1, 0, "1g.10gb"), (2, 0, "1g.10gb"), (3, 0, "3g.40gb"))


def snapshot(*gpus: Gpu, shares: int = 0) -> Snapshot:
    sharing = Sharing(shares=(Share(GPU, shares),) if shares else ())
    return healthy_node(*gpus, policy=Policy(mig_strategy="mixed", sharing=sharing)).snapshot()


def numbered(card: Gpu) -> Gpu:
    """The same card, its MIG devices with the indexes that NVML gives them."""
    numbers = enumerate(card.mig_devices)
    return replace(card, mig_devices=tuple(replace(mig, index=index) for index, mig in numbers))


def visible(state: Snapshot, *words: str, resource: str | None = None) -> str:
    [container] = dry_run(state, words, resource=resource)["containerResponses"]
    visible_devices: str = container["envs"]["NVIDIA_VISIBLE_DEVICES"]
    return visible_devices


@pytest.mark.parametrize(("word", "uuid"), [("0", U0), ("1", U1), (U1, U1)])
def test_a_gpu_is_meant_by_its_index_or_uuid(word: str, uuid: str) -> None:
    assert visible(snapshot(gpu(0), gpu(1)), word) == uuid


def test_an_index_means_the_gpu_that_has_it_now() -> None:
    node = healthy_node(gpu(0), gpu(1))
    node.apply(enumerated(gpu(1, index=0)))
    assert visible(node.snapshot(), "0") == U1
    with pytest.raises(AgentError, match=f"^1 is not a device .* which has {U0}, 0;"):
        dry_run(node.snapshot(), ["1"])
    with pytest.raises(AgentError, match=f"^{U0} .* is unhealthy: gpu_lost"):
        dry_run(node.snapshot(), [U0])


@pytest.mark.parametrize("word", ["2:1", mig_uuid(21)])
def test_a_mig_device_is_meant_by_its_indexes_or_uuid(word: str) -> None:
    assert visible(snapshot(gpu(0), numbered(SLICED)), word) == mig_uuid(21)


@pytest.mark.parametrize("word", ["0::2", f"{U0}::2", "0", U0])
def test_a_share_is_meant_by_its_number_or_is_the_next_one(word: str) -> None:
    assert visible(snapshot(gpu(0), gpu(1), shares=3), word) == U0


def test_a_card_that_is_named_twice_is_two_shares_of_it() -> None:
    state = snapshot(gpu(0), gpu(1), shares=2)
    limited = replace(state, policy=replace(state.policy, sharing=Sharing(distinct_cards=True)))
    with pytest.raises(AgentError, match=f"{U0}::0 and {U0}::1"):
        dry_run(limited, ["0", "0"])


def test_more_shares_than_there_are_are_rejected() -> None:
    assert visible(snapshot(gpu(0), shares=2), "0", "0") == U0
    with pytest.raises(UsageError, match=r"^0 has 2 shares, and more were asked for$"):
        dry_run(snapshot(gpu(0), shares=2), ["0", "0", "0"])


def test_an_unknown_device_is_reported_with_the_known_ones() -> None:
    with pytest.raises(AgentError) as raised:
        dry_run(snapshot(gpu(0)), ["0", "7"])
    assert str(raised.value) == (
        "7 is not a device of nvidia.com/gpu on this node, which has 0; gpu-agent devices lists their ids"
    )


def test_of_many_devices_only_some_are_named() -> None:
    with pytest.raises(AgentError) as raised:
        dry_run(snapshot(*map(gpu, range(8))), ["x" * 200])
    assert MAX_NAMED == 4
    assert str(raised.value).startswith("x" * 61 + "... is not a device")
    assert "which has 0, 1, 2, 3, ...; gpu-agent devices lists their ids" in str(raised.value)


def test_a_device_of_another_resource_is_unknown_to_the_first_ones() -> None:
    state = snapshot(gpu(0), numbered(SLICED))
    with pytest.raises(AgentError, match=r"^2:0 is not a device of nvidia\.com/gpu on this node"):
        dry_run(state, ["0", "2:0"])


def test_a_gpu_that_is_divided_is_reported_with_its_parts() -> None:
    with pytest.raises(
        AgentError, match=r"^GPU 2 is divided into MIG devices, of which one is meant: 2:0, 2:1, 2:2$"
    ):
        dry_run(snapshot(gpu(0), numbered(SLICED)), ["2"])


def test_the_resource_can_be_named() -> None:
    state = snapshot(gpu(0), numbered(SLICED))
    assert visible(state, "2:2", resource="nvidia.com/mig-3g.40gb") == mig_uuid(22)
    with pytest.raises(AgentError, match=r"0 is not a device of nvidia\.com/mig-3g\.40gb"):
        dry_run(state, ["0"], resource="nvidia.com/mig-3g.40gb")
    with pytest.raises(AgentError, match=r"does not advertise x; advertised: nvidia\.com/gpu, nvidia"):
        dry_run(state, ["0"], resource="x")


def test_an_unhealthy_device_is_rejected_with_its_reason() -> None:
    node = healthy_node(gpu(0))
    node.apply(xid(79))
    with pytest.raises(AgentError, match="XID 79"):
        dry_run(node.snapshot(), ["0"])


def test_a_node_without_devices_is_reported() -> None:
    with pytest.raises(AgentError, match="does not advertise any device; advertised: none"):
        dry_run(replace(snapshot(gpu(0)), resources=()), ["0"])


@pytest.mark.parametrize("count", [0, MAX_IDS + 1])
def test_too_few_and_too_many_devices_are_a_usage_error(count: int) -> None:
    with pytest.raises(UsageError, match=f"1 to {MAX_IDS} devices"):
        dry_run(snapshot(gpu(0)), ["0"] * count)


# Another way of injecting


def test_another_injection_is_tried_on_the_same_devices() -> None:
    changed = with_injection(
        snapshot(gpu(0)), {"strategies": ["cdi-annotations"], "ids": "index", "cdi_annotation_prefix": "a/"}
    )
    assert dry_run(changed, ["0"]) == {
        "containerResponses": [
            {
                "annotations": {
                    "a/nvidia-device-plugin_00000000-0000-4000-8000-000000000000": (
                        "k8s.device-plugin.nvidia.com/gpu=0"
                    )
                }
            }
        ]
    }


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"strategies": ["nix"]}, "nix"),
        ({"ids": 3}, "ids"),
        ({"pass_device_specs": "yes"}, "pass_device_specs"),
        ({"x": 1, "y": 2}, "x, y"),
    ],
)
def test_what_is_no_injection_is_a_usage_error(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        with_injection(snapshot(gpu(0)), changes)


# As an order


def control(state: Snapshot) -> Control:
    async def no_bundle(_gpu: object) -> None:
        return None

    async def kept() -> None:
        return None

    return Control(
        emit=lambda _fact: None, latest=Latest(state), make_bundle=no_bundle, time_of=str, why_not_kept=kept
    )


async def test_a_running_agent_answers_from_what_it_knows() -> None:
    order = {"ids": ["1"], "injection": {"ids": "index"}, "resource": "nvidia.com/gpu"}
    answer = await control(snapshot(gpu(0), gpu(1))).execute("allocate", order)
    assert answer["response"] == {"containerResponses": [{"envs": {"NVIDIA_VISIBLE_DEVICES": "1"}}]}


@pytest.mark.parametrize(
    "order",
    [
        {},
        {"ids": "0"},
        {"ids": [0]},
        {"ids": ["0"], "injection": []},
        {"ids": ["0"], "resource": 1},
        {"ids": ["0"], "x": 1},
    ],
)
async def test_an_order_that_is_none_is_a_usage_error(order: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        await control(snapshot(gpu(0))).execute("allocate", order)
