"""Soups: of all models, and of those that help, by a function or a shell command."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from proofs import by_default
from raises import raises_error
from rlhf_merge.methods.families.means import linear
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


@pytest.fixture
def out(workshop: Any) -> Path:
    return workshop.root / "out"


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


def hidden(root: Path) -> list[str]:
    """What an interrupted soup or merge left."""
    return sorted(path.name for path in root.iterdir() if path.name.startswith("."))


def kill(merge: Callable[..., Any], *arguments: Any) -> None:
    """Stop a merge as it begins."""

    def killed(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        merge(*arguments, on_bytes=killed)


def test_uniform_soup_is_the_mean(workshop: Any, models: dict[float, str], out: Path) -> None:
    paths = list(models.values())[:3]
    result = ModelSoup(paths, {"dtype": "float64"}).uniform(out)
    loaded = [workshop.load(path) for path in paths]
    for name, tensor in workshop.load(result.folder).items():
        expected: Tensor = linear([model[name].double() for model in loaded])
        assert tensor.dtype == torch.float64 and torch.equal(tensor, expected)


@pytest.mark.parametrize("higher_is_better", [True, False])
def test_greedy_soup_adds_what_helps_from_the_best_on(
    workshop: Any, models: dict[float, str], out: Path, higher_is_better: bool
) -> None:
    """Aimed at 2.6, alone 2 is best, then 4, 1, -6: the soups are 3, then 7/3 and 1/4."""
    one, four, minus, two = models.values()
    judge = Judge(workshop.load, 2.6, -1.0 if higher_is_better else 1.0)
    told: list[Trial] = []
    soup = ModelSoup([one, four, minus, two])
    cooked = soup.greedy(out, judge, higher_is_better=higher_is_better, on_trial=told.append)
    assert judge.seen == pytest.approx([1, 4, -6, 2, 3, 7 / 3, 0.25])
    assert cooked.members == (two, four, one) and abs(cooked.score) == pytest.approx(2.6 - 7 / 3)
    assert cooked.trials[3] == replace(told[3], accepted=True), "the best one is the soup to begin with"
    assert cooked.trials == (*told[:3], cooked.trials[3], *told[4:])
    assert [(names(*trial.members), trial.accepted) for trial in told] == [
        *((((f"m{i}"),), False) for i in range(4)),
        (("m3", "m1"), True),
        (("m3", "m1", "m0"), True),
        (("m3", "m1", "m0", "m2"), False),
    ]
    expected = ModelMerger({"method": "linear", "models": [two, four, one]}).merge(workshop.root / "same")
    files = workshop.files(cooked.folder)
    notes = json.loads(files.pop("soup.json"))
    assert files == workshop.files(expected.folder)
    assert notes["members"] == [two, four, one] and notes["score"] == cooked.score
    fourth = {"members": [two, four], "score": cooked.trials[4].score, "accepted": True}
    assert len(notes["trials"]) == 7 and notes["trials"][4] == fourth
    assert hidden(workshop.root) == []


def test_all_or_one_may_be_the_whole_soup(workshop: Any, models: dict[float, str], out: Path) -> None:
    # "Added if the score does not become worse": equal scores take all models, in the order given.
    soup = ModelSoup(list(models.values()))
    cooked = soup.greedy(workshop.root / "all", lambda folder: 1.0)
    assert cooked.members == tuple(models.values()) and cooked.score == 1
    cooked = soup.greedy(out, Judge(workshop.load, 4.0))
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


def scored(log: Path) -> Any:
    """The norms that `COMMAND` has scored since it was asked last."""
    seen = [float(line) for line in log.read_text().split()]
    log.unlink()
    return pytest.approx(seen)


def test_greedy_soup_by_a_command_goes_on_after_a_failure(
    workshop: Any, models: dict[float, str], out: Path
) -> None:
    """What was scored before the command failed is not scored again."""
    log, paths, broken = workshop.root / "log", list(models.values()), workshop.root / "broken"
    # Fails while the file is there, at the soup of 2 and 4.
    command = f"if [ -e {broken} ]; then set -- 3; fi; {COMMAND} {log} $1"
    broken.touch()
    with raises_error("evaluation_failed"):
        ModelSoup(paths).greedy(out, command, higher_is_better=False)
    assert scored(log) == [1, 4, -6, 2, 3] and not out.exists()
    broken.unlink()
    cooked = ModelSoup(paths).greedy(out, command, higher_is_better=False)
    assert scored(log) == [3, 7 / 3, 0.25]
    assert names(*cooked.members) == ("m3", "m1", "m0") and cooked.score == pytest.approx(2.6 - 7 / 3)
    assert len(cooked.trials) == 7 and hidden(workshop.root) == []


@pytest.mark.parametrize(
    "change", by_default(["command", "settings", "model", "half a file"], "model", "half a file")
)
def test_scores_of_something_else_are_not_taken(
    workshop: Any, models: dict[float, str], out: Path, change: str
) -> None:
    paths, log = [models[1.0], models[4.0]], workshop.root / "log"
    command = f"{COMMAND} {log} 2.5"  # the soup of both fails
    with raises_error("evaluation_failed"):
        ModelSoup(paths).greedy(out, command, higher_is_better=False)
    settings = {"dtype": "float32"} if change == "settings" else {}
    if change == "model":
        (Path(paths[0]) / "model.safetensors").touch()
    if change == "half a file":
        (workshop.root / ".out.soup" / ".scores.json.part").write_text('{"models": {')
    if change == "command":
        command += " 9"
    log.unlink()
    with raises_error("evaluation_failed"):
        ModelSoup(paths, settings).greedy(out, command, higher_is_better=False)
    assert scored(log) == ([2.5] if change == "half a file" else [1, 4, 2.5])


def test_another_soup_may_follow_one_that_was_killed(
    workshop: Any, models: dict[float, str], out: Path
) -> None:
    """What a killed merge of other candidates left behind does not stop this one."""
    candidate = workshop.root / ".out.soup" / "candidate"
    kill(ModelMerger({"method": "linear", "models": list(models.values())}).merge, candidate)
    assert (candidate.parent / ".candidate.merging").exists()
    judge = Judge(workshop.load, 2.6)
    cooked = ModelSoup(list(models.values())[:2]).greedy(out, judge)
    assert judge.seen == [1, 4, 2.5] and len(cooked.members) == 2


def test_restart_discards_what_an_interrupted_soup_left(
    workshop: Any, models: dict[float, str], out: Path
) -> None:
    soup, log = ModelSoup([models[1.0], models[4.0]]), workshop.root / "log"
    with raises_error("evaluation_failed"):
        soup.greedy(out, f"{COMMAND} {log} 2.5", higher_is_better=False)  # the soup of both fails
    other = ModelMerger({"method": "linear", "models": list(models.values())})
    kill(other.merge, out)
    judge = Judge(workshop.load, 2.6)
    with raises_error("other_merge_interrupted"):
        soup.greedy(out, judge)
    assert soup.greedy(out, judge, restart=True).score == pytest.approx(-0.1)
    assert judge.seen == [1, 4, 2.5] * 2
    uniform = workshop.root / "uniform"
    kill(other.merge, uniform)
    with raises_error("other_merge_interrupted"):
        soup.uniform(uniform)
    soup.uniform(uniform, restart=True)
    assert hidden(workshop.root) == []


def test_adapters_are_merged_before_they_are_scored(
    workshop: Any, models: dict[float, str], out: Path
) -> None:
    key, seen = "model.layers.0.mlp.up_proj", []
    parts = {f"{key}.lora_A.weight": torch.ones(1, 8), f"{key}.lora_B.weight": torch.ones(12, 1)}
    adapter = workshop.adapter("adapter", parts, r=1, lora_alpha=1)

    def evaluate(folder: Path) -> float:
        seen.append(workshop.load(folder)[f"{key}.weight"])
        return float(len(seen))

    cooked = ModelSoup([models[1.0], f"{models[1.0]}+{adapter}"]).greedy(out, evaluate)
    plain = workshop.load(models[1.0])[f"{key}.weight"]
    assert torch.equal(seen[0], plain) and torch.allclose(seen[1], plain + 1)
    assert torch.allclose(workshop.load(cooked.folder)[f"{key}.weight"], plain + 0.5)


def test_a_soup_of_some_of_the_models_ignores_what_its_members_lack(workshop: Any, out: Path) -> None:
    """The pattern fits tensors of all models of one soup, and of none of another."""
    tensors, head = workshop.tensors(), {"v_head.summary.weight": torch.ones(1, 8)}
    scores = {}
    for name, extra, score in (("a", {}, 1), ("b", {}, 2), ("c", head, 4), ("d", head, 3)):
        scores[workshop.save(name, tensors | extra)] = score
    seen = []

    def evaluate(folder: Path) -> float:
        if str(folder) in scores:
            return scores[str(folder)]
        seen.append("v_head.summary.weight" in workshop.load(folder))
        return 5 if len(seen) == 1 else 0

    result = ModelSoup(list(scores), {"ignore": ["v_head.*"]}).greedy(out, evaluate)
    # c and d, then b and a in turn beside them, which have no such head.
    assert names(*result.members) == ("c", "d") and seen == [True, False, False]
    again = ModelMerger(out / "merge_config.yaml").merge(workshop.root / "again")
    assert "v_head.summary.weight" in workshop.load(again.folder)


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "good", [1.0]])
def test_a_score_must_be_a_finite_number(models: dict[float, str], out: Path, score: Any) -> None:
    with raises_error("invalid_score"):
        ModelSoup(list(models.values())[:2]).greedy(out, lambda folder: score)


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("echo {model}", "invalid_score", "'/some/where'"),
        ("true {model}", "invalid_score", "nothing"),
        ("echo 3 {model}/x; exit 3", "evaluation_failed", "said: 3 /some/where/x"),
        (
            "echo out; echo why 1>&2; echo as {model} 1>&2; exit 1",
            "evaluation_failed",
            "said: as /some/where",
        ),
        ("kill -9 $$; {model}", "evaluation_failed", "-9 and said: nothing"),
    ],
)
def test_commands_that_give_no_score(command: str, code: str, said: str) -> None:
    with raises_error(code) as error:
        shell_evaluation(command)(Path("/some/where"))
    assert repr(command) in str(error.value) and str(error.value).endswith(said)


def test_the_last_word_is_the_score() -> None:
    evaluate = shell_evaluation("echo 'accuracy (5-shot)': 0.1; printf %s\\\\n {model} ' 1e-2 '")
    assert evaluate(Path("/a folder/with 'quotes'; and more")) == 0.01
    with raises_error("missing_placeholder"):
        shell_evaluation("echo 1")


def test_refused_before_anything_is_scored(workshop: Any, models: dict[float, str], out: Path) -> None:
    one, two = list(models.values())[:2]
    for listed, settings, code in (
        ([one], {}, "too_few_models"),
        ([one, two, one], {}, "repeated_model"),
        ([one, two], {"density": 0.5}, "unknown_key"),
    ):
        with raises_error(code):
            ModelSoup(listed, settings)
    tensors = workshop.load(one)
    tensors.pop(NORM)
    other = workshop.save("other", tensors)
    (workshop.root / "full" / "x").mkdir(parents=True)
    before = sorted(workshop.root.iterdir())
    for models_of, folder, code in (
        ([one, two], workshop.root / "full", "folder_not_empty"),
        ([one, two], Path(one) / "out", "output_inside_model"),
        ([one, other], out, "missing_tensor"),
    ):
        with raises_error(code):
            ModelSoup(models_of).greedy(folder, lambda folder: pytest.fail("was scored"))
        with raises_error(code):
            ModelSoup(models_of).uniform(folder)
    assert sorted(workshop.root.iterdir()) == before


def test_a_soup_is_made_by_one_process_at_a_time(models: dict[float, str], out: Path) -> None:
    soup = ModelSoup(list(models.values())[:2])

    def evaluate(folder: Path) -> float:
        with raises_error("folder_in_use"):
            soup.greedy(out, lambda folder: 1.0)
        return 1.0

    assert soup.greedy(out, evaluate).members == tuple(soup.models)
