"""`rlhf-report evaluate`: from its options to its report."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import numpy as np

from rlhf_data import (
    PreferenceRecord,
    PromptRecord,
    RunFolder,
    UserError,
    alone_in,
    atomic_write_json,
    atomic_write_lines,
    atomic_write_text,
    finite,
    load_records,
)
from rlhf_eval import stats
from rlhf_eval.evaluation import (
    EvalConfig,
    PairJudge,
    Place,
    RLHFEvaluator,
    Written,
    as_json,
    draw_figures,
    evaluation_findings,
    evaluation_page,
    evaluation_text,
    judge_agreement,
    load_judge,
    load_policy,
    load_prompts,
    measure_against,
    measure_policy,
    read_env_file,
    trade_off,
)
from rlhf_eval.figures import can_draw
from rlhf_eval.scoring import Scorer, as_text, load_scorer
from rlhf_report.evaluate.adversarial import Provocation, facts_of
from rlhf_report.evaluate.engines import check_engines, engine_notes, engine_of
from rlhf_report.evaluate.folder import evaluation_folder
from rlhf_report.evaluate.sources import Source, check_sources, completions_of, fitting, parse_source
from rlhf_report.options import progress

_CASES = 8
"""Prompts whose completions the page shows."""


def run_evaluate(given: dict[str, Any]) -> str:
    """Evaluate, write the report, and return what to print."""
    if given["env_file"]:
        for name, value in read_env_file(given["env_file"]).items():
            os.environ.setdefault(name, value)
    sources = [parse_source(each) for each in given["models"]]
    reference = parse_source(given["reference"]) if given["reference"] else None
    _check_options(given, reference)
    references = [reference] if reference else []
    servers = check_engines(given, [*sources, *references])
    check_sources([*sources, *references])
    prompts = load_prompts(given["prompts"], given["num_prompts"], on_bad_row=given["on_bad_row"])
    (pairs, skipped), (labels, _) = (
        _pairs(given[key], given["on_bad_row"]) for key in ("pairs", "judge_labels")
    )
    every = [*references, *sources]
    with_kl = given["kl"] and reference is not None and not reference.is_file
    skip = given["on_bad_row"] == "skip"
    kept = fitting(every, prompts, given["max_new_tokens"], one_tokenizer=with_kl, skip=skip)
    if len(kept) < 2:
        raise UserError(
            f"{given['prompts']}: fewer than two prompts fit every model; give shorter ones",
            code="too_few_rows",
        )
    written = {each.name: completions_of(each, kept, given["samples"]) for each in every if each.is_file}
    too_long = len(prompts) - len(kept)
    notes = [f"{too_long} prompts do not fit every model and were left out."] * bool(too_long)
    notes += [f"{skipped} rows of {given['pairs']} could not be read and were left out."] * bool(skipped)
    run = evaluation_folder(given)
    with alone_in(run.path):
        evaluation = _Evaluation(given, run, kept, *_scorers(given, run))
        evaluation.written, evaluation.notes, evaluation.servers = written, notes, servers
        evaluation.measure_rewards(pairs)
        evaluators = evaluation.evaluate(sources, reference, pairs)
        return evaluation.report(evaluators, reference, pairs, labels)


def _scorers(given: Mapping[str, Any], run: RunFolder) -> tuple[dict[str, Scorer | None], list[PairJudge]]:
    """The rewards by their argument of `RLHFEvaluator`, and the judges, each tried once."""
    rewards = {
        name: load_scorer(given[name]) if given[name] else None
        for name in ("reward_model", "held_out_reward")
    }
    judges = [load_judge(line, cache_folder=run.path / "judge-cache") for line in given["judges"]]
    for judge in judges:
        if [each.name for each in judges].count(judge.name) > 1:
            raise UserError(
                f"two judges are called {judge.name}; tell them apart with name=... in their lines",
                code="repeated_name",
            )
        if judge.is_remote:
            judge.probe()
    return rewards, judges


class _Evaluation:
    """One evaluation of several models.

    `rewards` are by the name of `RLHFEvaluator`'s argument.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        run: RunFolder,
        prompts: list[PromptRecord],
        rewards: Mapping[str, Scorer | None],
        judges: Sequence[PairJudge],
    ) -> None:
        self.given, self.run, self.prompts = given, run, prompts
        self.rewards, self.judges = rewards, judges
        self.config = EvalConfig(
            max_new_tokens=given["max_new_tokens"],
            temperature=given["temperature"],
            num_samples=given["samples"],
            seed=given["seed"],
            gen_batch_size=given["gen_batch_size"],
        )
        self.provocation = Provocation() if given["adversarial"] else None
        self.accuracies: list[dict[str, Any]] = []
        self.written: dict[str, list[list[Written]]] = {}
        self.notes: list[str] = []
        self.servers: dict[str, str] = {}

    def evaluate(
        self, sources: Sequence[Source], reference: Source | None, pairs: Sequence[PreferenceRecord]
    ) -> list[RLHFEvaluator]:
        """Sample from each model, score and compare it; at most two models are in memory at a time."""
        first = self._evaluator(reference, None) if reference else None
        evaluators = [first] if first else []
        for source in sources:
            evaluator = self._evaluator(source, first)
            if evaluator.policy is not None and evaluator.reference is not None:
                evaluator.kl()
            if pairs and (right := evaluator.implicit_accuracy(pairs)) is not None:
                self._note_accuracy(evaluator.name, "implicit", right)
            evaluators.append(evaluator)
            evaluator.release()
            gc.collect()
        if first:
            first.release()
        return evaluators

    def report(
        self,
        evaluators: Sequence[RLHFEvaluator],
        reference: Source | None,
        pairs: Sequence[PreferenceRecord],
        labels: Sequence[PreferenceRecord],
    ) -> str:
        """Ask the judges, compute the numbers, write everything; what to print."""
        first = evaluators[0] if reference else None
        others = [each for each in evaluators if each is not first]
        self._say_prices(others, first)
        results = self._results(evaluators, first, others, labels)
        results["reward_accuracy"] = self.accuracies
        findings = evaluation_findings(results)
        results["findings"] = findings
        scores = {
            each.name: found.mean(0) for each in evaluators if (found := each.scores("reward")) is not None
        }
        folder = self.run.path
        self._write_completions(evaluators)
        atomic_write_json(folder / "results.json", finite(results))
        atomic_write_text(folder / "evaluation.txt", evaluation_text(results, findings) + "\n")
        cases = [
            {
                "prompt": as_text(self.prompts[i].prompt),
                "answers": [_answer(evaluator, i) for evaluator in evaluators],
            }
            for i in _spread(scores, len(self.prompts), self.config.num_samples)
        ]
        atomic_write_text(folder / "evaluation.html", evaluation_page(results, findings, scores, cases))
        if can_draw():
            draw_figures(results, scores, folder)
        return f"{evaluation_text(results, findings)}\n\n{folder / 'evaluation.html'}"

    def _evaluator(self, source: Source, reference: RLHFEvaluator | None) -> RLHFEvaluator:
        with_kl = (
            self.given["kl"] and not source.is_file and (reference is None or reference.policy is not None)
        )
        policy = None if source.is_file else load_policy(source.path, self.given["dtype"])
        options: dict[str, Any] = {**self.rewards, "config": self.config}
        place = Place(source.name, self.run.path / "state" / source.name.replace("/", "_"), progress)
        evaluator = RLHFEvaluator(
            policy, reference if with_kl else None, prompts=self.prompts, place=place, **options
        )
        if source.is_file:
            evaluator.with_completions(self.written[source.name])
        engine = engine_of(source, self.given, self.servers, policy) if policy is not None else None
        evaluator.with_engine(engine).completions()
        if self.provocation is not None and policy is not None:
            self.provocation.ask(policy, engine, place, self.config, options)
        for kind in evaluator.rewards:
            evaluator.scores(kind)
        return evaluator

    def measure_rewards(self, pairs: Sequence[PreferenceRecord]) -> None:
        """The accuracy of the rewards; rewards that cannot score fail here, before any model is sampled."""
        if not pairs:
            return
        rewards: dict[str, Any] = dict(self.rewards)
        found = RLHFEvaluator(None, **rewards).reward_accuracy(pairs)
        for kind, right in found.items():
            option = "reward_model" if kind == "reward" else kind
            self._note_accuracy(str(self.given[option]), kind, right)

    def _note_accuracy(self, name: str, by: str, right: np.ndarray) -> None:
        accuracy = as_json(stats.proportion_interval(right, unit="pair"))
        self.accuracies.append({"name": name, "by": by, "pairs": len(right), "accuracy": accuracy})

    def _say_prices(self, others: Sequence[RLHFEvaluator], first: RLHFEvaluator | None) -> None:
        count = self.given["winrate_prompts"]
        for judge in self.judges:
            if judge.is_remote and first is not None:
                questions = [as_text(record.prompt) for record in self.prompts[:count]]
                step = self.config.num_samples
                theirs = [each.text for each in first.completions()[::step]][:count]
                for each in others:
                    ours = [written.text for written in each.completions()[::step]][:count]
                    price = judge.price(questions, ours, theirs)
                    click.echo(f"{judge.name} on {each.name}: at most {price}", err=True)

    def _results(
        self,
        evaluators: Sequence[RLHFEvaluator],
        first: RLHFEvaluator | None,
        others: Sequence[RLHFEvaluator],
        labels: Sequence[PreferenceRecord],
    ) -> dict[str, Any]:
        models = [measure_policy(each) for each in evaluators]
        comparisons, agreement = [], []
        for each in others if first else []:
            assert first is not None
            count = self.given["winrate_prompts"]
            comparisons.append(measure_against(each, first, self.judges, first=count, labels=labels))
            verdicts = {
                judge.name: found
                for judge in self.judges
                if (found := each.win_rate(first, judge=judge, first=count)) is not None
            }
            agreement += judge_agreement(verdicts)
        reference = models[0] if first else None
        names = {"reward": self.given["reward_model"], "held_out_reward": self.given["held_out_reward"]}
        return {
            "prompts": self.given["prompts"],
            "num_prompts": len(self.prompts),
            "written_elsewhere": list(self.written),
            "reference": first.name if first else None,
            "config": self.config.to_dict(),
            "reward_names": names,
            "models": models,
            "comparisons": comparisons,
            "agreement": agreement,
            "trade_off": trade_off(models[1:] if first else models, reference),
            "adversarial": self.provocation and self.provocation.results(),
            "usage": {judge.name: judge.usage for judge in self.judges if judge.usage is not None},
            "notes": self._notes(),
        }

    def _write_completions(self, evaluators: Sequence[RLHFEvaluator]) -> None:
        """Write all completions to one file, and each model's to its own, for `compare` and `samples`."""
        every = []
        for evaluator in evaluators:
            rows = [finite(row) for row in _rows(evaluator)]
            every += rows
            name = f"{evaluator.name.replace('/', '_')}.jsonl"
            atomic_write_lines(self.run.path / "completions" / name, rows)
        atomic_write_lines(self.run.path / "completions.jsonl", every)

    def _notes(self) -> list[str]:
        notes = [
            *self.notes,
            "Intervals are 95%, over prompts: completions of one prompt are resampled together.",
            "Prompts are spread evenly over their file; each model was sampled with the same seed.",
        ]
        notes += engine_notes(self.given, self.servers)
        if self.config.temperature != 1:
            notes.append(
                "The KL is that of the models at temperature 1 along completions drawn at another; k1 and k3 "
                "would be biased there and are left out."
            )
        if self.given["reward_model"] and self.given["reward_model"] in [judge.line for judge in self.judges]:
            notes.append(
                "The judge is the reward itself: where models were trained on it, it is not independent."
            )
        return notes


def _answer(evaluator: RLHFEvaluator, prompt: int) -> dict[str, Any]:
    place = prompt * evaluator.config.num_samples
    text = evaluator.completions()[place].text
    return {"name": evaluator.name, "text": text, "facts": facts_of(evaluator, place)}


def _rows(evaluator: RLHFEvaluator) -> Iterator[dict[str, Any]]:
    scores = {kind: evaluator.scores(kind) for kind in evaluator.rewards}
    divergences = evaluator.kl() if evaluator.reference is not None else None
    for place, written in enumerate(evaluator.completions()):
        prompt = evaluator.prompts[evaluator.clusters[place]]
        row = {"prompt": as_text(prompt.prompt), "model": evaluator.name, "completion": written.text}
        row |= {kind: float(found[:, place].mean()) for kind, found in scores.items() if found is not None}
        if divergences is not None:
            row["kl"] = float(divergences["kl"][place])
        if written.ids is not None:
            row |= {"length": len(written.ids), "finish_reason": "length" if written.truncated else "stop"}
        yield row


def _spread(scores: Mapping[str, np.ndarray], prompts: int, samples: int) -> list[int]:
    """Prompts to show: spread over the quantiles of the last model's reward, to include failures."""
    order = np.arange(prompts)
    if scores:
        order = np.argsort(list(scores.values())[-1][::samples], kind="stable")
    return [int(order[int(i)]) for i in np.linspace(0, prompts - 1, min(_CASES, prompts))]


def _check_options(given: Mapping[str, Any], reference: Source | None) -> None:
    if given["judges"] and reference is None:
        raise UserError("--judge compares with --reference; give both", code="conflicting_options")
    if given["judge_labels"] and not given["judges"]:
        raise UserError("--judge-labels corrects what a judge says; give --judge too", code="unused_option")


def _pairs(path: str | None, on_bad_row: Any) -> tuple[list[PreferenceRecord], int]:
    """The pairs of a file, and how many of its rows were left out."""
    if path is None:
        return [], 0
    loaded = load_records(path, "preference", on_bad_row=on_bad_row)
    return loaded.records, len(loaded.skipped)
