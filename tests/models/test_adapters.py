"""Several LoRA adapters on one backbone."""

import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from rlhf_data import TokenSequence, UserError, pack
from rlhf_models.adapters import AdapterSet, LoraSettings, add_adapters, lora_settings_of
from rlhf_models.logps import token_logps
from rlhf_models.tiny import TINY_ARCHITECTURES, tiny_model

BATCH = pack([TokenSequence([5, 9, 14, 3, 27], 2), TokenSequence([5, 9, 14, 60], 2)])[0]
SETTINGS = LoraSettings(lora_r=2, lora_alpha=4.0)


def make_set(architecture="llama", seed=0, **settings):
    model = tiny_model(architecture, initializer_range=0.1)
    lora = LoraSettings(lora_r=2, **settings)
    return AdapterSet(add_adapters(model, ["policy", "monitor"], lora, seed=seed))


def shift(adapters, name, amount):
    """Give an adapter an effect of its own."""
    with torch.no_grad():
        for parameter in adapters.parameters(name):
            parameter.add_(amount)


def logps(adapters, name):
    with adapters.use(name) as model:
        return token_logps(model, BATCH).logps


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_new_adapters_change_nothing_and_trained_ones_only_themselves(architecture):
    bare = token_logps(tiny_model(architecture, initializer_range=0.1), BATCH).logps
    adapters = make_set(architecture)
    for name in (None, "policy", "monitor"):
        torch.testing.assert_close(logps(adapters, name), bare)
    shift(adapters, "policy", 0.1)
    torch.testing.assert_close(logps(adapters, "monitor"), bare)
    torch.testing.assert_close(logps(adapters, None), bare)
    assert (logps(adapters, "policy") - bare).abs().max() > 1e-3


@pytest.mark.parametrize("architecture", TINY_ARCHITECTURES)
def test_every_linear_layer_but_the_head_is_adapted(architecture):
    # 2 layers; GPT-2 has 4 linear layers each, the others 7; two tensors (A and B) per adapter.
    expected = 2 * 2 * (4 if architecture == "gpt2" else 7)
    adapters = make_set(architecture)
    assert len(adapters.parameters("policy")) == len(adapters.parameters("monitor")) == expected
    base = [p for name, p in adapters.model.named_parameters() if "lora_" not in name]
    assert not any(p.requires_grad for p in base)


def test_gradients_reach_the_adapter_in_use_and_no_other():
    adapters = make_set()
    logps(adapters, "monitor").sum().backward()
    assert all(p.grad is None for p in adapters.parameters("policy"))
    gradients = [p.grad for p in adapters.parameters("monitor")]
    assert all(g is not None for g in gradients)
    assert any(g is not None and g.abs().max() > 0 for g in gradients)


def test_parameters_stay_the_same_and_trainable_whatever_is_active():
    adapters = make_set()
    listed = {name: [id(p) for p in adapters.parameters(name)] for name in adapters.names}
    for active in ("monitor", None, "policy"):
        with adapters.use(active):
            for name in adapters.names:
                assert [id(p) for p in adapters.parameters(name)] == listed[name]
                assert all(p.requires_grad for p in adapters.parameters(name))


def test_a_backward_pass_after_a_switch_still_reaches_the_adapter():
    adapters = make_set()
    total = logps(adapters, "policy").sum()
    logps(adapters, None)
    with adapters.use("monitor"):
        total.backward()
    assert all(p.grad is not None for p in adapters.parameters("policy"))


def test_use_nests_and_restores_also_after_an_error():
    adapters = make_set()
    assert adapters.active == "policy"
    with pytest.raises(RuntimeError), adapters.use("monitor"):
        with adapters.use(None):
            assert adapters.active is None
        assert adapters.active == "monitor" == adapters.model.active_adapter
        raise RuntimeError
    assert adapters.active == "policy" == adapters.model.active_adapter
    with pytest.raises(KeyError, match="no adapter 'judge'; there are policy"), adapters.use("judge"):
        pass


def test_saved_adapters_load_here_and_in_plain_peft(tmp_path):
    adapters = make_set()
    shift(adapters, "monitor", 0.05)
    wanted = logps(adapters, "monitor")
    adapters.save("monitor", tmp_path / "monitor")
    assert {p.name for p in (tmp_path / "monitor").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }

    other = make_set(seed=9)
    identities = [id(p) for p in other.parameters("policy")]
    other.load("policy", tmp_path / "monitor")
    assert torch.equal(logps(other, "policy"), wanted)
    assert [id(p) for p in other.parameters("policy")] == identities

    plain = PeftModel.from_pretrained(tiny_model("llama", initializer_range=0.1), tmp_path / "monitor")
    torch.testing.assert_close(token_logps(plain, BATCH).logps, wanted)


def test_saving_twice_replaces(tmp_path):
    adapters = make_set()
    adapters.save("policy", tmp_path / "a")
    before = load_file(tmp_path / "a" / "adapter_model.safetensors")
    shift(adapters, "policy", 1.0)
    adapters.save("policy", tmp_path / "a")
    after = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    for key, value in after.items():
        torch.testing.assert_close(value, before[key] + 1.0)


def test_settings_come_back_from_the_saved_config(tmp_path):
    adapters = make_set(lora_alpha=6.0, lora_dropout=0.1, lora_target_modules=("q_proj", "v_proj"))
    adapters.save("policy", tmp_path / "a")
    assert lora_settings_of(tmp_path / "a") == LoraSettings(
        lora_r=2, lora_alpha=6.0, lora_dropout=0.1, lora_target_modules=("q_proj", "v_proj")
    )


def test_the_seed_decides_the_start_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    first, again, other = make_set(seed=1), make_set(seed=1), make_set(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    starts = [torch.cat([p.flatten() for p in s.parameters("monitor")]) for s in (first, again, other)]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


def test_alpha_over_r_scales_the_update():
    # B A x · alpha / r: with equal weights, twice alpha doubles the change of a single linear layer.
    changes = []
    for alpha in (4.0, 8.0):
        adapters = make_set(lora_alpha=alpha, lora_target_modules=("q_proj",))
        shift(adapters, "policy", 0.1)
        layer = adapters.model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
        x = torch.ones(1, 32)
        with adapters.use("policy"):
            with_adapter = layer(x)
        with adapters.use(None):
            changes.append(with_adapter - layer(x))
    torch.testing.assert_close(changes[1], 2 * changes[0])


def test_a_target_layer_that_does_not_exist_is_refused_with_the_choices():
    with pytest.raises(UserError, match="no linear layer 'query'; it has c_attn, c_fc, c_proj"):
        make_set("gpt2", lora_target_modules=("query",))


@pytest.mark.parametrize("names", [[], ["a", "a"], ["a.b"], [""]])
def test_bad_adapter_names_are_refused(names):
    with pytest.raises(ValueError, match="adapter names"):
        add_adapters(tiny_model("llama"), names, SETTINGS)


def _break_weights(folder):
    (folder / "adapter_model.safetensors").write_bytes(b"not tensors")


def _remove_weights(folder):
    (folder / "adapter_model.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"), [(_break_weights, "cannot be read"), (_remove_weights, "has no adapter_model")]
)
def test_damaged_weights_are_answered_in_one_sentence(tmp_path, damage, message):
    adapters = make_set()
    adapters.save("policy", tmp_path / "a")
    damage(tmp_path / "a")
    with pytest.raises(UserError, match=message):
        adapters.load("policy", tmp_path / "a")


def test_an_adapter_of_another_shape_is_refused(tmp_path):
    make_set().save("policy", tmp_path / "a")
    wider = AdapterSet(add_adapters(tiny_model("llama"), ["policy"], LoraSettings(lora_r=3)))
    with pytest.raises(UserError, match=r"does not fit this model and its LoRA settings \(28 tensors differ"):
        wider.load("policy", tmp_path / "a")


def test_a_config_that_is_no_lora_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no readable adapter_config.json"):
        lora_settings_of(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with pytest.raises(UserError, match="expected LoRA"):
        lora_settings_of(tmp_path)
