"""config.json: what must agree between the models of a merge, and that of the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

from rlhf_merge.errors import MergeError, damaged

Config = dict[str, Any]
"""The content of a config.json."""

_TEXT = ("text_config", "language_config", "llm_config")
"""Where models of several modalities keep the settings of their language model."""

_SIZES = (
    *("model_type", "hidden_size", "d_model", "n_embd"),
    *("num_attention_heads", "num_heads", "n_head", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "moe_intermediate_size", "d_ff", "n_inner"),
    *("hidden_act", "hidden_activation", "activation_function"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
)
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")

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
    "decoder_sparse_step": "",
    "moe_layer_freq": "",
    "attn_layer_period": "",
    "expert_layer_period": "",
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
            raise MergeError(
                f"{label} is quantized (quantization_config in its config.json); merge the full weights",
                code="quantized_model",
            )
        with damaged(f"config.json of {label}"):
            compared = dict(_compared(config, same_layers))
        for key, value in compared.items():
            first, expected = seen.setdefault(key, (label, value))
            if value != expected:
                remedy = "; to merge ranges of layers, give slices" if key.endswith(_LAYERS) else ""
                raise MergeError(
                    f"config.json says {key} {expected!r} in {first} but {value!r} in {label}; only models "
                    f"of one architecture and size can be merged{remedy}",
                    code="different_config",
                    key=key,
                )


def _compared(config: Config, same_layers: bool) -> Iterator[tuple[str, Any]]:
    """Yield the keys and values of a config that must agree between models."""
    for prefix, section in _sections(config):
        for key in (*_SIZES, *(_LAYERS if same_layers else ())):
            if section.get(key) is not None:
                yield prefix + key, section[key]
        for key, value in _rope(section).items():
            yield prefix + key, value


def _sections(config: Config) -> list[tuple[str, Config]]:
    """Return the config and those of its language models, with the prefix of their keys in messages."""
    inner = [(f"{key}.", config[key]) for key in _TEXT if isinstance(config.get(key), dict)]
    return [("", config), *inner]


def _rope(section: Config) -> dict[str, Any]:
    """Return the settings of the rotary embedding in one spelling.

    Transformers 5 writes `rope_parameters`, with the settings of each kind of layer in a mapping of its own
    where they differ; before it, `rope_theta`, `rope_scaling` and, by model, keys of sliding layers.
    """
    given = section.get("rope_parameters") or section.get("rope_scaling") or {}
    kinds = {kind: value for kind, value in given.items() if isinstance(value, dict)}
    kinds = dict(kinds) if kinds else {"full_attention": dict(given)}
    outer = {
        "rope_theta": _first(section, "rope_theta", "rotary_emb_base", "global_rope_theta"),
        "partial_rotary_factor": _first(section, "partial_rotary_factor", "rotary_pct"),
    }
    if "sliding_attention" not in kinds:
        local = _first(section, "rope_local_base_freq", "local_rope_theta")
        kinds |= {"sliding_attention": {"rope_theta": local}} if local is not None else {}
    found: dict[str, Any] = {}
    for kind, settings in kinds.items():
        settings = {**outer, **settings} if kind == "full_attention" else dict(settings)
        settings = {key: value for key, value in settings.items() if value is not None}
        if settings:
            rope_type = settings.pop("type", "default")
            rope_type = settings.pop("rope_type", rope_type)
            settings["rope_type"] = _ROPE_TYPES.get(rope_type, rope_type)
        suffix = "" if kind == "full_attention" else f" of {kind}"
        found |= {f"{key}{suffix}": value for key, value in settings.items()}
    return found


def _first(section: Config, *keys: str) -> Any:
    return next((section[key] for key in keys if section.get(key) is not None), None)


def tied(config: Config, *, has_head: bool | None = None) -> bool | None:
    """Return whether the output head is the input embedding.

    Where `tie_word_embeddings` is absent, transformers takes the default of the architecture's config class,
    which in version 5 is False for about half of them (Llama, Qwen, Mistral) and True for the others (GPT-2,
    Gemma, OPT); without that table, the checkpoint itself says it: embeddings are tied if it has no head.

    Returns:
        What the config says; else, from `has_head`; else None.
    """
    for _, section in _sections(config):
        if section.get("tie_word_embeddings") is not None:
            return bool(section["tie_word_embeddings"])
    return None if has_head is None else not has_head


def output_config(
    config: Config,
    *,
    dtype: str | None,
    vocab_size: int | None,
    layer_sources: Sequence[int] | None,
    tied: bool | None,
    token_ids_from: Config | None = None,
) -> Config:
    """Return config.json of the result.

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

    Raises:
        MergeError: the config cannot say what was asked: a per-layer setting does not survive the new order,
            or a special token has no row any more.
    """
    result = _without_path(config)
    if layer_sources is not None and config.get("is_encoder_decoder"):
        raise MergeError(
            "slices work on models with one stack of layers, and this one is an encoder-decoder",
            code="unsupported_slices",
            key="is_encoder_decoder",
        )
    sections = [section for _, section in _sections(result)]
    if token_ids_from is not None:
        for section, other in zip(sections, _like(sections, token_ids_from), strict=True):
            section |= {key: value for key, value in other.items() if _is_token_id(key)}
    if dtype is not None:
        _set_dtype(result, dtype)
    if vocab_size is not None:
        _check_token_ids(sections, vocab_size)
        _set_where_present(sections, ("vocab_size",), vocab_size)
    if layer_sources is not None:
        for section in sections:
            _move_layers(section, layer_sources)
        _set_where_present(sections, _LAYERS, len(layer_sources))
    if tied is not None:
        _set_where_present(sections, ("tie_word_embeddings",), tied)
        result["tie_word_embeddings"] = tied
    return result


def _without_path(value: Any) -> Any:
    """Return a deep copy without the folder the model was loaded from."""
    if isinstance(value, dict):
        return {key: _without_path(inner) for key, inner in value.items() if key != "_name_or_path"}
    return deepcopy(value)


def _like(sections: list[Config], other: Config) -> list[Config]:
    """Return the sections of another config in the same order; empty ones for those that it lacks."""
    theirs = [section for _, section in _sections(other)]
    return [*theirs, *({} for _ in sections)][: len(sections)]


def _is_token_id(key: str) -> bool:
    return key.endswith("_token_id")


def _set_dtype(config: Config, dtype: str) -> None:
    """Set the dtype under the keys in use, or under the one that every version of transformers reads."""
    keys = ("dtype", "torch_dtype")
    if not any(key in config for key in keys):
        config["torch_dtype"] = dtype
    for section in [config, *(value for value in config.values() if isinstance(value, dict))]:
        section |= {key: dtype for key in keys if key in section}


def _set_where_present(sections: list[Config], keys: tuple[str, ...], value: Any) -> None:
    """Set the keys in every section that has them; the first of them, in the last section, where none has."""
    found = [(section, key) for section in sections for key in keys if key in section]
    for section, key in found or [(sections[-1], keys[0])]:
        section[key] = value


def _check_token_ids(sections: list[Config], vocab_size: int) -> None:
    """Refuse a vocabulary cut off before a special token that had a row."""
    for section in sections:
        old = section.get("vocab_size") or 0
        for key, value in section.items():
            ids = value if isinstance(value, list) else [value]
            lost = [i for i in ids if isinstance(i, int) and vocab_size <= i < old]
            if _is_token_id(key) and lost:
                raise MergeError(
                    f"config.json says {key} {lost[0]}, but the result has only {vocab_size} rows; use "
                    "--vocab union",
                    code="token_id_out_of_range",
                    key=key,
                )


def _move_layers(section: Config, sources: Sequence[int]) -> None:
    """Let the per-layer settings of a section follow the layers to their new places."""
    old = _first(section, *_LAYERS)
    if old is None or list(sources) == list(range(old)):
        return
    for key, value in list(section.items()):
        if key in _INDEX_LISTS and isinstance(value, list):
            section[key] = [place for place, source in enumerate(sources) if source in value]
        elif isinstance(value, list) and len(value) == old and ("layer" in key or "block" in key):
            _check_deep_enough(key, old, sources)
            section[key] = [value[source] for source in sources]
        elif key == "per_layer_config" and isinstance(value, dict):
            moved = {str(place): value.get(str(source)) for place, source in enumerate(sources)}
            section[key] = {place: setting for place, setting in moved.items() if setting is not None}
        elif key in _THRESHOLDS and isinstance(value, int):
            _move_threshold(section, key, sources)
        elif key in _PERIODS and isinstance(value, int) and _PERIODS[key] not in section:
            _check_period(key, value, sources)


def _check_deep_enough(key: str, old: int, sources: Sequence[int]) -> None:
    if max(sources) >= old:
        raise MergeError(
            f"slices take layer {max(sources)}, but {key} has only {old} layers; make the deepest model "
            "the base",
            code="missing_layer",
            key=key,
        )


def _move_threshold(section: Config, key: str, sources: Sequence[int]) -> None:
    """Set the number of leading layers of the first kind; there must be none behind them."""
    if key == "max_window_layers" and (not section.get("use_sliding_window") or "layer_types" in section):
        return
    before = [source < section[key] for source in sources]
    leading = before.index(False) if False in before else len(before)
    if any(before[leading:]):
        place = before.index(True, leading)
        raise MergeError(
            f"config.json says {key} {section[key]}, so layer {sources[place]} must stand before the other "
            f"kind, but the slices put it at place {place}; reorder the slices",
            code="unsupported_slices",
            key=key,
        )
    section[key] = leading


def _check_period(key: str, period: int, sources: Sequence[int]) -> None:
    for place, source in enumerate(sources):
        if period > 1 and place % period != source % period:
            raise MergeError(
                f"config.json says {key} {period}, so kinds go by the layer's number, but the slices put "
                f"layer {source} at place {place}; keep the order of kinds",
                code="unsupported_slices",
                key=key,
            )
