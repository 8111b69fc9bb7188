"""What vLLM cannot do on CPUs is refused before it starts."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rlhf_infer.vllm.starting import not_started
from rlhf_infer.vllm.worker import SmallHeadsError, platform_arguments
from rlhf_models import build_tiny_llama


@pytest.mark.parametrize("cpu", [True, False])
def test_small_heads_are_refused_on_cpus(cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = ModuleType("vllm.platforms")
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: cpu), raising=False)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.platforms", platforms)
    for name, hidden in (("small", 32), ("large", 64)):
        build_tiny_llama(40, hidden_size=hidden, num_attention_heads=2).save_pretrained(tmp_path / name)
    if cpu:
        with pytest.raises(SmallHeadsError) as refused:
            platform_arguments(str(tmp_path / "small"), 64)
        assert not_started("small", refused.value).code == "head_too_small"
        assert platform_arguments(str(tmp_path / "large"), None)["enable_chunked_prefill"] is False
    else:
        assert platform_arguments(str(tmp_path / "small"), 64) == {}
