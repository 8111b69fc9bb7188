"""config.json: settings that must agree between the models of a merge, and the result's file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from rlhf_merge.errors import MergeError, readable

Config = dict[str, Any]
"""The content of a config.json."""

_TEXT = ("text_config", "language_config", "llm_config")
"""Keys under which multimodal models keep the settings of their language model."""

_SIZES = (
    *("model_type", "hidden_size", "d_model", "n_embd"),
    *("num_attention_heads", "num_heads", "n_head", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "d_ff", "n_inner"),
    *("hidden_act", "hidden_activation", "activation_function"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_DTYPE = ("dtype", "torch_dtype")

_INDEX_LISTS = (
    *("mlp_only_layers", "moe_layers", "cross_attention_layers", "attn_layer_indices"),
    *("full_attn_idxs", "hybrid_layer_ids", "local_layer_ids", "ple_layer_ids"),
)
"""Lists of the numbers of the layers that are of some kind; other lists have an entry for each layer."""

_ROPE_TYPES = {"su": "longrope", "mrope": "default"}
"""Old names of kinds of rotary embeddings, of Phi 3 and of Qwen 2 VL."""

_THRESHOLDS = ("first_k_dense_replace", "max_window_layers")
"""Settings that say that the layers before the n-th are of one kind and the others of another."""

_PERIODS = {
    "sliding_window_pattern": "layer_types",
    "no_rope_layer_interval": "no_rope_layers",
    "interleave_moe_layer_step": "moe_layers",
    **dict.fromkeys(
        ("decoder_sparse_step", "moe_layer_freq", "attn_layer_period", "expert_layer_period"), ""
    ),
}
"""Settings that make every n-th layer of another kind, and the list that replaces it where there is one."""


def check_architectures(configs: Sequence[tuple[str, Config]], *, same_layers: bool) -> None:
    """Refuse models that cannot be merged tensor by tensor.

    Compared are the type, the sizes, the activation, the experts and the rotary embedding, each where two
    configs give it: a key that one leaves to the architecture's default is not compared. Not compared are the
    vocabulary, the dtype and whether embeddings are tied.
    """
    seen: dict[str, tuple[str, Any]] = {}
    for label, config in configs:
        if config.get("quantization_config"):
            message = f"{label} is quantized (quantization_config in its config.json); merge the full weights"
            raise MergeError(message, code="quantized_model", model=label)
        with readable(f"config.json of {label}"):
            compared = dict(_compared(config, same_layers))
        for key, value in compared.items():
            first, expected = seen.setdefault(key, (label, value))
            if value != expected:
                remedy = "; to merge ranges of layers, give slices" if key.endswith(_LAYERS) else ""
                said = f"config.json says {key} {expected!r} in {first} but {value!r} in {label}"
                said += f"; only models of one architecture and size can be merged{remedy}"
                raise MergeError(said, code="different_config", key=key)


def _compared(config: Config, same_layers: bool) -> Iterator[tuple[str, Any]]:
    """The keys and values of a config that must agree between models."""
    keys = (*_SIZES, *_LAYERS) if same_layers else _SIZES
    for prefix, section in _sections(config).items():
        found = {key: section.get(key) for key in keys} | _rope(section)
        yield from ((prefix + key, value) for key, value in found.items() if value is not None)


def _sections(config: Config) -> dict[str, Config]:
    """The config and those of its language models, by what their keys begin with in messages."""
    return {"": config} | {f"{key}.": config[key] for key in _TEXT if isinstance(config.get(key), dict)}


def _rope(section: Config) -> dict[str, Any]:
    """The settings of the rotary embedding in one spelling.

    Transformers 5 writes `rope_parameters`, with the settings of each kind of layer in a mapping of its own
    where they differ; before it, `rope_theta`, `rope_scaling` and, by model, keys of sliding layers.
    """
    given = section.get("rope_parameters") or section.get("rope_scaling") or {}
    kinds = {kind: value for kind, value in given.items() if isinstance(value, dict)}
    kinds = kinds or {"full_attention": dict(given)}
    outer = {
        "rope_theta": _first(section, "rope_theta", "rotary_emb_base", "global_rope_theta"),
        "partial_rotary_factor": _first(section, "partial_rotary_factor", "rotary_pct"),
    }
    local = {"rope_theta": _first(section, "rope_local_base_freq", "local_rope_theta")}
    found: dict[str, Any] = {}
    for kind, own in ({"sliding_attention": local} | kinds).items():
        settings = {**outer, **own} if kind == "full_attention" else own
        settings = {key: value for key, value in settings.items() if value is not None}
        suffix = "" if kind == "full_attention" else f" of {kind}"
        if settings:
            old = settings.pop("type", "default")
            rope_type = settings.pop("rope_type", old)
            settings["rope_type"] = _ROPE_TYPES.get(rope_type, rope_type)
        found |= {f"{key}{suffix}": value for key, value in settings.items()}
    return found


def _first(section: Config, *keys: str) -> Any:
    return next((section[key] for key in keys if section.get(key) is not None), None)


def tied(config: Config, *, has_head: bool | None = None) -> bool | None:
    """Whether the output head is the input embedding.

    Where `tie_word_embeddings` is absent, transformers takes the default of the architecture's config class,
    which in version 5 is False for about half of them (Llama, Qwen, Mistral) and True for the others (GPT-2,
    Gemma, OPT); without that table, the checkpoint itself says it: embeddings are tied if it has no head.
    """
    said = [section.get("tie_word_embeddings") for section in _sections(config).values()]
    found = next((value for value in said if value is not None), None)
    return bool(found) if found is not None else None if has_head is None else not has_head


def output_config(
    config: Config,
    *,
    dtype: str | None,
    vocab_size: int | None,
    layer_sources: Sequence[int] | None,
    tied: bool | None,
    token_ids_from: Config | None = None,
) -> Config:
    """The config.json of the result.

    Args:
        config: of the model that lends it; not changed.
        dtype: of the weights, as transformers calls it ("bfloat16"); None, here and below, changes nothing.
        vocab_size: rows of the vocabulary.
        layer_sources: for each layer of the output, the number of the layer that it comes from; per-layer
            settings follow it. Kinds of layers that only the architecture's code knows (Gemma 2's alternating
            windows in configs without `layer_types`) do not.
        tied: whether the output head is the input embedding.
        token_ids_from: config of the model whose tokenizer the result has, where that is another one: the ids
            of its special tokens are taken.
    """
    result = _without_path(config)
    sections = list(_sections(result).values())
    for section, other in zip(sections, _sections(token_ids_from or {}).values(), strict=False):
        section |= {key: value for key, value in other.items() if key.endswith("_token_id")}
    if dtype is not None:
        result |= {} if result.keys() & _DTYPE else {"torch_dtype": dtype}
        _put([result, *(value for value in result.values() if isinstance(value, dict))], _DTYPE, dtype)
    if vocab_size is not None:
        _check_token_ids(sections, vocab_size)
        _put(sections, ("vocab_size",), vocab_size)
    if layer_sources is not None:
        if config.get("is_encoder_decoder"):
            message = "slices need one stack of layers, not an encoder-decoder"
            raise _unsupported("is_encoder_decoder", message)
        for section in sections:
            _move_layers(section, layer_sources)
        _put(sections, _LAYERS, len(layer_sources))
    if tied is not None:
        _put(sections, ("tie_word_embeddings",), tied)
        result["tie_word_embeddings"] = tied
    return result


def _put(sections: Sequence[Config], keys: Sequence[str], value: Any) -> None:
    """Set the keys where they are; the first of them, in the last section, where none is."""
    found = [(section, key) for section in sections for key in keys if key in section]
    for section, key in found or [(sections[-1], keys[0])]:
        section[key] = value


def _without_path(value: Any) -> Any:
    """A deep copy without the folder the model was loaded from."""
    if isinstance(value, dict):
        return {key: _without_path(inner) for key, inner in value.items() if key != "_name_or_path"}
    return deepcopy(value)


def _check_token_ids(sections: list[Config], vocab_size: int) -> None:
    """Refuse a vocabulary cut off before a special token that had a row."""
    for section in sections:
        old = section.get("vocab_size") or 0
        for key, value in section.items():
            ids = value if isinstance(value, list) else [value]
            lost = [i for i in ids if isinstance(i, int) and vocab_size <= i < old]
            if key.endswith("_token_id") and lost:
                message = f"config.json says {key} {lost[0]}, but the result has only {vocab_size} rows; use "
                raise MergeError(f"{message}--vocab union", code="token_id_out_of_range", key=key)


def _unsupported(key: str, message: str) -> MergeError:
    return MergeError(message, code="unsupported_slices", key=key)


def _move_layers(section: Config, sources: Sequence[int]) -> None:
    """Let the per-layer settings of a section follow the layers to their new places."""
    old = _first(section, *_LAYERS)
    if old is None or list(sources) == list(range(old)):
        return
    for key, value in list(section.items()):
        if key in _INDEX_LISTS and isinstance(value, list):
            section[key] = [place for place, source in enumerate(sources) if source in value]
        elif isinstance(value, list) and len(value) == old and ("layer" in key or "block" in key):
            if max(sources) >= old:
                message = f"slices take layer {max(sources)}, but {key} has only {old} layers"
                raise MergeError(f"{message}; make the deepest model the base", code="missing_layer", key=key)
            section[key] = [value[source] for source in sources]
        elif key == "per_layer_config" and isinstance(value, dict):
            moved = {str(place): value.get(str(source)) for place, source in enumerate(sources)}
            section[key] = {place: setting for place, setting in moved.items() if setting is not None}
        elif isinstance(value, int) and key in (*_THRESHOLDS, *_PERIODS):
            _move_kinds(section, key, value, sources)


def _move_kinds(section: Config, key: str, value: int, sources: Sequence[int]) -> None:
    """A threshold becomes the number of leading layers of the first kind; a period must hold as it is."""
    said = f"config.json says {key} {value}"
    if key in _PERIODS:
        kept = value < 2 or _PERIODS[key] in section
        for place, source in enumerate(sources):
            if not kept and place % value != source % value:
                said += f", but the slices put layer {source} at {place}; keep kinds in order"
                raise _unsupported(key, said)
        return
    if key == "max_window_layers" and (not section.get("use_sliding_window") or "layer_types" in section):
        return
    before = [source < value for source in sources]
    leading = sum(before)
    if not all(before[:leading]):
        place = before.index(True, before.index(False))
        raise _unsupported(key, f"{said}, but the slices put layer {sources[place]} at {place}; reorder them")
    section[key] = leading
