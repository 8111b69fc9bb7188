"""The device of models: the first GPU where nothing else is said, for rewards and compression too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_data import BaseConfig, UserError
from rlhf_serve.cli import compress, load
from rlhf_serve.settings import CompressSettings, ModelSettings


@pytest.mark.parametrize(
    ("device", "gpu", "expected"), [(None, True, "cuda"), (None, False, "cpu"), ("cpu", True, "cpu")]
)
@pytest.mark.parametrize("kind", ["reward", "compression"])
def test_models_are_loaded_on_the_first_gpu_unless_the_settings_say_otherwise(
    device: str | None,
    gpu: bool,
    expected: str,
    kind: str,
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded: list[Any] = []

    def stop(*args: Any, **options: Any) -> Any:
        loaded.append(options)
        raise UserError("stopped here")

    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr(load, "load_scorer", stop)
    monkeypatch.setattr(compress, "load_causal_lm", stop)
    values: dict[str, Any] = {"model": str(folders / "policy"), "device": device}
    settings: BaseConfig
    with pytest.raises(UserError, match="stopped here"):
        if kind == "reward":
            settings = ModelSettings.from_dict(values | {"reward": [str(folders / "reward")]})
            load.load_parts(settings, print)
        else:
            settings = CompressSettings.from_dict(values | {"input_path": "in", "output_path": "out"})
            compress._compressor(settings)
    assert loaded == [{"dtype": "auto", "device": expected}]
