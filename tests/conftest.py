"""Small models and folders that several packages' tests share; nothing here reaches the network."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts background jobs so, and their children inherit it: Ctrl-C in tests would do nothing.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if sys.dont_write_bytecode:
    # To compile torch and transformers anew takes each of the many processes that tests start ten seconds.
    sys.pycache_prefix = str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    del os.environ["PYTHONDONTWRITEBYTECODE"]
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Tests have caches of their own; what DeepSpeed compiles at its first use (a minute or two) is shared.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_CACHE / "torch_extensions"))

TEXTS = [
    "mary went to kitchen . gossip says in garden . where is mary ?",
    "ball moved to shed . ball moved to cellar . where is ball ?",
    "it is certainly garden . so wrong",
]
_REVISION = "0" * 40
_HANGS_AFTER = 900.0
"""Seconds; far more than any of the processes needs."""
_SILENCED = "ignore::FutureWarning:torch.distributed.c10d_logger"
_SHOWN = 4000
"""Characters that are shown of what a process said before it failed."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """A run of everything uses up to four cores; named files run here, where they start faster."""
    return min(4, os.cpu_count() or 1) if config.args == config.getini("testpaths") else 0


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[Any]:
    """A million objects of modules and tests live to the end; the collector does not look at them again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def build_hub_cache(home: Path, name: str, model: Any, tokenizer: Any) -> None:
    """Lay model and tokenizer out under `home` as if they had been downloaded from the hub as `name`."""
    repository = home / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / _REVISION
    model.save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(_REVISION)


@pytest.fixture(scope="session")
def ray_installed() -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip('ray is missing: pip install "rlhf-algos[ray]"')


@pytest.fixture(autouse=True)
def own_import_path() -> Iterator[None]:
    """A command adds the folders of the user's modules; the next test must not find its modules there."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """A byte-level tokenizer trained on a few sentences."""
    from rlhf_models import train_byte_tokenizer

    return train_byte_tokenizer(TEXTS, vocab_size=300)


@pytest.fixture
def chat_tokenizer(byte_tokenizer: Any) -> Any:
    """`byte_tokenizer` with a chat template."""
    tokenizer = copy.deepcopy(byte_tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer


@pytest.fixture(scope="session")
def built_llama(byte_tokenizer: Any) -> Any:
    """A random two-layer Llama for `byte_tokenizer`, which no test may change."""
    from rlhf_models import build_tiny_llama

    ends = {"eos_token_id": byte_tokenizer.eos_token_id, "pad_token_id": byte_tokenizer.pad_token_id}
    return build_tiny_llama(len(byte_tokenizer), hidden_size=32, intermediate_size=64, seed=1, **ends)


@pytest.fixture(scope="session")
def built_llama_folder(
    tmp_path_factory: pytest.TempPathFactory, built_llama: Any, byte_tokenizer: Any
) -> Path:
    """`built_llama` and `byte_tokenizer` saved in one folder, which no test may change."""
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    built_llama.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def tiny_llama(built_llama: Any) -> Any:
    """A copy of `built_llama`, fresh for every test."""
    return copy.deepcopy(built_llama)


@pytest.fixture
def tiny_model_folder(tmp_path: Path, built_llama_folder: Path) -> Path:
    """A copy of `built_llama_folder`."""
    return shutil.copytree(built_llama_folder, tmp_path / "tiny-llama")


@pytest.fixture
def gpt2_hub_cache(tmp_path: Path, byte_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Hugging Face home whose cache holds a tiny GPT-2 named `gpt2`, for this process and its children.

    As in the real one, the context is 1024 tokens and the tokenizer has an end token and no padding token.
    """
    import huggingface_hub.constants

    from rlhf_models import tiny_model

    home = tmp_path / "huggingface"
    model = tiny_model("gpt2", vocab_size=len(byte_tokenizer), seed=3, n_positions=1024)
    build_hub_cache(home, "gpt2", model, byte_tokenizer)
    for path in home.rglob("tokenizer_config.json"):
        values = json.loads(path.read_text())
        del values["pad_token"]
        path.write_text(json.dumps(values))
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(home / "hub"))
    return home


@pytest.fixture(scope="session")
def run_processes() -> Callable[..., str]:
    """Runs a Python script, in several processes under torchrun; what it printed.  None outlives the call."""

    def run(arguments: Sequence[Any], *, processes: int = 2) -> str:
        start = [sys.executable]
        if processes > 1:
            torchrun = str(Path(sys.executable).with_name("torchrun"))
            start = [torchrun, "--standalone", "--nproc-per-node", str(processes)]
        with subprocess.Popen(
            [*start, *map(str, arguments)],
            # DeepSpeed calls what torch deprecates, once a step: its warnings would hide what went wrong.
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": _SILENCED},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                printed, said = process.communicate(timeout=_HANGS_AFTER)
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        assert process.returncode == 0, f"exit code {process.returncode}: {(printed + said)[-_SHOWN:]}"
        return printed

    return run
