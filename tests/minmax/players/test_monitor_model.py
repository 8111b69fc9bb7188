"""The monitor by itself."""

import torch

from rlhf_data import QADatasetConfig, QARecord
from rlhf_minmax import MonitorModel
from rlhf_minmax.formats import TextRules
from rlhf_minmax.game.prompts import Prompts


def test_it_criticises_what_the_game_would_show_it(tiny_model_folder, monkeypatch):
    monitor = MonitorModel.from_pretrained(tiny_model_folder)
    asked = []
    generate = monitor.generate
    monkeypatch.setattr(
        monitor, "generate", lambda prompts, **kw: asked.extend(prompts) or generate(prompts, **kw)
    )
    record = QARecord("The cat slept in the barn.", "Where did it sleep?", ("barn", "attic"), 0, {})
    dataset = QADatasetConfig()
    question = f"{record.question}\n{dataset.choice_separator.join(record.choices)}"
    torch.manual_seed(0)
    texts = monitor.critique([record.story], [question], [" it is barn ."], max_new_tokens=4, do_sample=False)
    assert len(texts) == 1 and isinstance(texts[0], str)
    assert asked == [Prompts(dataset, TextRules()).monitor(record, " it is barn .")]
