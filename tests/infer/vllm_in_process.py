"""Runs `VLLMEngine` with a real vLLM and prints as JSON what came out: `vllm_in_process.py FOLDER`.

Started by test_vllm_real.py under the Python of an environment that has vLLM.
"""

from __future__ import annotations

import contextlib
import copy
import json
import random
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_data import TokenSequence, UserError, pack
from rlhf_infer import SamplingParams, SearchSettings, SearchTree, TransformersEngine, TreeSearch
from rlhf_infer.vllm.engine import VLLMEngine
from rlhf_infer.vllm.settings import VLLMSettings
from rlhf_infer.vllm.weight_export import write_weight_folder
from rlhf_models import ProcessRewardModel
from rlhf_models.adapters.lora import LoraSettings, apply_lora
from rlhf_models.language_model.logps import token_logps
from rlhf_models.loading.tiny import build_tiny_llama, train_byte_tokenizer

TEXT = "mary went to kitchen . gossip says in garden . where is mary ?"
GREEDY = SamplingParams(12, 0.0)
TRUNCATED = SamplingParams(
    12, 0.7, 3, top_p=0.9, top_k=20, min_p=0.02, repetition_penalty=1.3, min_new_tokens=2
)
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_gib": 1 / 16,
    "max_model_len": 128,
    "enforce_eager": True,
}


class Interrupted(Exception):
    """Stands for a Ctrl-C."""


def make_model(tokenizer: Any) -> Any:
    """A random Llama, input and output embeddings tied, with distributions that are far from flat."""
    model = build_tiny_llama(
        len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        hidden_size=64,
        num_heads=2,
        intermediate_size=64,
        seed=1,
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.mul_(8.0 if "embed" in name else 12.0)
    return model


def nudge(model: Any, seed: int, names: str = "") -> None:
    """Add noise to the matrices whose names hold `names`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and names in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def make_prompts(tokenizer: Any) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, len(tokenizer), (n,), generator=generator).tolist() for n in (1, 9, 4, 17, 9)]
    return [*prompts, prompts[3]]


def ids(rollouts: Any) -> list[list[list[int]]]:
    return [[rollout.completion_ids for rollout in group] for group in rollouts]


def generated(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    """What transformers generates greedily."""
    found = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        output = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False
        )
        found.append(output[0, len(prompt) :].tolist())
    return found


def mismatch(model: Any, rollouts: Any, temperature: float) -> float:
    """Largest difference between the rollouts' log-probs and the trainer's."""
    worst = 0.0
    for rollout in [rollout for group in rollouts for rollout in group]:
        tokens = [*rollout.prompt_ids, *rollout.completion_ids]
        (batch,) = pack([TokenSequence(tokens, len(rollout.prompt_ids))])
        with torch.no_grad():
            expected = token_logps(model, batch, temperature=temperature).logps
        worst = max(worst, float((expected - torch.tensor(rollout.logps)).abs().max()))
    return worst


def stop_text(tokenizer: Any, completions: list[list[int]]) -> tuple[str, int, int]:
    """A new text over two tokens of a completion, which completion that is, and its tokens until then."""
    for which, tokens in enumerate(completions):
        for at in range(1, 9):
            text = tokenizer.decode(tokens[at : at + 2])[1:]
            new = text and text not in tokenizer.decode(tokens[: at + 1])
            if new and text.isascii() and text.isprintable():
                return text, which, at + 2
    raise AssertionError("no completion has a text to stop at")


def follows(engine: Any, model: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """Whether an engine generates what the model does."""
    greedy, sampled = engine.generate(prompts, 2, GREEDY), engine.generate(prompts, 3, TRUNCATED)
    return {
        "greedy": [group[0] for group in ids(greedy)] == generated(model, prompts),
        "mismatch": max(mismatch(model, greedy, 1.0), mismatch(model, sampled, 0.7)),
        "tokens": ids(greedy),
    }


def refusal(call: Any) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    return ""


def random_states() -> list[Any]:
    return [random.getstate()[1], np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]  # type: ignore[index]


def sampling(engine: VLLMEngine, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Facts about sampling with fixed weights."""
    prompts = make_prompts(tokenizer)
    ours = TransformersEngine(model, tokenizer)
    greedy = ids(engine.generate(prompts, 1, GREEDY))
    facts: dict[str, Any] = {}
    sure = [
        SamplingParams(12, 1.0, top_k=1),
        SamplingParams(12, 1.0, top_p=1e-6),
        SamplingParams(12, min_p=1),
    ]
    facts["sure samples are greedy"] = [ids(engine.generate(prompts, 1, each)) == greedy for each in sure]
    facts["mismatch"] = {}
    for params in (SamplingParams(12, 1.0, 3), SamplingParams(12, 0.7, 3), TRUNCATED):
        together = engine.generate(prompts, 3, params)
        facts["mismatch"][str(params)] = mismatch(model, together, params.temperature)
    alone = engine.generate([prompts[2]], 5, TRUNCATED)[0]
    facts["alone"] = [r.completion_ids for r in alone[:3]] == ids(together)[2]
    facts["equal prompts"] = ids(together)[3] == ids(together)[5]
    facts["different"] = len({tuple(r.completion_ids) for group in together[:5] for r in group})
    facts["other seed"] = ids(engine.generate(prompts, 3, SamplingParams(12, 1.0, 4))) != ids(
        engine.generate(prompts, 3, SamplingParams(12, 1.0, 3))
    )
    stop, which, length = stop_text(tokenizer, [tokens for (tokens,) in greedy])
    facts["stops"] = []
    for least in (0, length - 1, length, length + 1):
        params = SamplingParams(12, 0.0, stop=("zzz", stop), min_new_tokens=least)
        found, expected = engine.generate(prompts, 1, params), ours.generate(prompts, 1, params)
        reasons = [[r.finish_reason for group in each for r in group] for each in (found, expected)]
        more = len(found[which][0].logps) - length
        facts["stops"].append([ids(found) == ids(expected), reasons[0] == reasons[1], more])
    end = ids(engine.generate([prompts[2]], 60, SamplingParams(60, 1.0, 2)))[0]
    facts["ends"] = sum(tokens[-1] == tokenizer.eos_token_id for tokens in end)
    facts["long"] = mismatch(
        model, engine.generate([[5 + i] * 100 for i in range(60)], 1, SamplingParams(2, 1.0)), 1.0
    )
    processors = SamplingParams(4, logits_processors=(lambda tokens, logits: logits,))
    facts["refused"] = [
        refusal(lambda: engine.generate([[5] * 120], 1, GREEDY)),
        refusal(lambda: engine.generate(prompts, 1, processors)),
    ]
    facts["nothing"] = engine.generate([], 2, GREEDY)
    return facts


def trees(
    engine: Any, scorer: Any, params: SamplingParams, *, resume: Any = (), **settings: Any
) -> list[SearchTree]:
    """The trees of a search by steps of at most four tokens."""
    search = SearchSettings(width=4, max_step_tokens=4, separator="\n").model_copy(update=settings)
    prompts = ["where is mary ?", "so", "gossip says"]
    found = TreeSearch(engine, scorer, engine.tokenizer, search, params).run(prompts, resume=resume)
    return [each.tree for each in found]


def alike(found: list[SearchTree], expected: list[SearchTree]) -> tuple[bool, float]:
    """Whether trees have the same steps and visits, and then the largest difference of their scores."""
    ours, theirs = ([node for tree in each for node in tree.nodes] for each in (found, expected))
    steps = [
        [(n.parent, n.token_ids, n.terminal, n.visits, n.draws) for n in each] for each in (ours, theirs)
    ]
    if steps[0] != steps[1]:
        return False, 0.0
    return True, max(abs((a.score or 0) - (b.score or 0)) for a, b in zip(ours, theirs, strict=True))


def searching(engine: VLLMEngine, model: Any, tokenizer: Any) -> dict[str, Any]:
    """Facts about tree search, where there is one token to draw against our own engine."""
    ours = TransformersEngine(model, tokenizer)
    scorer = ProcessRewardModel.from_backbone(copy.deepcopy(model), tokenizer).eval()
    greedy, sure = SamplingParams(20, 0.0), SamplingParams(20, 1.0, 3, top_k=1)
    facts: dict[str, Any] = {"alike": {}}
    one = {"strategy": "beam", "width": 1, "rounds": 1}
    facts["alike"]["greedy"] = alike(trees(engine, scorer, greedy, **one), trees(ours, scorer, greedy, **one))
    for strategy in ("mcts", "beam", "dvts", "best-first", "best-of-n"):
        own = {"strategy": strategy, "budget_tokens": 90}
        found = alike(trees(engine, scorer, sure, **own), trees(ours, scorer, sure, **own))
        facts["alike"][strategy] = found
    drawn = SamplingParams(20, 1.0, 3)
    whole = trees(engine, scorer, drawn, budget_tokens=90)
    facts["spent"], facts["steps"] = [tree.spent for tree in whole], [len(tree.nodes) for tree in whole]
    part = trees(engine, scorer, drawn, budget_tokens=40)
    facts["resumed"] = alike(trees(engine, scorer, drawn, budget_tokens=90, resume=part), whole)
    other = trees(engine, scorer, SamplingParams(20, 1.0, 4), budget_tokens=90)
    facts["other seed"] = alike(other, whole)[0]
    facts["refused"] = refusal(lambda: trees(engine, scorer, SamplingParams(126, 1.0)))
    return facts


def interruption(engine: VLLMEngine, prompts: list[list[int]]) -> bool:
    """Whether calls after some that were broken off, at whatever moment, are undisturbed by it."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    expected = ids(engine.generate(prompts, 2, GREEDY))
    signal.signal(signal.SIGALRM, interrupt)
    for seconds in np.linspace(0.02, 0.3, 12):
        signal.setitimer(signal.ITIMER_REAL, seconds)
        with contextlib.suppress(Interrupted):
            while True:
                engine.generate(prompts, 50, SamplingParams(100, 1.0, 1))
        if ids(engine.generate(prompts, 2, GREEDY)) != expected:
            return False
    return True


def full_weights(folder: Path) -> dict[str, Any]:
    tokenizer = train_byte_tokenizer([TEXT], 300)
    model, prompts = make_model(tokenizer), make_prompts(tokenizer)
    write_weight_folder(model, folder, tokenizer=tokenizer)
    states = random_states()
    engine = VLLMEngine(folder, tokenizer, VLLMSettings(**SETTINGS))
    facts: dict[str, Any] = {"start": follows(engine, model, prompts)}
    engine.generate(prompts, 3, TRUNCATED)
    facts["random states kept"] = states == random_states()
    facts["sampling"] = sampling(engine, model, tokenizer)
    facts["searching"] = searching(engine, model, tokenizer)

    nudge(model, 5)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    engine.update_weights(model)
    facts["updated"] = follows(engine, model, prompts)
    kept = copy.deepcopy(model)
    nudge(model, 6)
    facts["copied"] = follows(engine, kept, prompts)
    model.load_state_dict(before)

    adapted = apply_lora(copy.deepcopy(model), LoraSettings(lora_r=4))
    nudge(adapted, 7, "lora_B")
    state = {name: tensor.clone() for name, tensor in adapted.state_dict().items()}
    engine.update_weights(adapted)
    facts["merged"] = follows(engine, adapted, prompts)
    facts["untouched"] = all(torch.equal(state[name], value) for name, value in adapted.state_dict().items())
    facts["interruption"] = interruption(engine, prompts)
    engine.close()
    facts["closed"] = not torch.distributed.is_initialized()
    return facts


def adapters(folder: Path) -> dict[str, Any]:
    tokenizer = train_byte_tokenizer([TEXT], 300)
    model, prompts = make_model(tokenizer), make_prompts(tokenizer)
    engine = VLLMEngine(folder, tokenizer, VLLMSettings(**SETTINGS, max_lora_rank=4))
    facts: dict[str, Any] = {"start": follows(engine, model, prompts), "adapted": [], "names": []}
    adapted = apply_lora(copy.deepcopy(model), LoraSettings(lora_r=4))
    for seed in (1, 2):
        nudge(adapted, seed, "lora_B")
        engine.update_weights(adapted)
        facts["adapted"].append(follows(engine, adapted, prompts))
        facts["names"].append(
            [
                engine._adapter.lora_name,
                list(engine._llm.llm_engine.list_loras()),
                len(list(engine._folder.iterdir())),
            ]
        )
    with adapted.disable_adapter():
        engine.update_weights(adapted)
    facts["bare"] = follows(engine, model, prompts)
    wide = apply_lora(copy.deepcopy(model), LoraSettings(lora_r=8))
    facts["refused"] = [refusal(partial(engine.update_weights, each)) for each in (wide, model)]
    engine.close()
    return facts


def main() -> None:
    folder = Path(sys.argv[1]) / "model"
    facts = {"full": full_weights(folder), "lora": adapters(folder)}
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
