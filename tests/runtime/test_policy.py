"""What of changed settings is in effect before the next start."""

from agent.config.load import load
from agent.config.settings import Settings
from agent.runtime.policy import NEVER_NS, PolicyInEffect


def settings(**given: str) -> Settings:
    return load({name.replace("_", "-"): value for name, value in given.items()}, {})


def test_a_changed_setting_is_in_effect_at_once() -> None:
    policy = PolicyInEffect(settings(mig_strategy="none"))
    assert policy.follow(settings(mig_strategy="mixed")).mig_strategy == "mixed"
    assert policy.now.mig_strategy == "mixed"


def test_every_policy_of_one_agent_has_the_same_jitter() -> None:
    policy = PolicyInEffect(settings())
    before = policy.now.jitter_seed
    assert policy.follow(settings(mig_strategy="mixed")).jitter_seed == before


def test_what_is_registered_stays_registered_until_a_restart() -> None:
    policy = PolicyInEffect(settings())
    assert not policy.follow(settings(observe="true")).observe


def test_an_agent_that_observes_may_begin_to_act() -> None:
    policy = PolicyInEffect(settings(observe="true"))
    assert policy.now.observe
    assert not policy.follow(settings()).observe


def test_sources_keep_their_root_until_a_restart() -> None:
    policy = PolicyInEffect(settings())
    root = policy.now.injection.device_root
    assert policy.follow(settings(dev_root="/elsewhere")).injection.device_root == root
    assert PolicyInEffect(settings(dev_root="/elsewhere")).now.injection.device_root != root


def test_no_kubelet_is_waited_for_where_nothing_is_registered() -> None:
    assert PolicyInEffect(settings(kubelet_socket="")).now.watch_timeout_ns == NEVER_NS
