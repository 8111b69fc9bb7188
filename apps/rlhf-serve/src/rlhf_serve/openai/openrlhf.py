"""Reward requests of OpenRLHF's trainers: sequences as the policy's tokenizer decodes them."""

from __future__ import annotations

import re

from rlhf_serve.service.tokenization import Texts


def split_query(query: str, prompt: str, texts: Texts) -> tuple[str, str]:
    """Prompt and completion of a decoded sequence.

    OpenRLHF decodes sequences with their special tokens: padding and a begin token before the prompt, which
    the prompt itself may lack, an end token and padding after the completion. Neither is part of a text.

    Returns:
        Both; where the query does not begin with the prompt, no prompt and the whole of the query.
    """
    special = "|".join(map(re.escape, sorted(texts.tokenizer.all_special_tokens, key=len, reverse=True)))
    if special:
        query = re.sub(rf"(?:{special})+\Z", "", query)
    if query.startswith(prompt):
        return prompt, query[len(prompt) :]
    bare_query, bare_prompt = query, prompt
    if special:
        lead = re.compile(rf"\A(?:\s*(?:{special}))+\s*")
        bare_query, bare_prompt = lead.sub("", query), lead.sub("", prompt.lstrip())
    if bare_query.startswith(bare_prompt):
        return prompt, bare_query[len(bare_prompt) :]
    return "", bare_query
