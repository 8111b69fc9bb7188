"""From the options of `rlhf-report validate` to its report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click
import numpy as np

from rlhf_data import Text, UserError, check_text, load_records, model_folder, read_rows
from rlhf_eval.stats import Interval, proportion_interval
from rlhf_eval.validation import AdversarialValidator, NLIModel, ReferenceScorer, Validation
from rlhf_report.options import new_run

_SHOWN = 3
_SOURCES = ("source", "context", "story", "passage", "document")


def run_validation(given: Mapping[str, Any]) -> bool:
    """Validate, write the report and print it; whether too many completions have a flaw."""
    if given["human"] and not given["reference"]:
        raise UserError(
            "--human sets thresholds of a reference model; give --reference too", code="unused_option"
        )
    if given["source"] and not given["nli"]:
        raise UserError("--source is what --nli compares with; give --nli too", code="unused_option")
    prompts, completions, sources = _rows(given["data"], given["source"])
    if given["nli"] and not any(sources):
        column = given["source"] or ", ".join(_SOURCES)
        raise UserError(
            f"{given['data']} has no text in {column} for --nli to compare with; name it with --source",
            code="missing_column",
            column=given["source"],
        )
    validator = _validator(given)
    with new_run(given["output_dir"], "validation") as run:
        found = validator.validate(prompts, completions, sources)
        share = _share([bool(each.flaws) for each in found])
        kinds = _kinds(found)
        results = {
            "completions": len(found),
            "flagged": asdict(share),
            "flaws": {kind: asdict(each) for kind, each in kinds.items()},
            "thresholds": asdict(validator.config),
            "mean_score": float(np.mean([each.score for each in found])),
            "consistency": _consistency(found, validator.infers),
        }
        rows = zip(prompts, completions, found, strict=True)
        run.append_lines(
            "validations.jsonl",
            [{"prompt": prompt, "completion": text, **each.to_dict()} for prompt, text, each in rows],
        )
        run.write_results(results)
    _print(found, completions, share, kinds)
    if results["consistency"]:
        click.echo(_consistency_sentence(results["consistency"]))
    click.echo(str(run.path))
    limit = given["max_flagged"]
    if limit is not None and share.low > limit:
        click.echo(f"more than {limit:.1%} of the completions have a flaw")
        return True
    return False


def _rows(path: str, column: str | None) -> tuple[list[Text], list[str], list[str | None]]:
    """Prompts, completions and sources of rows; empty completions included, for those are flawed."""
    prompts, completions, sources = list[Text](), list[str](), list[str | None]()
    columns = (column,) if column else _SOURCES
    for number, (_, row) in enumerate(read_rows(path), 1):
        prompt, completion = row.get("prompt"), row.get("completion")
        if not isinstance(completion, str) or not isinstance(prompt, str | list):
            raise UserError(
                f"{path}, row {number}: expected a prompt (a text or messages) and a completion (a text), as "
                "rlhf-serve generate writes them",
                code="missing_value",
                row=number,
            )
        texts = (row.get(name) for name in columns)
        source = next((text for text in texts if isinstance(text, str) and text.strip()), None)
        for text in (json.dumps(prompt, ensure_ascii=False), completion, source or ""):
            check_text(text, f"{path}, row {number}")
        prompts.append(prompt)
        completions.append(completion)
        sources.append(source)
    if not prompts:
        raise UserError(f"{path} has no rows", code="no_rows")
    return prompts, completions, sources


def _people(path: str) -> tuple[list[Text], list[str]]:
    """Good completions, in any form that `rlhf-train sft` takes."""
    records = load_records(path, "sft").records
    return [each.prompt for each in records], [_text(each.completion) for each in records]


def _validator(given: Mapping[str, Any]) -> AdversarialValidator:
    people = _people(given["human"]) if given["human"] else None
    infers = _nli(given) if given["nli"] else None
    if not given["reference"]:
        return AdversarialValidator(infers=infers)
    from rlhf_models import load_causal_lm, load_tokenizer

    model = model_folder(given["reference"])
    reference = ReferenceScorer(load_causal_lm(model, dtype=given["dtype"]), load_tokenizer(model))
    validator = AdversarialValidator(reference, infers)
    return validator.calibrated(*people) if people else validator


def _nli(given: Mapping[str, Any]) -> NLIModel:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    return NLIModel.from_pretrained(model_folder(given["nli"]), dtype=given["dtype"], device=device)


def _consistency(found: Sequence[Validation], nli: Any) -> dict[str, Any] | None:
    """Means over the rows with a source; None where there is none, or no model."""
    rows = [each.measures for each in found if each.measures["entailment"] is not None]
    if not rows:
        return None
    means = {
        name: float(np.mean([row[name] or 0.0 for row in rows])) for name in ("entailment", "contradiction")
    }
    return {"rows": len(rows), **means, "pairs_cut": nli.cut}


def _kinds(found: Sequence[Validation]) -> dict[str, Interval]:
    """The share of completions with each flaw, the most frequent first."""
    counts = Counter(flaw.kind for each in found for flaw in each.flaws)
    return {
        kind: _share([any(flaw.kind == kind for flaw in each.flaws) for each in found])
        for kind, _ in counts.most_common()
    }


def _share(flags: Sequence[bool]) -> Interval:
    return proportion_interval(np.asarray(flags, dtype=float), np.arange(len(flags)))


def _print(
    found: Sequence[Validation], completions: Sequence[str], share: Interval, kinds: Mapping[str, Interval]
) -> None:
    click.echo(f"{len(found):,} completions, with a flaw {_percent(share)}")
    for kind, each in kinds.items():
        click.echo(f"  {kind:14} {_percent(each)}")
    worst = sorted(range(len(found)), key=lambda place: found[place].score)
    for place in [place for place in worst if found[place].flaws][:_SHOWN]:
        flaws = ", ".join(flaw.kind for flaw in found[place].flaws)
        click.echo(f"row {place + 1}: {flaws}: {completions[place][:80]!r}")


def _consistency_sentence(found: Mapping[str, Any]) -> str:
    said = (
        f"{found['rows']:,} completions compared with their sources: mean entailment "
        f"{found['entailment']:.2f}, mean of the worst contradictions {found['contradiction']:.2f}"
    )
    if cut := found["pairs_cut"]:
        said += (
            f"; {cut:,} pairs of sentences did not fit the NLI model's context, and what was cut off is not "
            "compared"
        )
    return said


def _percent(share: Interval) -> str:
    return f"{share.estimate:.1%} [{share.low:.1%}, {share.high:.1%}]"


def _text(completion: Text) -> str:
    if isinstance(completion, str):
        return completion
    return "\n".join(str(turn.get("content") or "") for turn in completion)
