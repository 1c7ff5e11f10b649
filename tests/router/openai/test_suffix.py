"""``suffix``: what is missing between two texts."""

from __future__ import annotations

from pathlib import Path

from tandem.tests.router.support import cluster, make_model

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")


async def test_a_gap_is_filled_by_a_model_with_the_tokens_for_it(tmp_path: Path) -> None:
    make_model(tmp_path / "model", special=QWEN)
    async with cluster(tmp_path) as c:
        answer = await c.complete(["one", ""], suffix=" dog<|fim_pad|>", return_token_ids=True)
        before, after, middle, pad = (c.encode(token)[0] for token in QWEN)
        between, behind = (each["prompt_token_ids"] for each in answer.json()["choices"])
        assert between[:2] == [before, c.encode("one")[0]] and between[-1] == middle
        # Text that looks like a token is text.
        assert between.count(pad) == 0 and between.count(after) == 1
        assert behind[:2] == [before, after]
        # Both prompts, which are sent at the same time.
        assert [list(each.sampling.stop_token_ids) for each in c.node.requests] == [[pad], [pad]]
        assert answer.json()["choices"][1]["text"] == "hello world"
        ignoring = await c.complete("one", suffix="x", ignore_eos=True)
        assert ignoring.status_code == 200
        assert not c.node.requests[-1].sampling.stop_token_ids
        for fields in ({"echo": True}, {"truncate_prompt_tokens": 5}, {"prompt": [1, 2]}):
            body = {"prompt": "one", "suffix": "x", **fields}
            assert (await c.client.post("/v1/completions", json=body)).status_code == 400
        assert (await c.complete("one", suffix="x " * 5000)).status_code == 400


async def test_other_models_say_that_they_cannot(tmp_path: Path) -> None:
    async with cluster(tmp_path) as c:
        error = (await c.complete("one", suffix="x")).json()["error"]
        assert (error["param"], error["code"]) == ("suffix", "unsupported_parameter")
        assert (await c.complete("one", suffix="")).status_code == 200
