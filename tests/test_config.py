"""Settings: typed, validated, named in every refusal."""

import dataclasses

import pytest

from experiments.configs import textcraft_sera
from sera_jax import config as config_lib
from sera_jax.config import Config, ConfigError, from_config_dict, to_config_dict


def base():
    return to_config_dict(textcraft_sera.make("tiny"))


@pytest.mark.parametrize("variant", ["tiny", "easy", "smoke"])
def test_a_config_survives_the_round_trip(variant):
    config = textcraft_sera.make(variant)
    assert from_config_dict(to_config_dict(config)) == config


def test_published_defaults():
    config = Config()
    assert (config.rollout.tasks_per_step, config.rollout.group_size) == (8, 8)
    assert (config.rollout.max_turns, config.rollout.max_depth) == (20, 3)
    assert (config.counterfactual.branches, config.counterfactual.budget) == (8, 16)
    assert config.counterfactual.margin == 0.2 and config.schedule == "execution:16,delegation:2,rubric:2"
    assert (config.objective.ratio_min, config.objective.ratio_max) == (0.0, 5.0)
    optimizer = config.optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.clip_norm) == (3e-6, 0.017, 1.0)
    assert (optimizer.beta1, optimizer.beta2, optimizer.eps) == (0.9, 0.95, 1e-8)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("rollout.group_size", 1, "rollout.group_size=1: at least 2 is expected"),
        ("rollout.temperature", 0.0, "rollout.temperature=0.0: between 0.001 and 100.0 is expected"),
        ("rubric.writer_temperature", 0.0, "rubric.writer_temperature=0.0: between 0.001 and 100.0"),
        ("rollout.max_tokens", 500, "rollout.max_tokens=500: less than rollout.context_length=128"),
        ("learner.row_length", 64, "learner.row_length=64: at least rollout.context_length=128"),
        ("objective.ratio_max", 0.0, "objective.ratio_max=0.0: more than ratio_min=0.0"),
        ("objective.name", "ppo", "objective.name='ppo': one of cispo, grpo is expected"),
        ("counterfactual.margin", 1.5, "counterfactual.margin=1.5: between 1e-06 and 1.0 is expected"),
        ("policy.kv_heads", 3, "policy.kv_heads=3: a divisor of policy.heads=4"),
        ("rubric.codec", "json", "rubric.codec='json': a tiny policy's vocabulary"),
        ("policy.size", "qwen3_4b", "only policy.size='tiny' has a warm start"),
        ("policy.checkpoint", "/x", "policy.checkpoint='/x': a tiny policy is made here"),
        ("environment.toy_tiers", (5,), r"environment.toy_tiers=\(5,\): tiers between 1 and"),
        ("environment.toy_counts", (0,), r"environment.toy_counts=\(0,\): positive counts"),
        ("optimizer.learning_rate", float("nan"), "optimizer.learning_rate=nan: a finite number"),
        ("credit.execution_baseline", "mean", "one of root, per_depth is expected"),
        ("schedule", "rubric:1", "it must contain execution"),
        ("seed", -1, "seed=-1: at least 0 is expected"),
    ],
)
def test_refusals_name_the_field_the_value_and_what_is_allowed(path, value, message):
    settings = base()
    group, _, name = path.rpartition(".")
    with settings.unlocked():
        (settings[group] if group else settings)[name] = value
    with pytest.raises(ValueError, match=message):
        from_config_dict(settings)


def test_a_language_model_needs_a_checkpoint():
    with pytest.raises(ConfigError, match="policy.checkpoint=None: policy.size='qwen3_4b' needs"):
        from_config_dict(to_config_dict(textcraft_sera.make("paper")))


def test_unknown_and_mistyped_settings_are_refused():
    settings = base().to_dict()
    settings["rollout"]["groups"] = 3
    with pytest.raises(ConfigError, match=r"unknown setting rollout\.groups; rollout\.has tasks_per_step"):
        from_config_dict(settings)
    settings = base().to_dict()
    settings["run"]["steps"] = 2.5
    with pytest.raises(ConfigError, match=r"run\.steps=2\.5: int is expected, not float"):
        from_config_dict(settings)
    settings["run"]["steps"] = True
    with pytest.raises(ConfigError, match=r"run\.steps=True: int is expected, not bool"):
        from_config_dict(settings)
    settings["run"] = 3
    with pytest.raises(ConfigError, match="run=3: a group of settings is expected"):
        from_config_dict(settings)
    locked = base()
    with pytest.raises(AttributeError, match="groups"):
        locked.rollout.groups = 3
    with pytest.raises(TypeError):
        locked.run.steps = 2.5


def test_optional_settings_go_both_ways():
    settings = to_config_dict(Config())
    settings.rollout.deadline_seconds = None
    settings.policy.checkpoint = "dir"
    config = from_config_dict(settings)
    assert config.rollout.deadline_seconds is None and config.policy.checkpoint == "dir"
    settings.rollout.deadline_seconds = 0.5
    settings.policy.checkpoint = "other"
    assert from_config_dict(settings).rollout.deadline_seconds == 0.5


def test_the_fingerprint_changes_with_all_but_the_length_of_the_run():
    config = textcraft_sera.make("tiny")
    longer = dataclasses.replace(config, run=dataclasses.replace(config.run, steps=999))
    other = dataclasses.replace(config, seed=1)
    assert config_lib.fingerprint(config) == config_lib.fingerprint(longer)
    assert config_lib.fingerprint(config) != config_lib.fingerprint(other)
    lines = config_lib.difference(config_lib.as_dict(config), config_lib.as_dict(other))
    assert lines == ["seed: 0 -> 1"]


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="variant 'huge': one of paper, tiny, easy, smoke is expected"):
        textcraft_sera.get_config("huge")
