"""Sentences about a preparation."""

from __future__ import annotations

from typing import Any

REASON_WORDS = {
    "bad_row": "cannot be read",
    "empty": "empty completion",
    "too_short": "completion too short",
    "tie": "completions nearly the same",
    "contaminated": "shares text with an evaluation file",
    "too_long": "does not fit in max_length",
    "contradiction": "same texts with opposite labels",
    "duplicate": "same row again",
    "duplicate_prompt": "same prompt again",
}


def opening(report: dict[str, Any]) -> str:
    """Rows in and out, in a sentence."""
    rows, changed = report["rows"], report["changed"]
    said = f"{rows['read']:,} rows were read, {rows['read'] - rows['kept']:,} left out; "
    said += f"{rows['train']:,} are for training and {rows['eval']:,} held out."
    if changed["shortened"]:
        said += f" {changed['shortened']:,} had turns or words taken out of their prompts."
    if changed["converted"]:
        said += f" {changed['converted']:,} were turned into chat messages."
    if report["duplicate_prompts"]:
        said += f" {report['duplicate_prompts']:,} had the prompt of an earlier row."
    return said


def said_of_lengths(report: dict[str, Any]) -> str:
    """Mean, median and longest, before and after."""
    lengths = report["lengths"]
    unit = lengths["unit"]

    def one(side: str) -> str:
        mean, median = lengths["mean"][side], lengths["median"][side]
        return f"mean {mean:.1f}, median {median:g}, at most {lengths['max'][side]:,}"

    said = f"Prompt and longest completion in {unit}: {one('before')} before; {one('after')} after."
    return said + (f" Held-out rows: {one('eval')}." if report["rows"]["eval"] else "")


def summary(report: dict[str, Any], places: dict[str, list[dict[str, str]]]) -> list[str]:
    """Lines for the terminal."""
    lines = [opening(report)]
    for name, count in report["left_out"].items():
        shown = "; ".join(entry["where"] for entry in places.get(name, []))
        lines.append(f"  left out, {REASON_WORDS[name]}: {count:,}" + (f" ({shown})" if shown else ""))
    return [*lines, said_of_lengths(report)]
