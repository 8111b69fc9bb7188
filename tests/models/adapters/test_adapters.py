"""Several LoRA adapters on one backbone."""

import json

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora.layer import Linear
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from proofs import by_default
from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models.adapters.files import adapter_base, adapter_config, load_adapter
from rlhf_models.adapters.in_place import InPlaceLinear
from rlhf_models.adapters.lora import AdapterSet, LoraSettings, add_adapters, apply_lora
from rlhf_models.language_model.logps import token_logps
from rlhf_models.loading.pretrained import load_causal_lm
from rlhf_models.loading.tiny import TINY_ARCHITECTURES, tiny_model

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


@pytest.mark.parametrize("architecture", by_default(TINY_ARCHITECTURES, "llama", "gpt2"))
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


@pytest.mark.parametrize("targets", [None, ("q_proj", "v_proj")])
def test_a_frozen_adapter_leaves_the_others_as_they_are(targets, tmp_path):
    other = make_set(seed=9, lora_dropout=0.5)
    shift(other, "policy", 0.05)
    other.save("policy", tmp_path / "other")
    adapters = make_set(lora_target_modules=targets)
    shift(adapters, "policy", 0.02)
    before = {name: logps(adapters, name) for name in (None, "policy", "monitor")}
    listed = {name: [id(p) for p in adapters.parameters(name)] for name in adapters.names}
    with adapters.use("monitor"):
        state = torch.get_rng_state()
        adapters.add_frozen("guest", tmp_path / "other")
        assert torch.equal(torch.get_rng_state(), state)
        assert adapters.active == "monitor" == adapters.model.active_adapter
    assert adapters.names == ("policy", "monitor", "guest") and adapters.parameters("guest") == []
    torch.testing.assert_close(logps(adapters, "guest"), logps(other, "policy"))  # its dropout does not act
    for name, wanted in before.items():
        assert torch.equal(logps(adapters, name), wanted)
    assert {name: [id(p) for p in adapters.parameters(name)] for name in listed} == listed
    assert all(p.requires_grad for name in listed for p in adapters.parameters(name))
    guest = [p for name, p in adapters.model.named_parameters() if ".guest." in name]
    assert guest and not any(p.requires_grad for p in guest)
    logps(adapters, "policy").sum().backward()
    assert all(p.grad is None for p in guest)


def test_a_frozen_adapter_that_does_not_fit_is_refused(tmp_path):
    make_set("gpt2").save("policy", tmp_path / "gpt2")
    with raises_error("adapter_does_not_fit"):
        make_set("llama").add_frozen("guest", tmp_path / "gpt2")
    with raises_error("no_adapter_config"):
        make_set("llama").add_frozen("guest", tmp_path / "nowhere")


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


@pytest.mark.parametrize("rslora", [False, True])
def test_a_saved_adapter_is_loaded_with_its_settings(rslora, tmp_path):
    settings = {"lora_alpha": 6.0, "lora_dropout": 0.1, "lora_target_modules": ("q_proj", "v_proj")}
    adapters = make_set(**settings, use_rslora=rslora)
    shift(adapters, "policy", 0.05)
    adapters.save("policy", tmp_path / "a")
    state = torch.get_rng_state()
    loaded = load_adapter(tiny_model("llama", initializer_range=0.1), tmp_path / "a", adapter="again")
    assert torch.equal(torch.get_rng_state(), state)
    again = AdapterSet(loaded)
    assert torch.equal(logps(again, "again"), logps(adapters, "policy")) and not loaded.training
    assert all(p.requires_grad for p in again.parameters("again"))
    config = adapter_config(tmp_path / "a")
    assert (config.lora_alpha, config.lora_dropout, config.use_rslora) == (6.0, 0.1, rslora)
    assert config.target_modules == {"q_proj", "v_proj"}


def test_every_adapter_names_the_folder_of_its_base(tiny_model_folder, tmp_path):
    adapters = AdapterSet(add_adapters(load_causal_lm(tiny_model_folder), ["policy", "monitor"], SETTINGS))
    for name in adapters.names:
        adapters.save(name, tmp_path / name)
        assert adapter_base(tmp_path / name) == str(tiny_model_folder)


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_the_head_of_a_classifier_is_trained_with_the_adapter(architecture):
    config = tiny_model(architecture).config
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config)
    adapted = apply_lora(model, SETTINGS)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    heads = {name for name in trained if "lora_" not in name}
    assert heads == {"base_model.model.score.modules_to_save.default.weight"}
    # As for a language model: 4 linear layers a block in GPT-2, 7 in the others, two tensors each.
    assert len(trained - heads) == 2 * 2 * (4 if architecture == "gpt2" else 7)


def test_the_seed_decides_the_start_and_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    first, again, other = make_set(seed=1), make_set(seed=1), make_set(seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    starts = [torch.cat([p.flatten() for p in s.parameters("monitor")]) for s in (first, again, other)]
    assert torch.equal(starts[0], starts[1]) and not torch.equal(starts[0], starts[2])


@pytest.mark.parametrize(("rslora", "scale"), [(False, 0.5), (True, 0.25)])
def test_the_update_is_scaled_by_alpha_and_rank(rslora, scale):
    # B A x · alpha / r, or with rsLoRA · alpha / sqrt(r): with all entries of A and B equal to 1, r = 4 and
    # alpha = 2 or 1/2, each of r products B A adds up 32 ones of x, so the change is 4 · 32 · scale.
    alpha = {False: 2.0, True: 0.5}[rslora]
    model = tiny_model("llama")
    lora = LoraSettings(lora_r=4, lora_alpha=alpha, use_rslora=rslora, lora_target_modules=("q_proj",))
    adapters = AdapterSet(add_adapters(model, ["policy"], lora))
    with torch.no_grad():
        for parameter in adapters.parameters("policy"):
            parameter.fill_(1.0)
    layer = adapters.model.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    x = torch.ones(1, 32)
    with adapters.use("policy"):
        changed = layer(x)
    with adapters.use(None):
        torch.testing.assert_close(changed - layer(x), torch.full((1, 32), 4 * 32 * scale))


def test_a_target_layer_that_does_not_exist_is_refused_with_the_choices():
    with raises_error("unknown_layer", layer="query"):
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
    ("damage", "code"), [(_break_weights, "unreadable_file"), (_remove_weights, "no_adapter_weights")]
)
def test_damaged_weights_are_answered_in_one_sentence(tmp_path, damage, code):
    adapters = make_set()
    adapters.save("policy", tmp_path / "a")
    damage(tmp_path / "a")
    with raises_error(code):
        adapters.load("policy", tmp_path / "a")


def test_an_adapter_of_another_shape_is_refused(tmp_path):
    make_set().save("policy", tmp_path / "a")
    wider = AdapterSet(add_adapters(tiny_model("llama"), ["policy"], LoraSettings(lora_r=3)))
    with raises_error("adapter_does_not_fit"):
        wider.load("policy", tmp_path / "a")


def test_a_config_that_is_no_lora_is_refused(tmp_path):
    with raises_error("no_adapter_config"):
        adapter_config(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "IA3"}))
    with raises_error("not_lora"):
        adapter_config(tmp_path)


def test_an_adapter_for_other_layers_is_refused(tmp_path):
    make_set(lora_target_modules=("q_proj",)).save("policy", tmp_path / "a")
    with raises_error("adapter_does_not_fit"):
        load_adapter(tiny_model("gpt2"), tmp_path / "a")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adding_in_place_gives_the_bits_of_peft(dtype):
    """Log-probs and gradients, also under an adapter in fp32 on a backbone in bfloat16."""
    found = []
    for layer in (InPlaceLinear, Linear):
        model = tiny_model("llama", initializer_range=0.1).to(dtype)
        adapters = AdapterSet(add_adapters(model, ["policy"], SETTINGS))
        shift(adapters, "policy", 0.1)
        layers = [module for module in adapters.model.modules() if type(module) is InPlaceLinear]
        assert len(layers) == 2 * 7
        for each in layers:
            each.__class__ = layer  # pyright: ignore[reportAttributeAccessIssue]
        scores = logps(adapters, "policy")
        scores.sum().backward()
        found.append([scores.detach(), *(parameter.grad for parameter in adapters.parameters("policy"))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
