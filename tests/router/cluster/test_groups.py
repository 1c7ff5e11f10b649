"""Groups: tables of model cards whose nodes may serve in one cluster."""

from __future__ import annotations

import re

import pytest

from tandem.proto import tandem_pb2 as pb
from tandem.router.cluster.groups import conflict, text_of


def card(name: str = "qwen", **fields: object) -> pb.ModelCard:
    values = {"layers": 2, "vocab_size": 320, "vocabulary": "t1", **fields}
    lines = [f"{key}={value}" for key, value in sorted(values.items())]
    return pb.ModelCard(name=name, fingerprint="\n".join(lines))


@pytest.mark.parametrize(
    ("present", "newcomer"),
    [
        ([], card()),
        ([card()], card()),
        ([card()], card("another name for it")),
        ([card()], card(layers=3)),
        ([card(), card(layers=3)], card(layers=4)),
        ([card("old name"), card()], card(layers=3)),
    ],
)
def test_versions_of_one_model_may_meet(
    present: list[pb.ModelCard], newcomer: pb.ModelCard
) -> None:
    assert conflict(present, newcomer) == ""


@pytest.mark.parametrize(
    ("newcomer", "words"),
    [
        (
            card("llama", layers=3),
            "layers is '2' in the cluster and '3' on the node ('llama'); .*-name qwen",
        ),
        (
            card(vocabulary="t2"),
            "vocabulary is 't1' in the cluster and 't2' on the node; .* a router each",
        ),
        (card(layers=3, vocab_size=321), "vocab_size is '320' in the cluster and '321'"),
        (card(chat_template="c"), "chat_template is 'missing' .* 'c'"),
    ],
)
def test_other_models_and_other_text_are_refused_by_field(
    newcomer: pb.ModelCard, words: str
) -> None:
    assert re.search(words.replace("(", r"\(").replace(")", r"\)"), conflict([card()], newcomer))


def test_text_is_what_a_router_uses() -> None:
    assert text_of(card()) == text_of(card("x", layers=9)) != text_of(card(vocab_size=1))
