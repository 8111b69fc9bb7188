"""`token_logps` on packed trees equals separate plain forwards: values and gradients, every architecture."""

from typing import Any

import peft
import pytest
import torch
from transformers import (
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoConfig,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from proofs import by_default
from raises import raises_error
from rlhf_data import PackedBatch, TokenSequence, pack
from rlhf_models.attention.packed import AttentionOptions, TreeAttention
from rlhf_models.attention.tree import AttentionTree
from rlhf_models.attention.varlen import VarlenTables
from rlhf_models.language_model.logps import token_logps

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GQA: dict[str, Any] = SHAPE | {"num_key_value_heads": 2}
ARCHITECTURES = {
    "gpt2": lambda: GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=96, bos_token_id=1, eos_token_id=2
    ),
    "llama": lambda: LlamaConfig(**GQA),
    "qwen2": lambda: Qwen2Config(**GQA),
    "qwen3": lambda: Qwen3Config(**GQA, head_dim=8),
    "mistral": lambda: MistralConfig(**GQA, sliding_window=7),
    "gemma2": lambda: Gemma2Config(
        **GQA, head_dim=8, sliding_window=7, attn_logit_softcapping=5.0, final_logit_softcapping=4.0
    ),
    "gemma3": lambda: Gemma3TextConfig(**GQA, head_dim=8, sliding_window=7),
    "phi3": lambda: Phi3Config(**GQA),
    "gpt_neox": lambda: GPTNeoXConfig(**SHAPE),
    "opt": lambda: OPTConfig(
        **{k: v for k, v in SHAPE.items() if k != "intermediate_size"}, ffn_dim=48, word_embed_proj_dim=32
    ),
    "phi": lambda: PhiConfig(**SHAPE),
}


def make_model(name: str, implementation: str = "sdpa") -> Any:
    torch.manual_seed(0)
    config = ARCHITECTURES[name]()
    config._attn_implementation = "eager" if name == "gemma2" else implementation  # soft caps have no SDPA
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # larger weights, so that the positions and the caps matter
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


def ragged_tree() -> list[TokenSequence]:
    """Prompt -> answers -> critiques, ragged, with a sequence that ends inside another and a duplicate."""
    torch.manual_seed(1)

    def draw(n: int) -> list[int]:
        return torch.randint(3, VOCAB, (n,)).tolist()

    sequences = []
    for prompt_length, answers in ((23, (4, 1, 6)), (5, (3, 2)), (1, (9,))):
        prompt = draw(prompt_length)
        for length in answers:
            answer = prompt + draw(length)
            sequences.append(TokenSequence(answer, prompt_length))
            sequences += [TokenSequence(answer + draw(k), len(answer)) for k in (2, 5, 3)]
    sequences.append(sequences[1])
    return sequences


def plain_logps(model: torch.nn.Module, sequences: list[TokenSequence], temperature: float) -> torch.Tensor:
    """Each sequence by itself through the model's own eager forward, right-padded with two tokens."""
    parts = []
    for sequence in sequences:
        ids = torch.tensor([[*sequence.input_ids, 0, 0]])
        mask = torch.ones_like(ids)
        mask[:, -2:] = 0
        logits = model(input_ids=ids, attention_mask=mask).logits[0].float() / temperature
        logps = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0]
        parts.append(logps[max(sequence.score_from, 1) - 1 : len(sequence.input_ids) - 1])
    return torch.cat(parts)


def packed_logps(model: torch.nn.Module, batches: list[PackedBatch], temperature: float) -> torch.Tensor:
    """token_logps of all batches, in the order of the packed list."""
    rows: list[tuple[int, torch.Tensor]] = []
    for batch in batches:
        logps = token_logps(model, batch, temperature=temperature).logps
        rows += [
            (int(i), logps[batch.score_sequence == q]) for q, i in enumerate(batch.sequence_ids.tolist())
        ]
    return torch.cat([row for _, row in sorted(rows, key=lambda row: row[0])])


def assert_close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Largest difference relative to the largest entry."""
    a, b = a.detach(), b.detach()
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(float(b.abs().max()), 1e-12)


def gradients(model: torch.nn.Module, value: torch.Tensor) -> dict[str, torch.Tensor]:
    weights = torch.linspace(-1, 1, len(value))
    model.zero_grad()
    (value * weights).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("block_queries", by_default([64, 5], 5))
def test_packed_equals_padded_eager(name: str, block_queries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlhf_models.attention.dense._BLOCK_QUERIES", block_queries)
    sequences = ragged_tree()
    eager, ours = make_model(name, "eager"), make_model(name)
    expected = plain_logps(eager, sequences, 0.7)
    actual = packed_logps(ours, pack(sequences), 0.7)
    assert_close(actual, expected)
    wanted, got = gradients(eager, expected), gradients(ours, actual)
    assert wanted.keys() == got.keys()
    for key in wanted:
        if key.endswith(
            "k_proj.bias"
        ):  # softmax ignores a constant: zero but for rounding, except under RoPE
            assert_close(got[key], wanted[key], 1e-5 + 1e-6 / float(wanted[key].abs().max()))
        else:
            assert_close(got[key], wanted[key])


@pytest.mark.parametrize("name", by_default(["gpt2", "llama", "gemma2"], "gpt2", "gemma2"))
@pytest.mark.parametrize("enabled", [True, False])
def test_with_lora_on_and_off(name: str, enabled: bool) -> None:
    def adapted(implementation: str) -> peft.PeftModel:
        settings = peft.LoraConfig(
            r=4, target_modules="all-linear", init_lora_weights=False, fan_in_fan_out=name == "gpt2"
        )
        torch.manual_seed(2)
        return peft.get_peft_model(make_model(name, implementation), settings).eval()

    eager, ours = adapted("eager"), adapted("sdpa")
    ours.load_state_dict(eager.state_dict())
    sequences = ragged_tree()
    if enabled:
        expected, actual = plain_logps(eager, sequences, 1.0), packed_logps(ours, pack(sequences), 1.0)
        wanted, got = gradients(eager, expected), gradients(ours, actual)
        assert wanted and wanted.keys() == got.keys()
        for key in wanted:
            assert_close(got[key], wanted[key])
    else:
        with eager.disable_adapter(), ours.disable_adapter():
            expected, actual = plain_logps(eager, sequences, 1.0), packed_logps(ours, pack(sequences), 1.0)
        base = plain_logps(make_model(name, "eager"), sequences, 1.0)
        assert_close(expected, base)
    assert_close(actual, expected)


@pytest.mark.parametrize("max_tokens", [1, 40, 64, 90])
def test_any_cut_by_token_budget_scores_the_same(max_tokens: int) -> None:
    model, sequences = make_model("llama"), ragged_tree()
    whole, cut = pack(sequences), pack(sequences, max_tokens)
    assert len(cut) > len(whole)
    expected, actual = packed_logps(model, whole, 1.0), packed_logps(model, cut, 1.0)
    assert_close(actual, expected)
    wanted, got = gradients(model, expected), gradients(model, actual)
    for key in wanted:
        assert_close(got[key], wanted[key])


def test_plain_calls_still_work_after_packing() -> None:
    model, sequences = make_model("gemma2"), ragged_tree()
    packed_logps(model, pack(sequences), 1.0)
    assert_close(
        plain_logps(model, sequences, 1.0), plain_logps(make_model("gemma2", "eager"), sequences, 1.0)
    )


def test_gradient_checkpointing_changes_nothing() -> None:
    model, sequences = make_model("qwen2"), ragged_tree()
    wanted = gradients(model, packed_logps(model, pack(sequences), 1.0))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    got = gradients(model, packed_logps(model, pack(sequences), 1.0))
    for key in wanted:
        assert_close(got[key], wanted[key])


def varlen_reference(
    kernel: str,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tables: VarlenTables,
    options: AttentionOptions,
) -> torch.Tensor:
    """What a flash kernel computes for rows of variable length, plainly."""
    key, value = tables.keys(key), tables.keys(value)
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    outputs = []
    for row in range(len(tables.query_offsets) - 1):
        q = query[tables.query_offsets[row] : tables.query_offsets[row + 1]].transpose(0, 1)
        k, v = (
            x[tables.key_offsets[row] : tables.key_offsets[row + 1]].transpose(0, 1) for x in (key, value)
        )
        distance = (
            torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - torch.arange(k.shape[1])[None]
        )
        hidden = (distance < 0) | (distance >= (options.window or 10**9))
        scores = (q @ k.transpose(1, 2) * options.scaling).masked_fill(hidden, -torch.inf)
        outputs.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(outputs)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("window", [None, 7])
def test_variable_length_tables_describe_the_same_attention(window: int | None, shared: bool) -> None:
    """Both ways of computing a tree's attention agree, with gradients, in fp64."""
    sequences = ragged_tree() if shared else [TokenSequence([i, *range(5 + i)], 1) for i in range(4)]
    (batch,) = pack(sequences)
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(batch.num_tokens, heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    )
    inputs = query, key, value
    options = AttentionOptions(0.5, window)
    tables = VarlenTables.of(AttentionTree.of(batch), torch.device("cpu"))
    assert (tables.key_index is None) == (not shared)
    expected = TreeAttention(batch).attend(0, *inputs, options)
    actual = varlen_reference("reference", *inputs, tables, options)
    torch.testing.assert_close(actual, expected)
    weights = torch.randn_like(expected)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    got = torch.autograd.grad((actual * weights).sum(), inputs)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)


FLASHED = ("llama", "qwen3", "gemma3", "phi3", "gpt_neox", "mistral", "gpt2")


@pytest.mark.parametrize("name", FLASHED)
def test_autocast_reaches_the_flash_kernel(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the dtypes that layers hand over, and only the device's type and the kernel stood in for."""
    dtypes: set[tuple[torch.dtype, ...]] = set()

    class OnCuda(TreeAttention):
        def __init__(self, batch: PackedBatch) -> None:
            super().__init__(batch)
            self._device_type = "cuda"

    def kernel(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Any:
        assert name.endswith("varlen")
        dtypes.add((query.dtype, key.dtype, value.dtype))
        return varlen_reference(name, query, key, value, *rest)

    model, sequences = make_model(name), ragged_tree()
    batches = pack(sequences)
    with torch.autocast("cpu", torch.bfloat16):
        expected = packed_logps(model, batches, 1.0)
    wanted = gradients(model, expected)
    exact = packed_logps(model, batches, 1.0)
    exact_gradients = gradients(model, exact)
    monkeypatch.setattr("rlhf_models.language_model.logps.TreeAttention", OnCuda)
    monkeypatch.setattr("rlhf_models.attention.packed.run_varlen", kernel)
    monkeypatch.setattr("rlhf_models.kernels.cpu_linear._ROUND", 1)  # no such rows on CUDA
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: (8, 0))
    assert torch.equal(packed_logps(model, batches, 1.0), exact) and not dtypes
    with torch.autocast("cpu", torch.bfloat16):
        actual = packed_logps(model, batches, 1.0)
    assert dtypes == {(torch.bfloat16,) * 3}
    got = gradients(model, actual)
    assert actual.dtype == torch.float32 and {g.dtype for g in got.values()} == {torch.float32}

    def error(a: Any, b: Any) -> float:
        parts = [(a, b)] if isinstance(a, torch.Tensor) else [(a[key], b[key]) for key in b]
        return sum(float((x - y).detach().norm()) for x, y in parts) / sum(
            float(y.detach().norm()) for _, y in parts
        )

    # As near to fp32 as the other way of computing in bfloat16 is.
    assert error(actual, exact) < 2 * error(expected, exact)
    assert error(got, exact_gradients) < 2 * error(wanted, exact_gradients)


def test_packing_saves_the_shared_tokens() -> None:
    sequences = ragged_tree()
    (batch,) = pack(sequences)
    assert batch.num_tokens < 0.5 * sum(len(s.input_ids) for s in sequences)


@pytest.mark.parametrize(
    "config",
    [
        BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4),
        GPTNeoConfig(
            vocab_size=VOCAB, hidden_size=32, num_layers=2, num_heads=4, attention_types=[[["global"], 2]]
        ),
    ],
    ids=["bloom", "gpt_neo"],
)
def test_architectures_that_ignore_the_plan_are_refused(config: PreTrainedConfig) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with raises_error("cannot_be_packed"):
        token_logps(model, pack(ragged_tree())[0])
