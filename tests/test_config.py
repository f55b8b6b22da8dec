"""The tree's rules: what `check()` refuses, how it says so, and that every study passes."""

import importlib
import typing
from collections.abc import Callable

import pytest

from telescope_jax import config_tree
from telescope_jax.config import ALGORITHMS, Algorithm, Config, ConfigError
from telescope_jax.config_rules import RATIO_OBJECTIVES

LEAVES = config_tree.leaves(Config)


def problems_of(config: Config) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config.check()
    return str(caught.value).splitlines()


def test_the_defaults_break_no_rule():
    Config().check()


@pytest.mark.parametrize("study", ["math", "math:tiny"])
def test_every_study_breaks_no_rule(study: str):
    name, _, variant = study.partition(":")
    importlib.import_module(f"experiments.{name}").get_config(variant).check()


def test_every_field_has_a_docstring():
    missing = [
        path
        for path, field in LEAVES.items()
        if not config_tree.docstrings(field.owner).get(path.rpartition(".")[2])
    ]
    assert missing == []


def test_two_configs_share_no_branch():
    first, second = Config(), Config()
    first.loss.kl_coef = 0.5
    first.mesh.data = 4
    assert (second.loss.kl_coef, second.mesh.data) == (0.0, 1)


def test_every_algorithm_name_has_advantages_and_an_objective():
    assert set(ALGORITHMS) == set(typing.get_args(Algorithm))
    for name in ALGORITHMS:
        config = Config(algorithm=typing.cast(Algorithm, name))
        assert config.advantages() in typing.get_args(LEAVES["loss.advantages"].hint)
        assert config.objective() in typing.get_args(LEAVES["loss.objective"].hint)


def test_a_set_estimator_wins_over_the_algorithm():
    config = Config(algorithm="grpo")
    config.loss.advantages, config.loss.objective = "rloo", "cispo"
    assert (config.advantages(), config.objective()) == ("rloo", "cispo")


BROKEN: list[tuple[str, Callable[[Config], object], str]] = [
    ("a negative bound", lambda c: setattr(c, "max_async_rollout", -1), "max_async_rollout=-1"),
    ("below minus one", lambda c: setattr(c, "max_off_policy_steps", -2), "at least -1"),
    ("no rollouts", lambda c: setattr(c, "groups_per_batch", 0), "groups_per_batch=0"),
    ("cap of zero", lambda c: setattr(c, "tis_cap", 0.0), "tis_cap=0.0 must be positive"),
    ("greedy training", lambda c: setattr(c.sampling, "temperature", 0.0), "temperature"),
    ("negative decay", lambda c: setattr(c.optimizer, "weight_decay", -0.1), "weight_decay"),
    ("nucleus sampling", lambda c: setattr(c.sampling, "top_p", 0.9), "top_p=0.9"),
    ("top-k sampling", lambda c: setattr(c.sampling, "top_k", 50), "top_k=50"),
    ("a group of one", lambda c: setattr(c, "group_size", 1), "group_size to 2 or more"),
    ("rows over devices", lambda c: setattr(c.mesh, "data", 3), "multiple of 3"),
    ("rows too short", lambda c: setattr(c.batch, "seq_len", 47), "set it to 48 or more"),
    ("too many minibatches", lambda c: setattr(c.batch, "minibatches", 129), "128 rollouts"),
    ("uneven heads", lambda c: setattr(c.policy, "kv_heads", 3), "kv_heads=3"),
    ("heads over devices", lambda c: setattr(c.mesh, "tensor", 4), "mesh.tensor=4"),
    ("odd heads", lambda c: setattr(c.policy, "head_dim", 31), "even"),
    ("dual clip below one", lambda c: setattr(c.loss, "dual_clip", 0.5), "above 1"),
    ("decay of one", lambda c: setattr(c.optimizer, "beta2", 1.0), "[0, 1)"),
]


@pytest.mark.parametrize(("name", "change", "words"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_broken_rule_is_named_with_its_numbers(
    name: str, change: Callable[[Config], object], words: str
):
    config = Config()
    change(config)
    assert any(words in line for line in problems_of(config)), name


@pytest.mark.parametrize("objective", RATIO_OBJECTIVES)
def test_two_ratios_against_the_sampler_are_refused(objective: str):
    """Both against μ would count the step from μ to π twice; π_old stands between them."""
    config = Config(algorithm=typing.cast(Algorithm, objective))
    assert any("old_logprobs" in line for line in problems_of(config))
    config.loss.old_logprobs = True
    config.check()
    config.loss.old_logprobs, config.use_tis = False, False
    config.check()


def test_reinforce_plus_plus_may_have_groups_of_one():
    Config(algorithm="reinforce_pp", group_size=1).check()


def test_icepop_needs_its_floor_below_its_cap():
    config = Config()
    config.loss.tis_mode, config.loss.tis_floor = "icepop", 2.0
    assert any("tis_floor=2.0" in line for line in problems_of(config))


def test_sequence_mask_bounds_must_be_ordered():
    config = Config()
    config.loss.sequence_mask_low, config.loss.sequence_mask_high = 2.0, 0.5
    assert any("sequence_mask_low=2.0" in line for line in problems_of(config))


def test_the_tokens_of_a_row_divide_over_context():
    config = Config()
    config.batch.seq_len, config.mesh.context = 250, 4
    words = "batch.seq_len=250 does not divide over mesh.context=4; set it to a multiple of 4"
    assert words in problems_of(config)


def test_every_broken_rule_is_in_one_message():
    config = Config(number_of_steps=0, tis_cap=-1.0)
    config.mesh.data = 0
    config.policy.kv_heads = 0
    lines = problems_of(config)
    for words in ("number_of_steps=0", "tis_cap=-1.0", "mesh.data=0", "policy.kv_heads=0"):
        assert any(words in line for line in lines)


def test_what_is_probably_not_meant_is_said_and_allowed() -> None:
    """CF-09: the smaller of the two bounds sets the pace."""
    config = Config()
    assert config.warnings() == []
    config.max_off_policy_steps, config.max_async_rollout, config.group_size = 1, 3, 2
    config.check()
    pace, signal = config.warnings()
    assert "max_off_policy_steps=1 is below max_async_rollout=3" in pace
    assert "group_size=2" in signal and "p^2 + (1 − p)^2" in signal
