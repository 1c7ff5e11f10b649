"""``suffix``: what is missing between two texts."""

from __future__ import annotations

from tandem.tests.router.in_process import COMPLETIONS, InProcess, tiny

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


def test_a_gap_is_filled_by_a_model_with_the_tokens_for_it() -> None:
    c = InProcess(tiny(special=QWEN))
    response = c.complete(["one", ""], suffix=" dog<|fim_pad|>", return_token_ids=True)
    before, after, middle, pad = (c.encode(token)[0] for token in QWEN)
    between, behind = (each["prompt_token_ids"] for each in response.json()["choices"])
    assert between[:2] == [before, c.encode("one")[0]] and between[-1] == middle
    # Text that looks like a token is text.
    assert between.count(pad) == 0 and between.count(after) == 1
    assert behind[:2] == [before, after]
    # Both prompts, which are sent at the same time.
    assert [list(each.sampling.stop_token_ids) for each in c.node.requests] == [[pad], [pad]]
    assert response.json()["choices"][1]["text"] == "hello world"
    ignoring = c.complete("one", suffix="x", ignore_eos=True)
    assert ignoring.status_code == 200
    assert not c.node.requests[-1].sampling.stop_token_ids
    for fields in ({"echo": True}, {"truncate_prompt_tokens": 5}, {"prompt": [1, 2]}):
        body = {"prompt": "one", "suffix": "x", **fields}
        assert c.respond(COMPLETIONS, body).status_code == 400
    assert c.complete("one", suffix="x " * 5000).status_code == 400


def test_other_models_say_that_they_cannot() -> None:
    c = InProcess()
    error = c.complete("one", suffix="x").json()["error"]
    assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
    assert c.complete("one", suffix="").status_code == 200
