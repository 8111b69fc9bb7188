"""The model `rlhf` of lm-eval: contexts scored as prefix trees, completions from our engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

from rlhf_data import UserError
from rlhf_eval.evaluation import load_policy
from rlhf_eval.harness.scoring import score_continuations
from rlhf_infer import SamplingParams, TransformersEngine
from rlhf_models import generation_length

_SAMPLING = {"top_p": float, "top_k": int, "min_p": float, "repetition_penalty": float, "seed": int}
"""Of a task's generation settings, those with the same meaning here; a temperature is always there."""
_HARNESS = ("do_sample", "until", "max_gen_toks", "temperature")
_LENGTH = 2048
"""Of a context whose limit no config names, as in lm-eval's own models."""


@register_model("rlhf")
class PackedLM(TemplateLM):
    """A model or adapter, scored on packed prefix trees; results are those of lm-eval's model `hf`.

    Args:
        pretrained: a folder, a run's folder included, or a name on the hub.
        dtype: dtype of the weights; `auto` as stored.
        max_length: tokens of context and continuation; what is longer loses its beginning. None: the model's.
        max_tokens: of one forward pass, those that texts share counted once.
        max_gen_toks: longest completion where a task says nothing.
        add_bos_token: whether texts begin with the tokenizer's special tokens; None as the tokenizer does.
        batch_size: 1 or `auto`, which change nothing: passes are cut by `max_tokens`.
        device: `cpu` keeps the model there; anything else is the GPU if there is one.
        others: settings of lm-eval's own models, none of which is known here.
    """

    def __init__(
        self,
        pretrained: str = "",
        dtype: str = "auto",
        *,
        max_length: int | None = None,
        max_tokens: int = 1 << 14,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        **others: Any,
    ) -> None:
        super().__init__()
        if str(batch_size) not in ("1", "auto") or others.pop("max_batch_size", None) is not None:
            raise UserError(
                "the model rlhf has no batch size: leave it out, and set max_tokens, the tokens of a forward "
                "pass, in --model_args",
                code="unknown_key",
            )
        if others:
            known = "pretrained, dtype, max_length, max_tokens, max_gen_toks, add_bos_token"
            raise UserError(
                f"--model_args has {', '.join(others)}; the model rlhf takes {known}", code="unknown_key"
            )
        if not pretrained:
            raise UserError("--model_args names no model; add pretrained=MODEL", code="missing_value")
        for name, value in (
            ("max_length", max_length),
            ("max_tokens", max_tokens),
            ("max_gen_toks", max_gen_toks),
        ):
            if value is not None and not (isinstance(value, int) and value >= 1):
                raise UserError(
                    f"{name} is {value!r} in --model_args; expected a number from 1", code="invalid_value"
                )
        if add_bos_token not in (None, True, False):
            raise UserError(
                f"add_bos_token is {add_bos_token!r}; expected True or False", code="invalid_value"
            )
        policy = load_policy(str(pretrained), str(dtype))
        self.tokenizer = policy.tokenizer
        self.model = policy.model.to("cpu") if device == "cpu" else policy.model
        self._device = self.model.device
        if add_bos_token and self.tokenizer.bos_token_id is None:
            raise UserError(f"the tokenizer of {pretrained} has no start token; leave out add_bos_token")
        self.max_length = int(max_length or generation_length(self.model.config) or _LENGTH)
        self.max_tokens, self.max_gen_toks, self.add_bos_token = max_tokens, max_gen_toks, add_bos_token
        self.engine = TransformersEngine(self.model, self.tokenizer)
        self.name = str(pretrained)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Prefix of a text without context: the token that begins texts, or the one that ends them."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Names the chat template in the harness's cache."""
        return self.name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Token ids of a text; a text that begins with the first special token gets no second one."""
        if add_special_tokens is None:
            begins = has_bos_prefix(string, self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if begins else self.add_bos_token
        chosen = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        ids = self.tokenizer.encode(string, **chosen)
        begin = self.tokenizer.bos_token_id
        # Some tokenizers add none despite this argument.
        return (
            [begin, *ids]
            if chosen.get("add_special_tokens") and self.add_bos_token and ids[:1] != [begin]
            else ids
        )

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation, open for the answer or for the rest of one."""
        if not self.tokenizer.chat_template:
            raise UserError(
                f"{self.name} has no chat template; leave out --apply_chat_template", code="no_chat_template"
            )
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Σ log-probs of whole texts, cut into windows of `max_length` where they are longer."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            for window in utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(number)
        sums = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows, disable_tqdm=disable_tqdm)
        for owner, (logp, _) in zip(owners, scores, strict=True):
            sums[owner] += logp
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [self._cut(context, continuation) for _, context, continuation in requests]
        with tqdm(total=len(pairs), disable=disable_tqdm, desc="Scoring continuations") as bar:
            scores = score_continuations(self.model, pairs, max_tokens=self.max_tokens, done=bar.update)
        found = [(score.logp, score.greedy) for score in scores]
        for (texts, _, _), score in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return found

    def _cut(self, context: list[int], continuation: list[int]) -> tuple[list[int], list[int]]:
        """Without the beginning that does not fit; the last token is predicted and not read."""
        if not context or not continuation or len(continuation) > self.max_length:
            raise UserError(
                f"a continuation of {len(continuation)} tokens behind a context of {len(context)} cannot be "
                f"scored: both need one token at least, and it fits into {self.max_length} at most",
                code="context_too_short",
            )
        kept = self.max_length + 1 - len(continuation)
        return context[-kept:], continuation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Completions up to the first of a task's stop texts; a request that comes twice is drawn twice."""
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        found: list[str] = [""] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Drawing completions") as bar:
            for numbers in groups.values():
                params = self._params(requests[numbers[0]].args[1])
                contexts = [requests[number].args[0] for number in numbers]
                for number, text in zip(numbers, self._complete(contexts, params), strict=True):
                    found[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
                bar.update(len(numbers))
        return found

    def _complete(self, contexts: Sequence[str], params: SamplingParams) -> list[str]:
        """A completion of each context; equal contexts get different samples."""
        kept = self.max_length - params.max_new_tokens
        if kept < 1:
            raise UserError(
                f"a completion of {params.max_new_tokens} tokens leaves no room for a context in "
                f"{self.max_length}; give --gen_kwargs max_gen_toks=N below that",
                code="context_too_short",
            )
        texts: dict[str, list[str]] = {}
        for times in sorted(set((counts := Counter(contexts)).values())):
            some = [context for context, count in counts.items() if count == times]
            prompts = [self.tok_encode(context)[-kept:] for context in some]
            for context, rollouts in zip(some, self.engine.generate(prompts, times, params), strict=True):
                texts[context] = [self._text(rollout.completion_ids, params.stop) for rollout in rollouts]
        return [texts[context].pop(0) for context in contexts]

    def _text(self, ids: Sequence[int], stop: Sequence[str]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return postprocess_generated_text(text, list(stop), None)

    def _params(self, settings: dict[str, Any]) -> SamplingParams:
        """How a task wants its completions drawn, in our terms."""
        try:
            given: dict[str, Any] = dict(normalize_gen_kwargs(settings, self.max_gen_toks))
            known = {name: kind(given[name]) for name, kind in _SAMPLING.items() if name in given}
        except ValueError as error:
            raise UserError(
                f"generation settings {settings}: {error}; expected numbers", code="invalid_value"
            ) from error
        unknown = sorted(set(given) - {*_HARNESS, *_SAMPLING})
        if unknown:
            raise UserError(
                f"the generation setting {unknown[0]} is not one of {', '.join((*_HARNESS, *_SAMPLING))}; "
                "leave it out of the task or of --gen_kwargs",
                code="unknown_key",
            )
        return SamplingParams(
            max_new_tokens=given["max_gen_toks"],
            temperature=float(given.get("temperature") or 0.0),
            stop=tuple(text for text in given["until"] if text),
            **known,
        )
