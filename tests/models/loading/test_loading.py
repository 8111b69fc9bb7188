"""Loading models and tokenizers, quantised or not, and what is said when that fails."""

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from proofs import by_default
from raises import raises_error
from rlhf_data import TokenSequence, pack
from rlhf_models import (
    AdapterSet,
    LoraSettings,
    RewardEnsemble,
    RewardModel,
    add_adapters,
    disable_dropout,
    encode_completion,
    encode_prompt,
    load_causal_lm,
    load_tokenizer,
    tiny_model,
    token_logps,
)
from rlhf_models.loading import pretrained
from rlhf_models.loading.pretrained import check_weights

# 4-bit weights come in blocks of 64.
WIDE = {"gpt2": {"n_embd": 64}, "llama": {"hidden_size": 64, "intermediate_size": 128}}
IDS = torch.tensor([[5, 9, 14, 3, 27, 60, 41]])


def _logits(model, ids=IDS):
    with torch.no_grad():
        return model(ids).logits


def test_a_saved_folder_loads_equal_quiet_and_ready(tiny_model_folder, tiny_llama, capfd):
    model = load_causal_lm(tiny_model_folder)
    tokenizer = load_tokenizer(tiny_model_folder)
    assert capfd.readouterr() == ("", "")
    torch.testing.assert_close(_logits(model), _logits(tiny_llama), rtol=1e-5, atol=1e-6)
    assert not model.training and model.config._attn_implementation == "rlhf_packed"
    assert tokenizer.pad_token_id == 0 and tokenizer.eos_token_id == 2


def test_dtype_is_as_stored_or_as_asked(tiny_model_folder):
    assert load_causal_lm(tiny_model_folder).dtype == torch.float32
    assert load_causal_lm(tiny_model_folder, dtype="bfloat16").dtype == torch.bfloat16
    assert load_causal_lm(tiny_model_folder, dtype=torch.float16).dtype == torch.float16


def test_a_hub_name_loads_from_the_cache_when_offline(gpt2_hub_cache, capfd):
    capfd.readouterr()
    model = load_causal_lm("gpt2")
    assert capfd.readouterr() == ("", "")
    assert model.config.model_type == "gpt2"
    reference = tiny_model("gpt2", vocab_size=model.config.vocab_size, n_positions=1024, seed=3)
    torch.testing.assert_close(_logits(model), _logits(reference), rtol=1e-5, atol=1e-6)
    tokenizer = load_tokenizer("gpt2")
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


@pytest.mark.slow
def test_a_cached_hub_name_asks_no_hub_and_prints_nothing(gpt2_hub_cache, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # each request would fail and say so
    code = (
        "from rlhf_models import load_causal_lm as m, load_tokenizer as t; m('gpt2'), t('gpt2'); print('ok')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_gradient_checkpointing_changes_memory_not_gradients(tiny_model_folder):
    batch = pack([TokenSequence(IDS[0].tolist(), 2)])[0]
    plain = load_causal_lm(tiny_model_folder).train()
    saving = load_causal_lm(tiny_model_folder, gradient_checkpointing=True).train()
    assert saving.is_gradient_checkpointing and not plain.is_gradient_checkpointing
    for model in (plain, saving):
        token_logps(model, batch).logps.sum().backward()
    for a, b in zip(plain.parameters(), saving.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_train_mode_has_the_dropout_of_the_config(gpt2_hub_cache):
    model = load_causal_lm("gpt2")
    assert model.config.resid_pdrop > 0
    assert not torch.equal(_logits(model.train()), _logits(model.eval()))
    disable_dropout(model)
    assert torch.equal(_logits(model.train()), _logits(model.eval()))


@pytest.mark.parametrize("architecture", by_default(["gpt2", "llama"], "llama"))
@pytest.mark.parametrize(("option", "tolerance"), [("load_in_8bit", 0.01), ("load_in_4bit", 0.15)])
def test_quantised_models_score_and_pass_gradients_to_their_adapters(
    tmp_path, architecture, option, tolerance, caplog
):
    pytest.importorskip("bitsandbytes")
    reference = tiny_model(architecture, **WIDE[architecture])
    reference.save_pretrained(tmp_path)
    options: dict[str, Any] = {option: True}
    model = load_causal_lm(tmp_path, **options)
    expected = "Linear8bitLt" if option == "load_in_8bit" else "Linear4bit"
    kinds = {type(m).__name__ for m in model.modules() if isinstance(m, torch.nn.Linear)}
    assert expected in kinds and len(kinds) == 2  # all but the head
    error = (_logits(model) - _logits(reference)).norm() / _logits(reference).norm()
    assert 0 < error < tolerance

    adapters = AdapterSet(add_adapters(model, ["policy", "monitor"], LoraSettings(lora_r=2)))
    batch = pack([TokenSequence(IDS[0].tolist(), 2), TokenSequence(IDS[0, :5].tolist(), 2)])[0]
    for _ in range(2):  # bitsandbytes changes its path after a call without gradients
        with torch.no_grad(), adapters.use("policy") as plain:
            before = token_logps(plain, batch).logps
        with adapters.use("policy") as trained:
            logps = token_logps(trained, batch).logps
        assert torch.equal(before, logps)
        logps.sum().backward()
    gradients = [parameter.grad for parameter in adapters.parameters("policy")]
    # B starts at zero, so only the B matrices (every second tensor) get a gradient at first.
    assert all(gradient is not None and gradient.norm() > 0 for gradient in gradients[1::2])
    assert all(parameter.grad is None for parameter in adapters.parameters("monitor"))
    assert caplog.records == []


@pytest.mark.parametrize("option", ["load_in_8bit", "load_in_4bit"])
def test_a_quantised_row_does_not_depend_on_the_rows_around_it(tmp_path, option):
    pytest.importorskip("bitsandbytes")
    tiny_model("gpt2", **WIDE["gpt2"], initializer_range=0.3).save_pretrained(tmp_path)
    options: dict[str, Any] = {option: True}
    model = load_causal_lm(tmp_path, **options)
    other = torch.randint(0, 300, (3, 7), generator=torch.Generator().manual_seed(0))
    together = _logits(model, torch.cat([IDS, other]))[:1]
    torch.testing.assert_close(together, _logits(model), rtol=1e-4, atol=1e-4)


def test_four_bits_on_the_cpu_want_whole_blocks(tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny_model("llama", hidden_size=64, intermediate_size=96).save_pretrained(tmp_path)
    with raises_error("layer_cannot_be_quantized"):
        load_causal_lm(tmp_path, load_in_4bit=True)


def test_a_missing_bitsandbytes_is_refused(tiny_model_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises_error("missing_package"):
        load_causal_lm(tiny_model_folder, load_in_8bit=True)


def test_two_quantisations_and_an_unknown_dtype_are_refused(tiny_model_folder):
    with raises_error("two_precisions"):
        load_causal_lm(tiny_model_folder, load_in_8bit=True, load_in_4bit=True)
    with raises_error("invalid_value", key="dtype"):
        load_causal_lm(tiny_model_folder, dtype="fp8")


def _remove(name):
    return lambda folder: (folder / name).unlink()


def _write(name, text):
    return lambda folder: (folder / name).write_text(text)


def _truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _set(name, **values):
    def damage(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


@pytest.mark.parametrize("names", [5, [5], None])
def test_names_of_architectures_that_are_no_names_say_nothing(tiny_model_folder, names):
    _set("config.json", architectures=names)(tiny_model_folder)
    assert load_causal_lm(tiny_model_folder)


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (_remove("config.json"), "no_config"),
        (_remove("model.safetensors"), "no_weights"),
        (_write("config.json", "{"), "unreadable_config"),
        (_write("config.json", '{"model_type": "dreams"}'), "unreadable_config"),
        (_truncate, "unreadable_weights"),
        (_set("config.json", vocab_size=7), "unreadable_weights"),
        (_set("config.json", bos_token_id=[5]), "unreadable_config"),
        (_set("config.json", rope_parameters=5), "unreadable_config"),
        (_write("generation_config.json", "5"), "unreadable_weights"),
    ],
)
def test_a_damaged_folder_is_answered_in_one_sentence(tiny_model_folder, damage, code, capfd):
    damage(tiny_model_folder)
    with raises_error(code) as error:
        load_causal_lm(tiny_model_folder)
    assert str(tiny_model_folder) in str(error.value) and "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


def test_an_adapter_without_its_model_is_named_as_such(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with raises_error("adapter_without_model"):
        load_causal_lm(tmp_path)


def test_adapters_of_a_reward_model_are_no_language_model(tmp_path, tiny_model_folder):
    shutil.copy(tiny_model_folder / "config.json", tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with raises_error("is_a_reward_adapter"):
        check_weights(tmp_path)


def test_weights_that_lack_tensors_are_refused(tiny_model_folder):
    with raises_error("missing_weights"):
        RewardModel.from_pretrained(tiny_model_folder)


def test_weights_without_use_are_logged(tmp_path, caplog):
    model = tiny_model("llama")
    score = {"score.weight": torch.zeros(1, model.config.hidden_size)}
    model.save_pretrained(tmp_path, state_dict=model.state_dict() | score)
    with caplog.at_level(logging.WARNING, "rlhf_models"):
        load_causal_lm(tmp_path)
    assert "weights without use here: score.weight" in caplog.text


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("/no/such/folder", "model_not_found"),
        ("./nothing", "model_not_found"),
        ("a/b/c", "model_not_found"),
        ("nobody/no-such-model", "model_unreachable"),
        ("no such name!", "model_not_found"),
    ],
)
def test_a_model_that_is_nowhere_is_answered_in_one_sentence(name, code):
    with raises_error(code) as error:
        load_causal_lm(name)
    assert "\n" not in str(error.value)
    with raises_error(code) as error:
        load_tokenizer(name)
    assert "\n" not in str(error.value)


def test_a_file_is_not_a_model(tiny_model_folder):
    with raises_error("not_a_folder"):
        load_causal_lm(tiny_model_folder / "config.json")


def _word_tokenizer(**special):
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "known": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", **special)


def test_a_tokenizer_without_end_token_is_refused(tmp_path):
    _word_tokenizer().save_pretrained(tmp_path)
    with raises_error("no_end_token"):
        load_tokenizer(tmp_path)


def test_a_folder_without_tokenizer_is_refused(tiny_model_folder):
    for path in tiny_model_folder.glob("tokenizer*"):
        path.unlink()
    with raises_error("no_tokenizer"):
        load_tokenizer(tiny_model_folder)


@pytest.mark.parametrize(
    "damage",
    [
        _set("tokenizer_config.json", tokenizer_class=True),
        _write("tokenizer_config.json", '"text"'),
        _set("tokenizer.json", pre_tokenizer={"type": "none"}),
        _set("tokenizer.json", added_tokens=["text"]),
    ],
)
def test_a_damaged_tokenizer_is_answered_in_one_sentence(tiny_model_folder, damage):
    damage(tiny_model_folder)
    with raises_error("no_tokenizer") as error:
        load_tokenizer(tiny_model_folder)
    assert str(tiny_model_folder) in str(error.value) and "\n" not in str(error.value)


def test_unknown_tokens_are_refused_not_replaced():
    tokenizer = _word_tokenizer(eos_token="<eos>")
    assert encode_prompt(tokenizer, "known") == encode_completion(tokenizer, "known") == [2]
    for encode in (encode_prompt, encode_completion):
        with raises_error("unknown_token"):
            encode(tokenizer, "known stranger")


def test_prompts_get_a_start_token_and_no_end_token(byte_tokenizer):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(byte_tokenizer.backend_tokenizer.to_str()),
        bos_token="<bos>",
        eos_token="<eos>",
    )
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)]
    )
    plain = byte_tokenizer(" mary went")["input_ids"]
    assert encode_prompt(tokenizer, " mary went") == [1, *plain]
    assert encode_completion(tokenizer, " mary went") == plain


@pytest.mark.parametrize("architecture", ["gpt2", "llama", "mistral", "gemma2", "qwen2", "qwen3"])
def test_a_saved_byte_tokenizer_comes_back_whatever_the_model(tmp_path, byte_tokenizer, architecture):
    """For Qwen2, AutoTokenizer would put its own normalisation and splitting over tokenizer.json."""
    from rlhf_models import tiny_model

    tiny_model(architecture, vocab_size=len(byte_tokenizer)).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    text = "mary  wént to e\u0301\n naïve “小林” <eos> 1603 ."
    assert len(tokenizer) == len(byte_tokenizer)
    assert tokenizer(text)["input_ids"] == byte_tokenizer(text)["input_ids"]
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_scoring_models_are_no_language_models(tmp_path, byte_tokenizer):
    lm = tiny_model("llama", vocab_size=len(byte_tokenizer), seed=0)
    RewardModel.from_backbone(lm, byte_tokenizer).save_pretrained(tmp_path / "rm")
    RewardEnsemble.from_backbone(lm, byte_tokenizer, size=2).save_pretrained(tmp_path / "ensemble")
    with raises_error("is_a_reward_model"):
        load_causal_lm(tmp_path / "rm")
    with raises_error("is_an_ensemble"):
        load_causal_lm(tmp_path / "ensemble")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says what files are in memory")
def test_weights_that_are_moved_leave_no_pages_of_their_file(tmp_path):
    """20 MB of weights at odd addresses of the file: less than a fifth of it is in memory beside them."""

    def resident():
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssFile"))

    model = tiny_model("llama", hidden_size=512, intermediate_size=1024)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    size = sum(tensor.nbytes for tensor in tensors.values())
    for length in range(0, 64, 8):
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt", "filling": "x" * length})
        with (tmp_path / "model.safetensors").open("rb") as file:
            if (8 + int.from_bytes(file.read(8), "little")) % 64:
                break
    before = resident()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    read = [parameter.data for parameter in loaded.parameters()]  # as long as one is left, the file is mapped
    pretrained._align(loaded)
    assert size > 2e7 and resident() - before < size / 5
    assert any(values.data_ptr() % 64 for values in read)
    assert not any(parameter.data_ptr() % 64 for parameter in loaded.parameters())
