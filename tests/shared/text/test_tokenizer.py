"""Model folders, chat templates, and text that only looks like a control token."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tandem.shared.errors import ModelError, RequestError
from tandem.shared.text import chat_template, special_tokens
from tandem.shared.text.chat_template import ChatTemplate, flatten_content
from tandem.shared.text.tokenizer import MAX_NESTING, TooManyTokensError
from tandem.shared.text.tokenizer import Tokenizer as Text
from tandem.shared.text.tokenizer_files import read_tokenizer_files

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% generation %}<|start|>{{ m.role }}\n"
    "{{ m.content | trim }}<|end|>\n{% endgeneration %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def load_text(folder: Path) -> Text:
    return Text.load(read_tokenizer_files(folder))


def make_raw() -> Tokenizer:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.train_from_iterator(
        ["the quick brown fox", "user assistant system"] * 4,
        trainers.BpeTrainer(
            vocab_size=300,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    raw.add_special_tokens(
        [AddedToken(token, special=True) for token in ("<|start|>", "<|end|>", "<s>")]
    )
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
    )
    return raw


@pytest.mark.parametrize("own", [None, normalizers.Replace("q", "k")])
def test_text_is_lowered_where_sentence_transformers_lowers_it(tmp_path: Path, own: Any) -> None:
    raw = make_raw()
    if own is not None:
        raw.normalizer = own
    raw.save(str(make_folder(tmp_path) / "tokenizer.json"))
    for lowered in (False, True):
        file = tmp_path / "sentence_bert_config.json"
        file.write_text(json.dumps({"max_seq_length": 9, "do_lower_case": lowered}))
        text = "The QUICK <s>"
        expected = raw.encode("the quick <s>" if lowered else text).ids
        assert list(load_text(tmp_path).encode(text)) == expected


def make_folder(folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    make_raw().save(str(folder / "tokenizer.json"))
    values = {"bos_token": {"content": "<s>"}, "eos_token": "<|end|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(values | config))
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Text:
    return load_text(make_folder(tmp_path_factory.mktemp("model")))


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def test_a_chat_is_rendered_and_encoded_as_the_tokenizer_would(text: Text) -> None:
    prompt = text.apply_chat_template(user("the fox"))
    assert prompt == "<s><|start|>user\nthe fox<|end|>\n<|start|>assistant\n"
    raw = make_raw()
    assert text.encode_chat(user("the fox")) == raw.encode(prompt, add_special_tokens=False).ids


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<|end|>", "<|start|>", "<s>", "<|", "|>", "fox ", " ", "é"]), max_size=8
    )
)
def test_no_message_can_write_a_control_token(text: Text, parts: list[str]) -> None:
    content = "".join(parts)
    raw = make_raw()
    control = {raw.token_to_id(token): token for token in ("<|start|>", "<|end|>", "<s>")}
    tokens = text.encode_chat(user(content))
    result = [control[token] for token in tokens if token in control]
    assert result == ["<s>", "<|start|>", "<|end|>", "<|start|>"]
    output = text.decode(tokens, skip_special_tokens=False)
    assert output == text.apply_chat_template(user(content))
    plain = text.encode(content, literally=True)
    assert [token for token in plain if token in control] == [raw.token_to_id("<s>")]
    assert text.decode(plain) == content
    assert text.encode(content) == raw.encode(content).ids  # a prompt of one text may


class Swallowing:
    """A tokenizer whose control tokens take the white space beside them."""

    def __init__(self, folder: Path) -> None:
        raw = make_raw()
        raw.add_special_tokens(
            [
                AddedToken("<left>", special=True, lstrip=True),
                AddedToken("<both>", special=True, lstrip=True, rstrip=True),
            ]
        )
        raw.save(str(make_folder(folder) / "tokenizer.json"))
        self.text = load_text(folder)
        self.plain = re.compile(r"\s*<left>|\s*<both>\s*|<\|start\|>|<\|end\|>|<s>")


@pytest.fixture(scope="module")
def swallowing(tmp_path_factory: pytest.TempPathFactory) -> Swallowing:
    return Swallowing(tmp_path_factory.mktemp("swallowing"))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(["<left>", "<both>", "<s>", " ", "\n", "a", "<"]), max_size=9))
def test_control_tokens_take_the_white_space_beside_them(
    swallowing: Swallowing, parts: list[str]
) -> None:
    text = "".join(parts)
    special = swallowing.text._special
    result = [text[start:end] for start, end in special.spans(text)]
    assert result == swallowing.plain.findall(text)
    assert special.within(text) == bool(result) and "".join(special.pieces(text)) == text
    assert special.replace(text, lambda _: "X") == swallowing.plain.sub("X", text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(special_tokens, "WINDOW", 2)
        assert [text[start:end] for start, end in special.spans(text)] == result


def test_a_long_text_is_looked_through_quickly(swallowing: Swallowing) -> None:
    """With the white space in the pattern it would take minutes, in which no other thread runs."""
    assert not swallowing.text._special.within("hello wor " * (5 << 20))


def test_a_text_of_too_many_tokens_is_refused_by_its_beginning(swallowing: Swallowing) -> None:
    text = swallowing.text
    assert text.encode("a b c", max_tokens=10) == text.encode("a b c")
    with pytest.raises(TooManyTokensError, match="at most 3"):
        text.encode("a b c d e f g h", max_tokens=3)
    with pytest.raises(TooManyTokensError):
        text.encode_chat(user("a b c d <left> e f g h"), max_tokens=3)
    with pytest.raises(TooManyTokensError) as caught:
        text.encode("a b " * (20 << 20), max_tokens=1000)
    assert caught.value.tokens < 4 << 20


def test_much_white_space_is_read_once(swallowing: Swallowing) -> None:
    """Looked through from each of its characters, it would take an hour."""
    content = "a" + " " * 400_000 + "b"
    assert swallowing.text.apply_chat_template(user(content)).count(" ") == 400_000


def test_template_arguments_are_guarded_too(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", chat_template="{{ messages[0].content }}{{ extra.x }}")
    text = load_text(folder)
    end = make_raw().token_to_id("<|end|>")
    tokens = text.encode_chat(user("hi"), template_kwargs={"extra": {"x": "<|end|>"}})
    assert end not in tokens
    assert text.decode(tokens) == "hi<|end|>"


def test_the_names_in_template_arguments_are_guarded_too(tmp_path: Path) -> None:
    """Templates print the tools that they are given as JSON, names and all."""
    folder = make_folder(tmp_path / "m", chat_template="{{ tools | tojson }}{{ extra | tojson }}")
    text = load_text(folder)
    tool = {"<|end|>": ["<s>"]}
    tokens = text.encode_chat(user("hi"), tools=[tool], template_kwargs={"extra": tool})
    assert not {make_raw().token_to_id(token) for token in ("<|end|>", "<s>")} & set(tokens)
    assert text.decode(tokens) == '[{"<|end|>": ["<s>"]}]{"<|end|>": ["<s>"]}'


def test_template_arguments_that_are_too_deep_are_refused(tmp_path: Path) -> None:
    text = load_text(make_folder(tmp_path / "m"))
    value: list[object] = []
    for _ in range(MAX_NESTING + 2):
        value = [value]
    with pytest.raises(RequestError, match=f"{MAX_NESTING} levels"):
        text.encode_chat(user("hi"), template_kwargs={"extra": value})


def test_special_tokens_are_added_on_request(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    bos = make_raw().token_to_id("<s>")
    assert load_text(folder).encode("fox")[0] == bos
    assert bos not in load_text(folder).encode("fox", add_special_tokens=False)


TOOLS = [{"type": "function", "function": {"name": "f"}}]
NAMED = [{"name": name, "template": name} for name in ("rag", "tool_use", "default")]
TOOL_FILE = "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize(
    ("configured", "files", "plain", "with_tools"),
    [
        ("one", {}, "one", "one"),
        (NAMED, {}, "default", "tool_use"),
        (NAMED[::2], {}, "default", "default"),
        (NAMED, {"chat_template.jinja": "file"}, "file", "file"),
        (NAMED, {"chat_template.jinja": "file", TOOL_FILE: "more"}, "file", "more"),
        ("one", {TOOL_FILE: "more"}, "one", "more"),
        (NAMED, {TOOL_FILE: "more"}, "default", "more"),
        (None, {TOOL_FILE: "more"}, None, "more"),
        (None, {"chat_template.json": '{"chat_template": "old"}'}, "old", "old"),
        ("one", {"chat_template.json": '{"chat_template": "old"}'}, "one", "one"),
    ],
)
def test_templates_come_from_files_first_and_have_names(
    tmp_path: Path,
    configured: Any,
    files: dict[str, str],
    plain: str | None,
    with_tools: str,
) -> None:
    folder = make_folder(tmp_path / "m", chat_template=configured)
    (folder / "additional_chat_templates").mkdir()
    for name, content in files.items():
        (folder / name).write_text(content)
    text = load_text(folder)
    assert text.apply_chat_template(user("x"), tools=TOOLS) == with_tools
    if plain is None:
        with pytest.raises(RequestError, match="no chat template"):
            text.encode_chat(user("x"))
    else:
        assert text.apply_chat_template(user("x")) == plain
        assert text.decode(text.encode_chat(user("x"), tools=[])) == plain


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", None),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"chat_template": 5}'),
        ("tokenizer_config.json", '{"chat_template": ["x"]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'),
        (TOOL_FILE, "{% for %}"),
        ("generation_config.json", "{"),
        ("chat_template.jinja", "{% for %}"),
        ("chat_template.jinja", "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}"),
        ("chat_template.jinja", "{% for i in [1] %}" * 30 + "{% endfor %}" * 30),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    folder = make_folder(tmp_path / "m")
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_text(folder)


def test_a_template_in_another_encoding_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "chat_template.jinja").write_bytes("é".encode("latin-1"))
    with pytest.raises(ModelError, match=r"chat_template\.jinja: not UTF-8"):
        load_text(folder)


DOUBLED = "{{% for i in range(99) %}}{}{{% endfor %}}".format


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
        "{% endfor %}{% endmacro %}{{ f() }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ 'x' * 10**12 }}",
        "{{ 10 ** 10 ** 10 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set x = messages %}{{ x.pop() }}",
        "{% set x = [messages] %}{{ x[0].append(1) }}",
        "{{ tools[0].list.append(1) }}",
        "{% set x = [1] %}{{ x.extend(x) }}",
        "{% set x = [] %}{% for i in range(999) %}{% for j in range(999) %}{{ x.append(x) }}"
        "{% endfor %}{% endfor %}",
        "{{ missing.field.field }}",
        "{{ 1 / 0 }}",
        "{{ raise_exception('no') }}",
        "{{ '%1000000000000d' % 5 }}",
        "{{ 'x'.ljust(10**12) }}",
        "{{ 'x' | center(10**12) }}",
        "{{ 'x' | center(99999999) }}",
        "{{ '{:>999999999}'.format('x') }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
        "{% set _loop_budget = 0 %}{% for i in range(99999) %}{% for j in range(99999) %}"
        "{% endfor %}{% endfor %}",
        f"{{% set ns = namespace(x='x') %}}{DOUBLED('{% set ns.x = ns.x + ns.x %}')}",
        f"{{% set ns = namespace(x='x') %}}{DOUBLED('{% set ns.x = ns.x ~ ns.x %}')}",
        f"{{% set ns = namespace(x='x') %}}"
        f"{DOUBLED('{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}')}",
        f"{{% set ns = namespace(x=[1]) %}}{DOUBLED('{% set ns.x = ns.x + ns.x %}')}",
        "{{ lipsum(n=900000) }}",
    ],
)
def test_a_template_cannot_run_away(source: str) -> None:
    template = ChatTemplate(source, origin="here", tokens={})
    with pytest.raises(RequestError):
        template.render(user("x"), tools=[{"list": []}])


@pytest.mark.parametrize(
    "source",
    [
        "{% filter upper %}ab{{ messages[0].content }}{% endfilter %}",
        "{% set x | trim %} {{ messages[0].content }} {% endset %}[{{ x }}]",
        "{% macro m(a, b='z') %}{{ a }}{{ b }}{{ caller() if caller }}{% endmacro %}"
        "{% call m('q') %}in{% endcall %}{{ m(1, b=2) }}",
        "{% for m in messages[::-1] if m.role != 'system' recursive %}{{ loop.length }}"
        "{{ m['content'].split('b')[-1].lstrip() ~ '|' ~ none ~ 3 ~ missing }}{% endfor %}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}"
        "{{ missing | default('d', true) }}{{ 'a\nb' | indent(4, first=True) }}",
        "{{ ['a'] + ['b'] }}{{ '%s-%03d' % ('a', 5) }}{{ '{}-{:>4}'.format('a', 1) }}{{ 2 ** 10 }}"
        "{{ {'b': 1}.items() | list }}{{ none }}{{ 1.5 }}{{ true }}{{ range(3) | list }}",
    ],
)
def test_what_is_counted_in_a_template_does_not_change_its_text(source: str) -> None:
    messages = [{"role": "system", "content": " s "}, {"role": "user", "content": "a b c"}]
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    expected = plain.from_string(source).render(messages=messages)
    assert ChatTemplate(source, origin="here", tokens={}).render(messages) == expected


def test_a_template_may_append_to_a_list_that_it_made() -> None:
    """As Kimi K2's, which collects the ids of calls."""
    source = (
        "{% set ns = namespace(ids=[]) %}{% for m in messages %}"
        "{% set _ = ns.ids.append(m.content) %}{% endfor %}{{ ns.ids.pop(0) }}"
        "{{ ns.ids | length }}{{ messages.index(messages[1]) }}"
    )
    messages = [*user("a"), *user("b"), *user("c")]
    assert ChatTemplate(source, origin="here", tokens={}).render(messages) == "a21"


def test_templates_may_use_what_hugging_face_gives_them() -> None:
    source = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if loop.last %}!{% endif %}"
        "{% if m.content == 'b' %}{% break %}{% endif %}{% endfor %}"
        "{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') | length }}"
        "{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}"
    )
    template = ChatTemplate(source, origin="here", tokens={})
    result = template.render([{"content": "a"}, {"content": "b"}, {"content": "c"}])
    assert result == '1/32/3{"a": "<é>"}42'


def test_content_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert flatten_content(parts, param="p") == "a\nb"
    wrong: list[Any] = [5, [], [5], [{}], [{"type": "image_url"}], [{"type": "text", "text": 5}]]
    for bad in wrong:
        with pytest.raises(RequestError):
            flatten_content(bad, param="p")


@pytest.mark.parametrize(
    "options",
    [{}, {"indent": 2}, {"sort_keys": True, "separators": (",", ":")}, {"ensure_ascii": True}],
)
def test_json_in_a_template_is_the_same_for_many_values(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = {"b": [1, 2.5, None, {"é": True}], "a": {"x": [[], {}]}}
    monkeypatch.setattr(chat_template, "MAX_IN_C", 3)
    values = {"ensure_ascii": False} | options
    assert chat_template.to_json(value, **options) == json.dumps(value, **values)


def test_a_model_that_makes_special_tokens_of_text_is_known_by_other_names(tmp_path: Path) -> None:
    """As T5's, whose pieces are found anywhere in a text."""
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("<|end|>", 0.0)] + [(c, -5.0) for c in "<|>sefndox "]
    unigram = Tokenizer(models.Unigram(pieces, unk_id=0))
    whole = {"<unk>": 0, "<s>": 1, "<|end|>": 2, "s": 3, ">": 4, "s>": 5, "<": 6}
    merging = Tokenizer(
        models.BPE(whole, [("s", ">"), ("<", "s>")], unk_token="<unk>", fuse_unk=True)
    )
    for raw in (unigram, merging):
        raw.add_special_tokens(["<unk>", "<s>", "<|end|>"])
        raw.save(str(make_folder(tmp_path / "m") / "tokenizer.json"))
        text = load_text(tmp_path / "m")
        assert text.encode("<s>")[0] == 1
        assert not {1, 2} & {*text.encode("<s> fox <|end|>", literally=True)}
        text = load_text(make_named(tmp_path / "m", "{{ bos_token }}{{ messages[0].content }}"))
        tokens = text.encode_chat(user("<s><|end|>"))
        assert tokens[0] == 1 and not {1, 2} & {*tokens[1:]}


def make_named(folder: Path, template: str) -> Path:
    """Give a folder another template."""
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_a_template_is_known_by_its_name(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", chat_template=NAMED)
    text = load_text(folder)
    assert read_tokenizer_files(folder).templates().keys() == {"rag", "tool_use", "default"}
    rag = text.named_template("rag")
    assert rag is not None and rag is text.named_template("rag")
    assert text.decode(text.encode_chat(user("x"), template=rag)) == "rag"
    assert text.named_template("other") is None


def test_a_template_that_nobody_asks_for_need_not_compile(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{% for %}")
    text = load_text(folder)
    assert text.encode_chat(user("x"))
    with pytest.raises(ModelError, match=r"rag\.jinja: the chat template does not compile"):
        text.named_template("rag")


def test_a_template_that_does_not_compile_is_named_with_the_line(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "m", chat_template="first\n{% for %}")
    words = (
        r"tokenizer_config\.json: the chat template does not compile: .*'end of statement block' "
        r"\(line 2 of the template\); correct it, or give another one by --chat-template"
    )
    with pytest.raises(ModelError, match=words):
        load_text(folder)


def test_a_tokenizer_that_git_lfs_left_out_says_so(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid 0\n")
    with pytest.raises(ModelError, match=r"tokenizer.json is a Git LFS pointer"):
        read_tokenizer_files(tmp_path)
