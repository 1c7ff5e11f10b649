"""Options in the spelling of other servers."""

from __future__ import annotations

import shlex

import pytest

from tandem.__main__ import cli
from tandem.commands.spellings import ALWAYS_SO, RENAMED, SWITCHES, translate
from tandem.shared.config.refused_options import REFUSED
from tandem.shared.errors import UsageError

OPTIONS = {name for parameter in cli.commands["serve"].params for name in parameter.opts}


@pytest.mark.parametrize(
    ("spelling", "own"),
    [
        ("M --max_model_len 9 --max_num_seqs=3", "M --max-model-len 9 --max-num-seqs=3"),
        ("-tp 2 M", "--tensor-parallel-size 2 M"),
        ("--async-scheduling M", "--async-scheduling=on M"),
        ("--async-scheduling", "--async-scheduling=on"),
        ("--async-scheduling off M", "--async-scheduling off M"),
        ("--async-scheduling=auto M", "--async-scheduling=auto M"),
        ("--no-async-scheduling", "--async-scheduling=off"),
        ("--dtype bf16 --dtype=half --dtype auto", "--dtype=bfloat16 --dtype=float16 --dtype auto"),
        ("--enforce-parser qwen_coder", "--tool-call-parser=qwen3_coder"),
        ("--enforce-parser json", "--tool-call-parser json"),
        ("--fp8-kvcache --cpu", "--kv-cache-dtype=fp8 --device=cpu"),
        ("-m a.gguf -np 4 --temp 0.2 --jinja", "--model a.gguf --max-num-seqs 4 --temperature 0.2"),
        ("--model-path=M --tp-size=2", "--model=M --tensor-parallel-size=2"),
        ("--ui-server --server --jinja M", "M"),
        ("--served-model-name a_b", "--served-model-name a_b"),
        ("--no_such_option 1 -- --isq", "--no_such_option 1 -- --isq"),
        (
            "--override-generation-config.top_p 0.5 M --override_generation_config.top_k=3",
            'M --override-generation-config=\'{"top_p": 0.5, "top_k": 3}\'',
        ),
    ],
)
def test_a_peers_spelling_becomes_our_own(spelling: str, own: str) -> None:
    assert translate(shlex.split(spelling), OPTIONS) == shlex.split(own)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_honoured_is_refused_with_the_alternative(name: str) -> None:
    for spelling in ([name, "4"], [name.replace("-", "_").replace("__", "--", 1) + "=4"]):
        if spelling[0].startswith("_"):
            continue
        with pytest.raises(UsageError, match=f"{name} is not supported: .{{10,}}"):
            translate(spelling, OPTIONS)


@pytest.mark.parametrize("spelling", [["--device", "cuda:7"], ["--device=cuda:7"]])
def test_a_gpu_as_torch_names_it_is_refused_with_our_spelling(spelling: list[str]) -> None:
    with pytest.raises(UsageError, match=r"--device cuda:7: use --device cuda --d 7"):
        translate(spelling, OPTIONS)


def test_translations_lead_to_options_that_exist() -> None:
    switches = {
        name for parameter in cli.commands["serve"].params for name in parameter.secondary_opts
    }
    options = OPTIONS | switches
    assert {*RENAMED.values(), *(own.partition("=")[0] for own in SWITCHES.values())} <= options
    assert not options & {*RENAMED, *SWITCHES, *ALWAYS_SO, *REFUSED}


def test_vllms_command_lines_parse() -> None:
    for line in (
        "builtin --tensor_parallel_size 2 --disable-log-requests --generation-config vllm",
        "--m a/b --d 0,1 --prefix-cache --fp8-kvcache --ui-server --max-tokens 100 --top-k 20",
    ):
        cli.commands["serve"].make_context("serve", shlex.split(line))
