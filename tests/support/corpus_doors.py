"""Doors through which inputs of the corpus are read in this process, and what became of each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from corpus import GOOD, body_of, cases
from rlhf_algos import METHODS
from rlhf_algos.pipeline import Pipeline, PipelineConfig
from rlhf_data import (
    RecordStream,
    TokenizedDataset,
    UserError,
    load_config_file,
    load_qa,
    load_records,
    model_folder,
)
from rlhf_merge import MergeError, ModelMerger
from rlhf_minmax import MinMaxConfig
from rlhf_models import (
    RewardModel,
    build_tiny_llama,
    check_tokenizer_fits,
    check_whole,
    load_causal_lm,
    load_model_config,
    load_shape,
    load_tokenizer,
    train_byte_tokenizer,
)
from rlhf_train.commands.training import load_settings, of_method
from rlhf_train.inputs import check_inputs

ACCEPTED = "accepted"
EXAMPLES = ("sft", "preference", "kto", "steps", "prompt")
"""Kinds of records, each a door of its own."""
_SKIPPED, _STREAMED = ", bad rows skipped", ", streamed"
_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
_ANSWERS = ("choices", "data", "results", "rewards", "tokens")
"""Parts of answers to good requests that are the same each time."""
_SLOW_S = 60.0
"""Far more than any answer needs."""
_LIMITS: dict[str, Any] = {
    "max_n": 4,
    "max_tokens": 6,
    "max_scored": 16,
    "max_prompts": 4,
    "max_body_bytes": 20_000,
    "n": 2,
}
Read = Callable[[], Any]
Outcome = str | dict[str, str]


def outcome(read: Read) -> tuple[str, Any]:
    """What became of an input, `accepted` or the code of the refusal, and what was read.

    Any other exception passes on.
    """
    try:
        return ACCEPTED, read()
    except (UserError, MergeError) as error:
        assert str(error).strip() and error.code
        return error.code, None


def folded(found: dict[str, str]) -> Outcome:
    """Outcomes by door: the only one, or the most frequent as `*` with the others.

    Of rows that are skipped or streamed only what that changes is kept.
    """
    found = dict(found)
    for door, each in list(found.items()):
        usual = found.get(door.partition(",")[0])
        nothing_skipped = _SKIPPED in door and (each == usual or each != ACCEPTED)
        if nothing_skipped or (_STREAMED in door and each in (usual, "unknown_file_type")):
            del found[door]
    most = Counter(found.values()).most_common(1)[0][0]
    others = {door: each for door, each in found.items() if each != most}
    return {"*": most, **others} if others else most


class Workshop:
    """A folder with tiny models, in which inputs are read.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = train_byte_tokenizer(["mary went to kitchen . where is mary ?"], vocab_size=300)
        self.tokenizer.chat_template = _TEMPLATE
        for seed, name in enumerate(("base", "math", "code")):
            self._save(folder / "models" / name, seed)

    def _save(self, path: Path, seed: int) -> None:
        """A model of a few thousand weights, whose vocabulary is small enough to be read in a diff."""
        from tokenizers import Tokenizer, models
        from transformers import PreTrainedTokenizerFast

        vocabulary = {token: i for i, token in enumerate(("<unk>", "<eos>", "mary", "kitchen"))}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", eos_token="<eos>")
        tokenizer.save_pretrained(path)
        sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 2, "intermediate_size": 8}
        model = build_tiny_llama(len(tokenizer), eos_token_id=1, seed=seed, max_positions=32, **sizes)
        model.save_pretrained(path)

    @contextlib.contextmanager
    def file(self, name: str, data: bytes) -> Iterator[Path]:
        """A file of this content in the working directory, which is the workshop meanwhile."""
        with contextlib.chdir(self.folder):
            path = Path(name)
            path.write_bytes(data)
            yield path
            path.unlink()

    def read(self, kind: str, name: str, data: bytes) -> dict[str, tuple[str, Any]]:
        """What became of an input, and what was read, by door."""
        with self.file(name, data) as path:
            return {door: outcome(read) for door, read in getattr(self, f"_{kind}")(path).items()}

    def _rows(self, path: Path) -> dict[str, Read]:
        doors: dict[str, Read] = {"qa": partial(load_qa, path)}
        for kind in EXAMPLES:
            doors[kind] = partial(self._loaded, kind, path)
            doors[f"{kind}{_SKIPPED}"] = partial(self._loaded, kind, path, on_bad_row="skip")
            doors[f"{kind}{_STREAMED}"] = partial(self._streamed, kind, path)
        return doors

    def _loaded(self, kind: str, path: Path, **options: Any) -> list[Any]:
        return self._examples(kind, load_records(path, kind, **options).records)

    def _examples(self, kind: str, records: list[Any]) -> list[Any]:
        data: Any = TokenizedDataset(records, self.tokenizer, kind=kind)
        return [repr(data[i]) for i in range(len(data))]

    def _streamed(self, kind: str, path: Path) -> list[Any]:
        stream = RecordStream(path, kind)
        found = stream.read(range(len(stream)))
        for each in found:
            if isinstance(each, UserError):
                raise each
        return self._examples(kind, [record for each in found if isinstance(each, list) for record in each])

    def _settings(self, path: Path) -> dict[str, Read]:
        doors: dict[str, Read] = {f"train {name}": partial(_resolved, name, path) for name in ("sft", "grpo")}
        doors["train minmax"] = lambda: MinMaxConfig.from_dict(load_config_file(path), str(path)).to_dict()
        return doors | self._descriptions(path) | self._merges(path) | self._pipelines(path)

    def _descriptions(self, path: Path) -> dict[str, Read]:
        return {"model": lambda: load_model_config(path).to_dict()}

    def _merges(self, path: Path) -> dict[str, Read]:
        return {"merge": lambda: self._planned(path)}

    def _planned(self, config: Any) -> Any:
        plan = ModelMerger(config).plan()
        plan.close()
        return [job.output.name for job in plan.jobs]

    def _pipelines(self, path: Path) -> dict[str, Read]:
        def check() -> Any:
            config = PipelineConfig.from_dict(load_config_file(path), str(path))
            Pipeline(config, self.folder / "pipeline").check()
            return config.to_dict()

        return {"pipeline": check}

    def _models(self, path: Path) -> dict[str, Read]:
        """Of `NAME.config.json` and others: the tiny model with that file as its `config.json`."""
        model = Path("model")
        shutil.rmtree(model, ignore_errors=True)
        shutil.copytree(Path("models", "math"), model)
        name = path.name.partition(".")[2]
        if name.endswith(".index.json"):  # which is read where the weights are in several files
            (model / "model.safetensors").rename(model / "model-1.safetensors")
        shutil.copy(path, model / name)

        def load() -> Any:
            check_whole(model_folder(str(model)))
            tokenizer, policy = load_tokenizer(model), load_causal_lm(model)
            check_tokenizer_fits(policy, tokenizer)
            return tokenizer.get_vocab(), policy.config.to_dict()

        config = {"method": "linear", "models": ["models/base", "model"]}
        return {
            "load": load,
            "plan": lambda: load_shape(model)[0].to_dict(),
            "merge": lambda: self._merged(config),
        }

    def _merged(self, config: dict[str, Any]) -> Any:
        shutil.rmtree("merged", ignore_errors=True)
        ModelMerger(config).merge("merged")
        return sorted(path.name for path in Path("merged").iterdir())


def _resolved(method: str, path: Path) -> Any:
    values = load_settings(str(path))
    config = METHODS[method].resolve(of_method(method, values, str(path)), where=str(path))
    check_inputs(config, dry_run=True)
    return config.to_dict()


def replayed(workshop: Workshop, kind: str) -> tuple[dict[str, Outcome], dict[str, Any]]:
    """Outcomes of all inputs of a kind by name, and what the good ones gave before and after all others."""
    if kind == "requests":
        return asyncio.run(_answered(workshop))
    inputs = cases(kind)
    good = {name: data for name, data in inputs.items() if name.startswith(GOOD)}
    before, found = dict[str, Any](), dict[str, Outcome]()
    for name, data in inputs.items():  # good ones come first
        try:
            read = workshop.read(kind, name, data)
        except BaseException as error:
            error.add_note(f"tests/corpus: {kind}/{name}")
            raise
        found[name] = folded({door: each for door, (each, _) in read.items()})
        if name in good:
            before[name] = read
    after = {name: workshop.read(kind, name, data) for name, data in good.items()}
    return found, {"before": before, "after": after}


def steady(one: Any, other: Any) -> bool:
    """Whether two results are the same, but for the rounding of numbers computed in other batches."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(steady(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(steady, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-4, abs_tol=1e-5)
    return type(one) is type(other) and one == other


def served_app(folder: Path, tokenizer: Any) -> Any:
    """The server's application with a tiny policy and a reward model."""
    from rlhf_serve.cli.load import load
    from rlhf_serve.http.app import create_app
    from rlhf_serve.settings import ServeSettings

    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    options = ends | {"hidden_size": 32, "intermediate_size": 64, "num_layers": 1, "initializer_range": 0.3}
    policy = build_tiny_llama(len(tokenizer), seed=1, **options)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    reward = RewardModel.from_backbone(build_tiny_llama(len(tokenizer), seed=2, **options), tokenizer, seed=3)
    reward.save_pretrained(folder / "reward")
    models = {"model": str(folder / "policy"), "reward": [str(folder / "reward")]}
    settings = ServeSettings.from_dict(models | _LIMITS | {"feedback": str(folder / "ratings.jsonl")})
    return create_app(load(settings, lambda text: None), settings)


async def ask(app: Any, row: dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of the answer to a request of the corpus."""
    body = [{"type": "http.request", "body": body_of(row), "more_body": False}]
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if body:
            return body.pop()
        return await asyncio.get_running_loop().create_future()  # the client waits

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    path, _, query = row["path"].partition("?")
    fields = {"host": "localhost", "content-type": "application/json"}
    fields |= {key.lower(): value for key, value in row.get("headers", {}).items()}
    headers = [(key.encode("latin-1"), value.encode("latin-1", "ignore")) for key, value in fields.items()]
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http"}
    scope |= {"method": row["method"], "path": unquote(path), "raw_path": path.encode(), "root_path": ""}
    scope |= {"query_string": query.encode(), "headers": headers}
    scope |= {"client": ("127.0.0.1", 1), "server": ("localhost", 80)}
    await app(scope, receive, send)
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent)


def said(status: int, body: bytes) -> str:
    """An answer in short: its status, and the error's code, or else its type and parameter."""
    assert b"internal server error" not in body and b"Traceback" not in body, body
    for line in body.splitlines():
        line = line.removeprefix(b"data: ")
        if line.startswith(b'{"error"'):
            error = json.loads(line)["error"]
            return " ".join(map(str, filter(None, (status, error["code"] or error["type"], error["param"]))))
    return str(status)


async def _answered(workshop: Workshop) -> tuple[dict[str, Outcome], dict[str, Any]]:
    rows = [json.loads(line) for line in cases("requests").values()]
    good = [row for row in rows if row["name"].startswith(GOOD)]
    app = served_app(workshop.folder, workshop.tokenizer)
    found: dict[str, Outcome] = {}

    async def answers() -> dict[str, Any]:
        texts = {row["name"]: json.loads((await ask(app, row))[1]) for row in good}
        return {name: {part: text.get(part) for part in _ANSWERS} for name, text in texts.items()}

    async with app.router.lifespan_context(app):
        before = await answers()
        for row in rows:
            status, body = await asyncio.wait_for(ask(app, row), _SLOW_S)
            assert status < 500, (row["name"], status, body)
            found[row["name"]] = said(status, body)
        return found, {"before": before, "after": await answers()}
