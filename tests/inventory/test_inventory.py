"""``tandem pull``, ``list`` and ``info``, against a hub in this process."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save

from tandem.__main__ import cli
from tandem.commands.help_page import HelpfulCommand
from tandem.inventory import machine
from tandem.inventory.cached_models import as_table, cached_models
from tandem.inventory.model_report import describe_model
from tandem.kernels.cpu import jit
from tandem.kernels.reference.linear import multiplies
from tandem.shared.config import EngineConfig
from tandem.shared.errors import ModelError, StartupError, UsageError
from tandem.shared.kv.planning import RankDevice
from tandem.shared.kv.step_estimate import estimated_step_bytes
from tandem.shared.weights.load import load_model
from tandem.shared.weights.memory import resident_bytes
from tandem.shared.weights.obtain import obtain_model
from tandem.shared.weights.source import read_spec
from tandem.tests.shared.text.vocabulary.test_files import every_kind
from tandem.tests.support.checkpoints import tiny_models
from tandem.tests.support.checkpoints.gguf_files import write_gguf
from tandem.tests.support.fake_hub import COMMIT, FakeHub, used_here

NAME, LAYERS = "owner/model", "per-layer embeddings"
CPU = RankDevice("cpu", "CPU", 64 << 30, 32 << 30)
GPUS = tuple(RankDevice("cuda", f"GPU {index}", 80 << 30, 79 << 30) for index in (0, 1))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    with used_here(monkeypatch, tmp_path / "cache") as serving:
        yield serving


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    cli.main(list(arguments), standalone_mode=False)
    return capsys.readouterr().out


def on(*gpus: RankDevice, cpu: RankDevice = CPU) -> machine.Machine:
    return machine.Machine(cpu, gpus, {})


def describe(name: str, *gpus: RankDevice, cpu: RankDevice = CPU, **options: Any) -> dict[str, Any]:
    config = EngineConfig(model=name, **options)
    return describe_model(config, on(*gpus, cpu=cpu)).about


# -- info MODEL --------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["qwen2", "qwen3_moe"])
def test_a_model_on_the_hub_is_described_by_its_headers(
    hub: FakeHub, root: Path, capsys: pytest.CaptureFixture[str], model: str
) -> None:
    """The description is the same after the download."""
    hub.put_folder(NAME, tiny_models.cached(model, root))
    there = json.loads(run(capsys, "info", NAME, "--json"))
    assert not hub.weight_requests
    obtain_model(EngineConfig(model=NAME))
    count = len(hub.given)
    here = json.loads(run(capsys, "info", NAME, "--json"))
    assert len(hub.given) == count
    for report in (there, here):
        report.pop("fits")
        report.pop("machine")
    assert there == here
    assert there["size"] == sum(
        path.stat().st_size for path in tiny_models.cached(model, root).glob("*.safetensors")
    )
    text = run(capsys, "info", NAME)
    assert f"{there['layers']} of width {there['hidden_size']}" in text


def test_parameters_are_those_of_the_checkpoint(root: Path) -> None:
    folder = tiny_models.cached("qwen3_moe", root)
    about = describe(str(folder), dtype="float32")
    parts = [load_file(file) for file in folder.glob("*.safetensors")]
    assert about["parameters"] == sum(each.numel() for part in parts for each in part.values())
    assert about["active_parameters"] < about["parameters"]
    assert about["memory"] == 4 * about["parameters"]
    assert sum(about["memory_by_part"].values()) == about["memory"]
    assert about["memory_by_format"] == {"float32": about["memory"]}
    assert {"embedding", "head", "experts", "attention", "norms"} <= set(about["memory_by_part"])


def test_the_blocks_of_a_gguf_file_are_counted_as_such(hub: FakeHub, root: Path) -> None:
    file = write_gguf(tiny_models.cached("qwen3", root), root / "m-Q8_0.gguf", "Q8_0")
    hub.put(NAME, {"m-Q8_0.gguf": file.read_bytes()})
    about = describe(f"{NAME}:Q8_0")
    assert about == describe(str(file)) | {"model": f"{NAME}:Q8_0"}
    assert not hub.weight_requests
    assert about["format"] == "gguf" and "Q8_0" in about["memory_by_format"]
    assert about["memory"] < describe(str(file), dtype="float32")["parameters"] * 4


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("deepseek_v3", {}),
        # So large that the tables of its rotations, which are no parameters, do not count.
        ("gemma4_shared", {"hidden_size_per_layer_input": 32, "intermediate_size": 512}),
    ],
)
def test_what_is_told_is_what_the_weights_take(
    tmp_path: Path, model: str, changes: dict[str, Any]
) -> None:
    """Also for weights that expand latents, which are dequantised, and per-layer embeddings. A CPU
    that does not multiply bf16 keeps such weights and norms in float32."""
    dtype, bits = ("bfloat16", 16) if multiplies(torch.bfloat16) else ("float32", 32)
    tiny_models.build(model, tmp_path / "model", **changes)
    file = write_gguf(tmp_path / "model", tmp_path / "model.gguf", "Q8_0")
    reports = []
    for path, isq in ((tmp_path / "model", "q8_0"), (file, None)):
        about = describe(str(path), dtype=dtype, isq=isq)
        size = resident_bytes([load_model(path, dtype=dtype, isq=isq)])
        assert size == pytest.approx(about["memory"], rel=0.01)
        reports.append((about["memory_by_format"], about["memory_by_part"]))
    assert reports[0] == reports[1]
    if changes:
        numbers = describe(str(tmp_path / "model"), dtype=dtype)["memory_by_part"]
        assert reports[0][1][LAYERS] == pytest.approx(numbers[LAYERS] * 8.5 / bits, rel=0.01)


def test_kv_follows_its_dtype_and_the_context(root: Path) -> None:
    folder = str(tiny_models.cached("qwen3", root))
    wide = describe(folder, kv_cache_dtype="float32")
    narrow = describe(folder, kv_cache_dtype="fp8")
    assert wide["kv_bytes_per_token"] == 4 * narrow["kv_bytes_per_token"]
    assert wide["fits"][0]["tokens"] < narrow["fits"][0]["tokens"]
    tokens = int(CPU.free_bytes - wide["memory"]) * 0.3 // wide["kv_bytes_per_token"]
    assert wide["fits"] == [{"device": "CPU", "ranks": 1, "fits": True, "tokens": int(tokens)}]


def test_the_context_is_what_the_files_limit_texts_to(
    tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_models.cached("bert", root), folder)
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 48}')
    assert "context 48 tokens, by max_seq_length\n" in run(capsys, "info", str(folder))
    longer = run(capsys, "info", str(folder), "--max-model-len", "100")
    assert "context 100 tokens\n" in longer


def test_whether_it_fits(root: Path) -> None:
    folder = str(tiny_models.cached("qwen3", root))
    memory = describe(folder)["memory"]
    small = RankDevice("cpu", "CPU", 64 << 30, memory)
    assert describe(folder, cpu=small)["fits"] == [
        {"device": "CPU", "ranks": 1, "fits": False, "tokens": 0}
    ]
    both = describe(folder, *GPUS)["fits"]
    assert [fit["fits"] for fit in both] == [True, True] and both[0]["tokens"] > 1000
    # Half of the weights leave room for a step, all of the weights do not.
    itemsize = 4 if describe(folder, *GPUS)["dtype"] == "float32" else 2
    step = estimated_step_bytes(read_spec(folder), tokens=8192, sequences=256, itemsize=itemsize)
    card = RankDevice("cuda", "GPU 0", (8 << 30), memory + step - 1)
    assert [fit["ranks"] for fit in describe(folder, card, card)["fits"]] == [2, 2]
    assert describe(folder, card)["fits"][0]["fits"] is False
    assert describe(folder, *GPUS, device="cpu")["fits"][0]["device"] == "CPU"


def test_info_refuses_what_cannot_be_served(hub: FakeHub, root: Path) -> None:
    files = {path.name: path.read_bytes() for path in tiny_models.cached("qwen3", root).iterdir()}
    hub.put(NAME, files | {"config.json": b'{"architectures": ["ElectraModel"]}'})
    with pytest.raises(ModelError, match="it is an encoder"):
        describe(NAME)
    del files["model.safetensors"]
    hub.put("owner/older", files | {"pytorch_model.bin": b"x"})
    with pytest.raises(ModelError, match=r"pytorch_model.bin cannot be loaded: convert to"):
        describe("owner/older")
    assert not hub.weight_requests and not hub.ranges


def test_info_refuses_what_no_server_would_start_with(hub: FakeHub, root: Path) -> None:
    folder = tiny_models.cached("qwen3", root)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    hub.put(NAME, files | {"model.safetensors": save(weights)})
    with pytest.raises(ModelError, match=f"^{NAME} lacks model.norm.weight: "):
        describe(NAME)
    with pytest.raises(StartupError, match=r"^--device cuda: .* use --device cpu$"):
        describe(str(folder), device="cuda")
    with pytest.raises(StartupError, match="--cpu-kernels compiled is for CPUs"):
        describe(str(folder), *GPUS, cpu_kernels="compiled")
    context = describe(str(folder))["context"]
    with pytest.raises(StartupError, match=f"exceeds the model's context of {context} tokens"):
        describe(str(folder), max_model_len=context + 1)
    tokens = describe(str(folder), max_model_len=context)["fits"][0]["tokens"]
    kv_bytes = context * describe(str(folder))["kv_bytes_per_token"]
    memory = describe(str(folder))["memory"]
    small = RankDevice("cpu", "CPU", 64 << 30, memory + 3 * kv_bytes)
    assert tokens > context and describe(str(folder), cpu=small)["fits"][0]["fits"]
    assert not describe(str(folder), cpu=small, max_model_len=context)["fits"][0]["fits"]


def test_headers_are_kept_apart_from_the_cache(hub: FakeHub, root: Path) -> None:
    """Also headers of layers over vectors, which are in subfolders."""
    files = {path.name: path.read_bytes() for path in tiny_models.cached("qwen3", root).iterdir()}
    hidden = json.loads(files["config.json"])["hidden_size"]
    modules = [{"type": f"models.{kind}", "path": f"1_{kind}"} for kind in ("Pooling", "Dense")]
    dense: dict[str, Any] = {"in_features": hidden, "out_features": 8, "bias": False}
    dense["activation_function"] = "torch.nn.modules.linear.Identity"
    linear = save({"linear.weight": torch.ones(8, hidden)})
    own_files: dict[str, Any] = {"modules.json": json.dumps(modules), "1_Dense/config.json": dense}
    hub.put(NAME, files | own_files | {"1_Dense/model.safetensors": linear})
    about = describe(NAME)
    assert (
        about["parameters"]
        == describe(str(tiny_models.cached("qwen3", root)))["parameters"] + 8 * hidden
    )
    path = obtain_model(EngineConfig(model=NAME)).path
    assert (path / "1_Dense" / "model.safetensors").read_bytes() == linear


TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        ("tekken.json", "tekken"),
        ("tiktoken.model", "tiktoken"),
        ("qwen.tiktoken", "tiktoken"),
        ("tokenizer.model", "SentencePiece"),
        ("spiece.model", "SentencePiece"),
        ("vocab.json", "byte-level BPE"),
        ("vocab.txt", "WordPiece"),
    ],
)
def test_the_tokenizer_kind_and_the_reason_of_a_rejection_are_shown(
    hub: FakeHub, root: Path, file: str, kind: str
) -> None:
    """Before any weights are downloaded."""
    files = {path.name: path.read_bytes() for path in tiny_models.cached("qwen3", root).iterdir()}
    del files["tokenizer.json"], files["tokenizer_config.json"]
    own_files = {file: every_kind()[file], "merges.txt": b"t h\n", "chat_template.jinja": TEMPLATE}
    hub.put(NAME, files | own_files | {"tokenizer_config.json": {"add_bos_token": False}})
    hub.put("owner/broken", files | {file: b'{"config": '})
    description = describe(NAME)["tokenizer"]
    assert (description["kind"], description["file"]) == (kind, file)
    assert description["tokens"] > 4 and description["templates"] == {
        "default": "chat_template.jinja"
    }
    problem = describe("owner/broken")["tokenizer"]["problem"]
    assert problem.startswith(file) and "\n" not in problem
    assert not hub.weight_requests


def test_where_a_template_comes_from(
    hub: FakeHub, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_models.cached("qwen3", root)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.put(NAME, files)
    assert describe(NAME)["tokenizer"]["kind"] == "Hugging Face tokenizers"
    templates = [{"name": name, "template": TEMPLATE} for name in ("default", "tool_use")]
    config = json.loads(files["tokenizer_config.json"])
    hub.put("owner/named", files | {"tokenizer_config.json": config | {"chat_template": templates}})
    text = run(capsys, "info", "owner/named")
    assert (
        "template of chats in tokenizer_config.json, template of tool_use in tokenizer_config.json"
    ) in text
    hub.put("owner/wrong", files | {"chat_template.jinja": "{% for %}"})
    assert "tokenizer   refused: chat_template.jinja" in run(capsys, "info", "owner/wrong")
    del files["tokenizer.json"]
    hub.put("owner/without", files)
    assert "tokenizer   refused: tokenizer.json does not exist" in run(
        capsys, "info", "owner/without"
    )
    gguf = write_gguf(folder, root / "t-Q8_0.gguf", "Q8_0").read_bytes()
    hub.put("owner/gguf", {"t-Q8_0.gguf": gguf})
    description = describe("owner/gguf")["tokenizer"]
    assert (description["kind"], description["file"]) == ("GGUF", "t-Q8_0.gguf")


# -- this machine ------------------------------------------------------------------------------


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    about = json.loads(run(capsys, "info", "--json"))
    assert about["memory"]["total"] >= about["memory"]["free"] > 0
    assert about["extras"]["serve"] and set(about["extras"]) == set(machine.EXTRAS)
    text = run(capsys, "info")
    assert about["cpu"]["model"] in text and about["torch"] in text and "kernels" in text


def test_the_tokenizer_of_another_model_is_refused(
    hub: FakeHub, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tokenizer with more tokens than the model has embeddings."""
    files = {path.name: path.read_bytes() for path in tiny_models.cached("qwen3", root).iterdir()}
    large = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"t{n}": n for n in range(5000)}))
    hub.put(NAME, files | {"tokenizer.json": large.to_str().encode()})
    problem = describe(NAME)["tokenizer"]["problem"]
    assert "tokenizer.json has 5000 tokens" in problem and "belongs to another model" in problem
    with pytest.raises(ModelError, match="belongs to another model"):
        run(capsys, "pull", NAME)
    assert not hub.weight_requests


def test_the_kernels_that_would_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    config = EngineConfig()
    assert "needs pip install '.[cpu]'" in machine.in_sentence(
        machine.kernels(config, on_gpu=False)
    )
    assert machine.kernels(config, on_gpu=True) == {"gpu": "torch"}
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    assert machine.kernels(config, on_gpu=True) == {"gpu": "triton"}
    compiled = EngineConfig(cpu_kernels="compiled")
    assert machine.in_sentence(machine.kernels(compiled, on_gpu=False)) == "compiled ones, by numba"


def test_the_kernels_of_each_format(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators know the CPU; formats of tables of embeddings do not matter."""
    jit.prepare()
    from tandem.kernels.cpu.operators import CompiledOperators

    kinds = {"ffn_up": "Q5_0", "output.": "Q4_1", "token_embd": "Q5_1"}
    folder = tiny_models.cached("qwen3", root)
    file = str(write_gguf(folder, root / "formats.gguf", "Q8_0", others=kinds))
    operators_of_gpu = pytest.importorskip("tandem.kernels.gpu.operators")
    gpu_operators = operators_of_gpu.GpuOperators
    for operators, own in ((CompiledOperators, ("Q5_0", "Q4_1")), (gpu_operators, ("Q8_0",))):
        monkeypatch.setattr(
            operators, "has_product", lambda self, format, dtype, own=own: format.name in own
        )
    monkeypatch.setattr(machine, "find_spec", lambda name: name)
    in_torch = {"Q8_0": "torch", "Q5_0": "torch", "Q4_1": "torch"}
    here = in_torch | {"Q5_0": "compiled", "Q4_1": "compiled"}
    compiled = describe(file, cpu_kernels="compiled")["kernels"]
    assert compiled["formats"] == here
    assert machine.in_sentence(compiled) == "compiled ones, by numba; torch's for Q8_0"
    slow = describe(file)["kernels"]
    assert (slow["formats"], slow["formats_available"]) == (in_torch, here)
    assert machine.in_sentence(slow).endswith("has faster ones, but none for Q8_0 on this CPU")
    gpu = describe(file, *GPUS)["kernels"]
    assert gpu["formats"] == in_torch | {"Q8_0": "triton"}
    assert "on the first start; torch's for " in machine.in_sentence(gpu)
    monkeypatch.setitem(sys.modules, operators_of_gpu.__name__, None)  # as without Triton
    assert describe(file, *GPUS, decode_kernel="torch")["kernels"]["formats"] == in_torch
    monkeypatch.setattr(machine, "find_spec", lambda name: name if name != "triton" else None)
    assert describe(file, *GPUS)["kernels"]["formats"] == in_torch


# -- pull and list -----------------------------------------------------------------------------


def test_a_model_that_was_pulled_is_listed(
    hub: FakeHub, root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(capsys, "list").startswith("no models; tandem pull MODEL")
    hub.put_folder(NAME, tiny_models.cached("qwen3", root))
    file = write_gguf(tiny_models.cached("qwen3", root), tmp_path / "m.gguf", "Q8_0")
    hub.put("owner/gguf", {"m-Q8_0.gguf": file.read_bytes()})
    line = run(capsys, "pull", NAME)
    assert line.startswith(f"{tmp_path}/cache/models--owner--model/snapshots/{COMMIT}  ")
    assert "KB" in line or "MB" in line
    assert "/m-Q8_0.gguf  " in run(capsys, "pull", "owner/gguf", "--f", "m-Q8_0.gguf")
    models = {model["name"]: model for model in json.loads(run(capsys, "list", "--json"))}
    assert set(models) == {NAME, "owner/gguf"}
    assert (models[NAME]["format"], models[NAME]["refs"]) == ("safetensors", ["main"])
    assert models["owner/gguf"]["format"] == "GGUF Q8_0"
    assert models["owner/gguf"]["size"] == file.stat().st_size
    assert all(model["whole"] for model in models.values())
    table = run(capsys, "list").splitlines()
    assert table[0].split() == ["NAME", "REVISION", "FORMAT", "SIZE", "LAST", "USED"]
    assert any(f"main ({COMMIT[:8]})" in line and "just now" in line for line in table[1:])


def test_what_is_not_whole_is_listed_as_such(hub: FakeHub, root: Path) -> None:
    hub.put_folder(NAME, tiny_models.cached("qwen2", root))  # in several files
    path = obtain_model(EngineConfig(model=NAME)).path
    assert [model.whole for model in cached_models()] == [True]
    next(path.glob("model-*.safetensors")).unlink()
    assert [model.whole for model in cached_models()] == [False]
    assert "safetensors, incomplete" in as_table(cached_models())


def test_a_model_is_not_pulled_that_no_router_could_serve(
    hub: FakeHub, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Even if it is already downloaded."""
    folder = tiny_models.cached("qwen3", root)
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    hub.put(NAME, files)
    path = Path(run(capsys, "pull", NAME).split()[0])
    count = len(hub.weight_requests)
    hub.put("owner/broken", files | {"tokenizer.json": b'{"model": '})
    (path / "tokenizer.json").unlink()
    (path / "tokenizer.json").write_bytes(b'{"model": ')
    for name in ("owner/broken", str(path)):
        with pytest.raises(ModelError, match=r"tokenizer.json: not a tokenizer"):
            run(capsys, "pull", name)
    assert len(hub.weight_requests) == count


def test_a_model_that_is_here_needs_no_pull(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models.cached("qwen3", root)
    assert run(capsys, "pull", str(folder)).startswith(f"{folder}  ")
    with pytest.raises(UsageError, match="pull needs the MODEL to download"):
        run(capsys, "pull")


def test_kv_of_an_unknown_format_is_no_reason_not_to_pull(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_models.cached("qwen3", root), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    kv = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "NVFP4"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": kv}))
    assert run(capsys, "pull", str(folder)).startswith(f"{folder}  ")
    words = "config.json: quantization_config: KV by kv_cache_quant_algo NVFP4 is not supported"
    with pytest.raises(ModelError, match=words):
        run(capsys, "info", str(folder))


def test_the_commands_have_few_options() -> None:
    for name in ("pull", "info", "list"):
        command = cli.commands[name]
        assert isinstance(command, HelpfulCommand)
        options = [each for each in command.params if isinstance(each, click.Option)]
        assert len(options) < 20
        assert "revision" in {each.name for each in options} or name == "list"
