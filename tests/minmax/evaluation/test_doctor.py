"""The run doctor: which signal is dead, said once, in time, and with the setting to change."""

from pathlib import Path

import pytest

from rlhf_data import load_config_file
from rlhf_minmax.config.run import MinMaxConfig
from rlhf_minmax.evaluation.doctor import FIRST_STEPS, Doctor, config_findings

CONFIG = MinMaxConfig()


def findings(rows, config=CONFIG):
    doctor = Doctor(config)
    return [text for row in rows for text in doctor.look(row)]


@pytest.mark.parametrize(
    ("key", "good", "bad", "setting"),
    [
        ("monitor/truncated_rate", 0.5, 0.6, "monitor_model.max_new_tokens"),
        ("monitor/parse_rate", 0.5, 0.4, "monitor_model.prompt_template"),
        ("policy/truncated_rate", 0.5, 0.6, "policy_model.max_new_tokens"),
        ("policy/parse_rate", 0.5, 0.4, "policy_model.prompt_template"),
        ("policy/form_match", 0.5, 0.4, "set game.answer_template"),
        ("monitor/frac_groups_zero_std", 0.9, 0.95, "game.num_critiques"),
        ("policy/frac_groups_zero_std", 0.9, 0.95, "game.num_generations"),
        ("monitor/label_base_rate", 0.9, 0.95, "game.tampered_fraction"),
        ("monitor/label_base_rate", 0.1, 0.05, "game.tampered_fraction"),
        ("monitor/sampling_kl", 0.02, 0.03, "temperature"),
        ("policy/sampling_kl", 0.02, 0.03, "temperature"),
        ("policy/reward_to_judge_spread", 20.0, 21.0, "game.w_judge"),
        ("policy/reward_to_judge_spread", 0.05, 0.04, "game.w_judge"),
        ("monitor/truth_to_judge_spread", 20.0, 21.0, "constraint.lambda_max"),
    ],
)
def test_each_sign_is_told_once_after_the_first_steps(key, good, bad, setting):
    assert findings([{key: good}] * (2 * FIRST_STEPS)) == []
    assert findings([{key: bad}] * (FIRST_STEPS - 1)) == []
    told = findings([{key: bad}] * (2 * FIRST_STEPS))
    assert len(told) == 1 and setting in told[0]


def test_a_foreign_wording_is_shown_beside_the_template():
    doctor, row = Doctor(CONFIG), {"policy/form_match": 0.0}
    found = [
        text for example in ("Shed", "shed", "hall", "attic." * 20) for text in doctor.look(row, example)
    ]
    [told] = found
    assert "game.answer_template ' it is {choice} .'; the policy writes 'attic." in told
    assert "attic." * 14 not in told


def test_critiques_that_cannot_be_read_earn_the_same_and_that_is_all_that_is_said():
    rows = [{"monitor/parse_rate": 0.0, "monitor/frac_groups_zero_std": 1.0}] * FIRST_STEPS
    [told] = findings(rows)
    assert "only 0% of the critiques keep the form" in told
    rows = [{"monitor/parse_rate": 0.4, "monitor/frac_groups_zero_std": 1.0}] * FIRST_STEPS
    assert len(findings(rows)) == 2


def test_the_mean_of_the_first_steps_counts():
    key = "monitor/truncated_rate"
    assert findings([{key: value} for value in (1.0, 0.0, 1.0, 0.0)]) == []
    assert len(findings([{key: value} for value in (1.0, 0.0, 1.0, 0.4)])) == 1
    assert findings([{key: value} for value in (0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0)]) == []
    # Steps in which a signal was not measured are no steps of it.
    assert len(findings([{key: 1.0}, {}, {key: None}, *[{key: 1.0}] * (FIRST_STEPS - 1)])) == 1


def test_a_run_is_too_short_to_tell_until_each_player_has_learned_in_the_first_steps():
    def doctor_of(policy, monitor, config=CONFIG):
        doctor = Doctor(config)
        for step in range(max(policy, monitor)):
            doctor.look(
                {
                    "policy/frac_groups_zero_std": 0.0 if step < policy else None,
                    "monitor/frac_groups_zero_std": 0.0 if step < monitor else None,
                }
            )
        return Doctor(config, doctor.to_dict())

    assert doctor_of(FIRST_STEPS, FIRST_STEPS).unjudged() is None
    for counts in ((FIRST_STEPS - 1, FIRST_STEPS), (FIRST_STEPS, FIRST_STEPS - 1), (0, 2)):
        assert doctor_of(*counts).unjudged() is not None
    frozen = MinMaxConfig.from_dict({"training": {"monitor_updates_per_policy": 0}})
    assert doctor_of(FIRST_STEPS, 0, frozen).unjudged() is None


@pytest.mark.parametrize("other", [{"w_judge": 0}, {"policy_critiques": 0}])
def test_a_policy_that_is_paid_for_nothing_is_found(other):
    found = [text for text in config_findings(game(w_reward=0, **other), 1000) if "game.w_reward" in text]
    assert len(found) == 1
    assert not any("game.w_reward" in text for text in config_findings(game(**other), 1000))
    assert not any("game.w_reward" in text for text in config_findings(game(w_reward=0), 1000))


def game(**values):
    return MinMaxConfig.from_dict({"game": values})


def saturated(name, violation, value=1.0):
    return {f"dual/{name}/saturated": value, f"constraint/{name}/violation_ema": violation}


def test_a_multiplier_at_its_bound_under_violation():
    assert findings([saturated("truthfulness", 0.2)] * 7) == []
    [told] = findings([saturated("truthfulness", 0.2)] * 20)
    assert "raise constraint.lambda_max" in told
    assert findings([saturated("truthfulness", 0.01)] * 20) == []
    broken = [saturated("truthfulness", 0.2)] * 7 + [saturated("truthfulness", 0.2, 0.0)]
    assert findings(broken * 3) == []


def test_a_resumed_doctor_goes_on():
    rows = [{"policy/parse_rate": 0.1, **saturated("truthfulness", 0.2)}] * 12
    whole = Doctor(CONFIG)
    expected = [whole.look(row) for row in rows]
    doctor, found = Doctor(CONFIG), []
    for row in rows:
        found.append(doctor.look(row))
        doctor = Doctor(CONFIG, doctor.to_dict())
    assert found == expected and sum(map(len, found)) == 2


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"training": {"monitor_learning_rate": 1.0}}, "times as far per step"),
        ({"training": {"monitor_warmup_steps": 500}}, "never learns"),
        ({"game": {"tampered_fraction": 0}}, "tampered_fraction is 0"),
        ({"judge_model": {"kind": "validator", "checks": "random"}}, "trained in vain"),
        ({"policy_model": {"lora_dropout": 0.1}}, "policy_model.lora_dropout 0.1"),
        ({"training": {"constraint_penalty_lambda": 0}, "constraint": {"rule": "fixed"}}, "slander pays"),
    ],
)
def test_settings_that_cannot_work(section, text):
    [told] = config_findings(MinMaxConfig.from_dict(section), 2048)
    assert text in told


def test_the_defaults_are_sound():
    assert config_findings(CONFIG, 2048) == []
    untrained = {"training": {"monitor_updates_per_policy": 0}}
    assert config_findings(MinMaxConfig.from_dict(untrained), 2048) == []


def test_slander_does_not_pay_a_monitor_whose_critiques_are_checked():
    file = Path(__file__).parents[3] / "configs" / "minmax_reports.yaml"
    reports = MinMaxConfig.from_dict(load_config_file(file))
    assert reports.judge_model.kind == "validator" and reports.training.constraint_penalty_lambda == 0
    assert config_findings(reports, 2048) == []
