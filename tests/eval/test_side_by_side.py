"""Completions of the start and of the end of a training, side by side."""

from rlhf_eval import samples_page


def row(stage, step, completion, reward):
    return {"stage": stage, "step": step, "prompt": "<b>Once", "completion": completion, "reward": reward}


def test_both_stand_beside_each_other_with_their_rewards():
    rows = [row("start", 0, "a dog & a cat", 0.25), row("end", 60, "happy, happy", 0.99)]
    rows.insert(1, {"step": 10, "prompt": "other", "completion": "between", "reward": 0.5})
    html = samples_page(rows, title="grpo <1>")
    assert "&lt;b&gt;Once" in html and "<b>Once" not in html and "grpo &lt;1&gt;" in html
    assert (
        html.index("at the start, step 0, reward 0.250")
        < html.index("a dog &amp; a cat")
        < html.index("reward 0.990")
    )
    assert html.index("reward 0.990") < html.index("happy, happy") and "between" not in html


def test_a_reward_that_does_not_apply_is_a_dash():
    html = samples_page([row("start", 0, "a", None), row("end", 1, "b", 1.0)], title="run")
    assert "at the start, step 0, reward –" in html


def test_rows_without_rewards_say_nothing_of_rewards():
    rows = [{**row("start", 0, "a", 0.0)}, {**row("end", 9, "b", 0.0)}]
    for each in rows:
        del each["reward"]
    html = samples_page(rows, title="sft")
    assert "at the end, step 9<" in html and "reward" not in html
