"""Soups: of all models, and of those that help, by a function or a shell command."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raises import raises_error
from rlhf_merge.errors import MergeError
from rlhf_merge.methods.families.linear import linear
from rlhf_merge.run.merger import ModelMerger
from rlhf_merge.run.soup import ModelSoup, Trial, shell_evaluation

NORM = "model.norm.weight"


@pytest.fixture
def models(workshop: Any) -> dict[float, str]:
    """Models whose final norm is one number everywhere, by that number."""
    made = {}
    for seed, number in enumerate([1.0, 4.0, -6.0, 2.0]):
        tensors = workshop.tensors(seed) | {NORM: torch.full((8,), number)}
        made[number] = workshop.save(f"m{seed}", tensors)
    return made


class Judge:
    """Scores a model by how near its norm is to a number; remembers what it was asked."""

    def __init__(self, load: Any, target: float, sign: float = -1.0):
        self._load, self._target, self._sign = load, target, sign
        self.seen: list[float] = []

    def __call__(self, folder: Path) -> float:
        self.seen.append(float(self._load(folder)[NORM][0]))
        return self._sign * abs(self.seen[-1] - self._target)


def names(*paths: str) -> tuple[str, ...]:
    return tuple(Path(path).name for path in paths)


def test_uniform_soup_is_the_mean(workshop: Any, models: dict[float, str]):
    paths = list(models.values())[:3]
    result = ModelSoup(paths, {"dtype": "float64"}).uniform(workshop.root / "out")
    found = workshop.load(result.folder)
    loaded = [workshop.load(path) for path in paths]
    for name, tensor in found.items():
        expected: Tensor = linear([model[name].double() for model in loaded])
        assert tensor.dtype == torch.float64 and torch.equal(tensor, expected)
    assert json.loads((result.folder / "config.json").read_text())["torch_dtype"] == "float64"


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_greedy_soup_adds_what_helps_from_the_best_on(
    workshop: Any, models: dict[float, str], higher_is_better: bool
):
    """Aimed at 2.6, alone 2 is best, then 4, 1, -6: the soups are 3, then 7/3 and 1/4."""
    one, four, minus, two = models.values()
    judge = Judge(workshop.load, 2.6, -1.0 if higher_is_better else 1.0)
    told: list[Trial] = []
    cooked = ModelSoup([one, four, minus, two]).greedy(
        workshop.root / "out", judge, higher_is_better=higher_is_better, on_trial=told.append
    )
    assert judge.seen == pytest.approx([1, 4, -6, 2, 3, 7 / 3, 0.25])
    assert cooked.members == (two, four, one) and abs(cooked.score) == pytest.approx(2.6 - 7 / 3)
    assert cooked.trials[3] == replace(told[3], accepted=True), "the best one is the soup to begin with"
    assert cooked.trials == (*told[:3], cooked.trials[3], *told[4:])
    assert [(names(*trial.members), trial.accepted) for trial in told] == [
        (("m0",), False),
        (("m1",), False),
        (("m2",), False),
        (("m3",), False),
        (("m3", "m1"), True),
        (("m3", "m1", "m0"), True),
        (("m3", "m1", "m0", "m2"), False),
    ]
    expected = ModelMerger({"method": "linear", "models": [two, four, one]}).merge(workshop.root / "same")
    files, same = workshop.files(cooked.folder), workshop.files(expected.folder)
    notes = json.loads(files.pop("soup.json"))
    assert files == same
    assert notes["members"] == [two, four, one] and notes["score"] == cooked.score
    assert len(notes["trials"]) == 7 and notes["trials"][4] == {
        "members": [two, four],
        "score": cooked.trials[4].score,
        "accepted": True,
    }
    assert [path.name for path in workshop.root.iterdir() if path.name.startswith(".")] == []


def test_a_soup_that_is_as_good_is_kept(workshop: Any, models: dict[float, str]):
    # "Added if the score does not become worse": equal scores take all models, in the order given.
    cooked = ModelSoup(list(models.values())).greedy(workshop.root / "out", lambda folder: 1.0)
    assert cooked.members == tuple(models.values()) and cooked.score == 1


def test_one_model_may_be_the_whole_soup(workshop: Any, models: dict[float, str]):
    judge = Judge(workshop.load, 4.0)
    cooked = ModelSoup(list(models.values())).greedy(workshop.root / "out", judge)
    assert cooked.members == (models[4.0],) and cooked.score == 0
    assert torch.equal(workshop.load(cooked.folder)[NORM], torch.full((8,), 4.0))


COMMAND = f"""{sys.executable} -c '
import json, sys
folder = sys.argv[1]
data = open(folder + "/model.safetensors", "rb").read()
size = int.from_bytes(data[:8], "little")
begin, end = json.loads(data[8:8 + size])["{NORM}"]["data_offsets"]
import struct
number = struct.unpack("<f", data[8 + size + begin:][:4])[0]
open(sys.argv[2], "a").write(f"{{number}}\\n")
if number in [float(word) for word in sys.argv[3:]]: sys.exit("no such luck")
print("loss", number, "is")
print(abs(number - 2.6))
' {{model}} """


def test_greedy_soup_by_a_command_goes_on_after_a_failure(workshop: Any, models: dict[float, str]):
    """What was scored before the command failed is not scored again."""
    log, paths, broken = workshop.root / "log", list(models.values()), workshop.root / "broken"
    # Fails while the file is there, at the soup of 2 and 4.
    command = f"if [ -e {broken} ]; then set -- 3; fi; {COMMAND} {log} $1"
    broken.touch()
    with raises_error("evaluation_failed"):
        ModelSoup(paths).greedy(workshop.root / "out", command, higher_is_better=False)
    assert [float(line) for line in log.read_text().split()] == [1, 4, -6, 2, 3]
    assert not (workshop.root / "out").exists()
    broken.unlink()
    log.unlink()
    cooked = ModelSoup(paths).greedy(workshop.root / "out", command, higher_is_better=False)
    assert [float(line) for line in log.read_text().split()] == pytest.approx([3, 7 / 3, 0.25])
    assert names(*cooked.members) == ("m3", "m1", "m0") and cooked.score == pytest.approx(2.6 - 7 / 3)
    assert len(cooked.trials) == 7
    assert [path.name for path in workshop.root.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("change", ["command", "settings", "model", "half a file"])
def test_scores_of_something_else_are_not_taken(workshop: Any, models: dict[float, str], change: str):
    paths = [models[1.0], models[4.0]]
    log = workshop.root / "log"
    command = f"{COMMAND} {log} 2.5"  # the soup of both fails
    with raises_error("evaluation_failed"):
        ModelSoup(paths).greedy(workshop.root / "out", command, higher_is_better=False)
    settings = {"dtype": "float32"} if change == "settings" else {}
    if change == "model":
        (Path(paths[0]) / "model.safetensors").touch()
    if change == "half a file":
        (workshop.root / ".out.soup" / ".scores.json.part").write_text('{"models": {')
    if change == "command":
        command += " 9"
    log.unlink()
    with raises_error("evaluation_failed"):
        ModelSoup(paths, settings).greedy(workshop.root / "out", command, higher_is_better=False)
    scored = [float(line) for line in log.read_text().split()]
    assert scored == ([2.5] if change == "half a file" else [1, 4, 2.5])


def test_another_soup_may_follow_one_that_was_killed(workshop: Any, models: dict[float, str]):
    """What a killed merge of other candidates left behind does not stop this one."""
    candidate = workshop.root / ".out.soup" / "candidate"
    merger = ModelMerger({"method": "linear", "models": list(models.values())})

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merger.merge(candidate, on_bytes=killed)
    assert (candidate.parent / ".candidate.merging").exists()
    judge = Judge(workshop.load, 2.6)
    cooked = ModelSoup(list(models.values())[:2]).greedy(workshop.root / "out", judge)
    assert judge.seen == [1, 4, 2.5] and len(cooked.members) == 2


def test_restart_discards_what_an_interrupted_soup_left(workshop: Any, models: dict[float, str]):
    paths, log = [models[1.0], models[4.0]], workshop.root / "log"
    command = f"{COMMAND} {log} 2.5"  # the soup of both fails
    with raises_error("evaluation_failed"):
        ModelSoup(paths).greedy(workshop.root / "out", command, higher_is_better=False)
    other = ModelMerger({"method": "linear", "models": list(models.values())})

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        other.merge(workshop.root / "out", on_bytes=killed)
    judge = Judge(workshop.load, 2.6)
    with raises_error("other_merge_interrupted"):
        ModelSoup(paths).greedy(workshop.root / "out", judge)
    assert ModelSoup(paths).greedy(workshop.root / "out", judge, restart=True).score == pytest.approx(-0.1)
    assert judge.seen == [1, 4, 2.5] * 2
    with pytest.raises(KeyboardInterrupt):
        other.merge(workshop.root / "uniform", on_bytes=killed)
    with raises_error("other_merge_interrupted"):
        ModelSoup(paths).uniform(workshop.root / "uniform")
    ModelSoup(paths).uniform(workshop.root / "uniform", restart=True)
    assert sorted(path.name for path in workshop.root.iterdir() if path.name.startswith(".")) == []


def test_adapters_are_merged_before_they_are_scored(workshop: Any, models: dict[float, str]):
    from safetensors.torch import save_file

    folder = workshop.root / "adapter"
    folder.mkdir()
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_"
    save_file(
        {f"{key}A.weight": torch.ones(1, 8), f"{key}B.weight": torch.ones(12, 1)},
        folder / "adapter_model.safetensors",
    )
    settings = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["up_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    path, name = models[1.0], "model.layers.0.mlp.up_proj.weight"
    seen: list[Tensor] = []

    def evaluate(scored: Path) -> float:
        seen.append(workshop.load(scored)[name])
        return float(len(seen))

    cooked = ModelSoup([path, f"{path}+{folder}"]).greedy(workshop.root / "out", evaluate)
    plain = workshop.load(path)[name]
    assert torch.equal(seen[0], plain) and torch.allclose(seen[1], plain + 1)
    assert torch.allclose(workshop.load(cooked.folder)[name], plain + 0.5)


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_must_be_finite(workshop: Any, models: dict[float, str], score: float):
    soup = ModelSoup(list(models.values())[:2])
    with raises_error("invalid_score"):
        soup.greedy(workshop.root / "out", lambda folder: score)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo {model}", "must print a number last, but printed '/some/where'"),
        ("true {model}", "must print a number last, but printed nothing"),
        ("echo 3 {model}/x; exit 3", "ended with 3 and said: 3 /some/where/x"),
        ("echo out; echo why 1>&2; echo because {model} 1>&2; exit 1", "1 and said: because /some/where"),
        ("kill -9 $$; {model}", "ended with -9 and said: nothing"),
    ],
)
def test_commands_that_give_no_score(command: str, message: str):
    with pytest.raises(MergeError) as caught:
        shell_evaluation(command)(Path("/some/where"))
    assert repr(command) in str(caught.value) and message in str(caught.value)


def test_the_last_word_is_the_score():
    evaluate = shell_evaluation("echo 'accuracy (5-shot)': 0.1; printf %s\\\\n {model} ' 1e-2 '")
    assert evaluate(Path("/a folder/with 'quotes'; and more")) == 0.01
    with raises_error("missing_placeholder"):
        shell_evaluation("echo 1")


def test_refused(workshop: Any, models: dict[float, str]):
    one, two = list(models.values())[:2]
    with raises_error("too_few_models"):
        ModelSoup([one])
    with raises_error("repeated_model"):
        ModelSoup([one, two, one])
    with raises_error("unknown_key", key="density"):
        ModelSoup([one, two], {"density": 0.5})
    (workshop.root / "out").mkdir()
    (workshop.root / "out" / "file").touch()
    calls: list[Path] = []
    with raises_error("folder_not_empty"):
        ModelSoup([one, two]).greedy(workshop.root / "out", lambda folder: calls.append(folder) or 1.0)
    with raises_error("folder_not_empty"):
        ModelSoup([one, two]).uniform(workshop.root / "out")
    assert calls == []
