from typing import Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from raises import raises_error
from rlhf_data import (
    BaseConfig,
    LocalPath,
    ModelPath,
    SettingsSource,
    UserError,
    apply_overrides,
    load_config_file,
    overrides_given,
)


class _Training(BaseConfig):
    batch_size: int = Field(default=2, ge=1, le=64)
    """Stories per step."""
    learning_rate: float = Field(default=1e-5, gt=0)
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()


class _Config(BaseConfig):
    training: _Training = _Training()
    extra_section: _Training | None = None
    stages: dict[str, _Training] = Field(default_factory=dict)
    weights: dict[str, float] = Field(default_factory=dict)
    seed: int = 0
    limit: float | None = None

    @model_validator(mode="after")
    def _not_13(self):
        if self.seed == 13:
            raise ValueError("seed 13 is unlucky; take another")
        return self


def _message(values: dict) -> str:
    with pytest.raises(UserError) as caught:
        _Config.from_dict(values, "minmax.json")
    return str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"training": {"batchsize": 1}}, "unknown key training.batchsize; did you mean training.batch_size?"),
        (
            {"extra_section": {"kindd": "a"}},
            "unknown key extra_section.kindd; did you mean extra_section.kind?",
        ),
        ({"zzz": 1}, "unknown key zzz; valid keys are training, extra_section, stages, weights, seed, limit"),
        ({"training": {"batch_size": 0}}, "training.batch_size is 0, expected a value >= 1 and <= 64"),
        ({"training": {"batch_size": 65}}, "training.batch_size is 65, expected a value >= 1 and <= 64"),
        ({"training": {"learning_rate": 0}}, "training.learning_rate is 0, expected a value > 0"),
        ({"training": {"kind": "c"}}, "training.kind is 'c', expected 'a' or 'b'"),
        ({"training": {"sizes": [1, "x"]}}, "training.sizes[1] is 'x', expected a valid integer"),
        ({"training": 3}, "training is 3, expected a section of keys and values"),
        (
            {"training": {"learning_rate": float("inf")}},
            "training.learning_rate is inf, expected a finite number",
        ),
        (
            {"stages": {"sft": {"batchsize": 1}}},
            "unknown key stages.sft.batchsize; did you mean stages.sft.batch_size?",
        ),
        (
            {"stages": {"sft": {"batch_size": 0}}},
            "stages.sft.batch_size is 0, expected a value >= 1 and <= 64",
        ),
        ({"stages": {"sft": 3}}, "stages.sft is 3, expected a section of keys and values"),
        ({"weights": {"a": "b"}}, "weights is 'b', expected a valid number"),
        ({"seed": 13}, "seed 13 is unlucky; take another"),
        ({"seed": True}, "seed: true is not a number; give a number"),
        ({"limit": False}, "limit: false is not a number; give a number or null"),
        ({"training": {"sizes": [1, True]}}, "training.sizes: true is not a number; give a number"),
    ],
)
def test_errors_name_key_value_and_expectation(values, message):
    assert _message(values).startswith(f"minmax.json: {message}")


SOURCE = SettingsSource(
    "minmax.json",
    (
        *overrides_given(("seed=13", "training.kind = c", "training={sizes: [x]}", "pool.size=3")),
        ("training.batch_size", "--batch-size"),
    ),
)


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ({"training": {"batch_size": 0}}, "--batch-size"),
        ({"training": {"kind": "c"}}, "--set training={sizes: [x]}"),  # the later one holds
        ({"training": {"sizes": ["x"]}}, "--set training={sizes: [x]}"),
        ({"extra_section": {"kind": "c"}}, "minmax.json"),
        ({"seeds": 1}, "minmax.json"),
        ({"pool": {"size": 3}}, "minmax.json with --set pool.size=3"),
        ({"seed": 13}, "minmax.json with --set seed=13"),  # the config as a whole is refused
    ],
)
def test_a_message_names_what_a_value_comes_from(values, place):
    with pytest.raises(UserError) as caught:
        _Config.from_dict(values, SOURCE)
    assert str(caught.value).startswith(f"{place}: ")


def test_an_option_whose_key_is_a_word_of_the_sentence_is_not_named():
    source = SettingsSource("settings", (("model", "--model"), ("draft_tokens", "--draft-tokens")))
    assert source.at("", "draft_tokens needs a draft model") == "settings with --draft-tokens"
    assert source.at("", "the model cannot be loaded") == "settings with --model"


def test_unknown_key_is_reported_before_other_mistakes():
    assert "training.batchsize" in _message({"seed": "x", "training": {"batchsize": 1}})


def test_key_of_another_section_is_suggested():
    assert "training.batch_size" in _message({"batch_size": 1})


def test_missing_key_is_named():
    class Needs(BaseConfig):
        model: str

    with raises_error("missing_key", key="model"):
        Needs.from_dict({})


def test_round_trip_frozen_and_documented():
    config = _Config.from_dict({"training": {"sizes": [1, 2]}})
    assert _Config.from_dict(config.to_dict()) == config
    assert _Training.model_fields["batch_size"].description == "Stories per step."
    with pytest.raises(ValidationError):
        config.seed = 1


@pytest.mark.parametrize("text", ["1e-5", "1E-5", "1.0e-5", "+1e-5", ".1e-4"])
def test_yaml_and_overrides_read_scientific_notation_as_float(tmp_path, text):
    path = tmp_path / "config.yaml"
    path.write_text(f"training:\n  learning_rate: {text}\n", encoding="utf-8")
    assert load_config_file(path) == {"training": {"learning_rate": 1e-5}}
    assert apply_overrides({}, [f"training.learning_rate={text}"]) == load_config_file(path)


def test_words_that_look_like_numbers_stay_text():
    values = apply_overrides({}, ["a=1e5x", "b=e5", "c='1e5'", "d=cuda:1", "e=gpt2=x"])
    assert values == {"a": "1e5x", "b": "e5", "c": "1e5", "d": "cuda:1", "e": "gpt2=x"}


def test_overrides_leave_the_input_alone_and_make_sections():
    before = {"training": {"batch_size": 2}, "extra_section": None}
    after = apply_overrides(
        before, ["training.batch_size=4", "extra_section.kind=b", "x.y.z=[1, 1e3]", "n=null"]
    )
    assert before == {"training": {"batch_size": 2}, "extra_section": None}
    assert after == {
        "training": {"batch_size": 4},
        "extra_section": {"kind": "b"},
        "x": {"y": {"z": [1, 1000.0]}},
        "n": None,
    }


@pytest.mark.parametrize(
    ("override", "code"),
    [
        ("training", "invalid_override"),
        ("=3", "invalid_override"),
        ("a..b=3", "invalid_override"),
        ("a=[1", "invalid_yaml"),
        ("a=&a [*a]", "invalid_yaml"),
        ("a=!!bool x", "invalid_yaml"),
        ("a=2026-02-31", "invalid_yaml"),
        ("training.batch_size.x=3", "not_a_section"),
    ],
)
def test_malformed_overrides_are_refused(override, code):
    with raises_error(code):
        apply_overrides({"training": {"batch_size": 2}}, [override])


@pytest.mark.parametrize(
    ("name", "content", "code", "place"),
    [
        ("c.json", b'{"a": 1,\n"b" 2}', "invalid_json", ", line 2:"),
        ("c.json", b'{"a": 1,\n}', "invalid_json", ", line "),  # of the comma, or the brace after it
        ("c.json", b"[1]", "not_a_mapping", ""),
        ("c.yaml", b"a: 1\nb: [1\n", "invalid_yaml", ", line 3:"),
        ("c.yml", b"1: 2\n", "not_a_mapping", ""),
        ("c.yaml", b"a: \xff\n", "not_utf8", ""),
        ("c.toml", b"", "unknown_file_type", ""),
        ("c.json", b"[" * 500_000 + b"]" * 500_000, "unreadable_value", ""),
        ("c.yaml", b"[" * 5000 + b"]" * 5000, "unreadable_value", ""),
        ("c.json", b'{"a": ' + b"9" * 5000 + b"}", "unreadable_value", ""),
        ("c.yaml", b"day: 2026-02-31\n", "unreadable_value", ""),
    ],
)
def test_bad_config_files_are_refused(tmp_path, name, content, code, place):
    path = tmp_path / name
    path.write_bytes(content)
    with raises_error(code) as caught:
        load_config_file(path)
    assert f"{name}{place}" in str(caught.value)


def test_missing_and_empty_config_file(tmp_path):
    with raises_error("file_not_found"):
        load_config_file(tmp_path / "none.json")
    with raises_error("unreadable_file"):
        (tmp_path / "folder.json").mkdir()
        load_config_file(tmp_path / "folder.json")
    (tmp_path / "empty.yaml").write_text("", encoding="utf-8")
    assert load_config_file(tmp_path / "empty.yaml") == {}


def test_paths_of_files_and_models_are_known(tmp_path, monkeypatch):
    class Named(BaseConfig):
        data: LocalPath | None = None
        model: ModelPath | None = None
        word: str | None = None

    assert Named.path_keys() == ["data", "model"]
    run = tmp_path / "run"
    (run / "final").mkdir(parents=True)
    (run / "config.json").write_text('{"method": "sft"}')
    (run / "final" / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.chdir(tmp_path)
    found = Named(data="run", model="run", word="run")
    assert (found.data, found.model, found.word) == (str(run), str(run / "final"), "run")
    assert Named(model="owner/name").model == "owner/name"
