"""TeX in Markdown, shown as its source: Markdown would take its signs for its own."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline

# Prices are no mathematics: no space inside of the dollars, and no digit behind. A formula that is
# not closed soon is text, so that the search for its end is short.
FORMULA = re.compile(
    r"\$\$.{1,1000}?\$\$|\\\[.{1,1000}?\\\]|\\\(.{1,1000}?\\\)"
    r"|\$(?!\s)[^$\n]{1,1000}?(?<!\s)\$(?!\d)",
    re.DOTALL,
)


def keep_formulas(parser: MarkdownIt) -> MarkdownIt:
    """Have the parser take formulas as plain text."""
    parser.inline.ruler.before("escape", "formula", _formula)
    return parser


def _formula(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] not in "$\\":
        return False
    found = FORMULA.match(state.src, state.pos, state.posMax)
    if found is None:
        return False
    if not silent:
        state.push("text", "", 0).content = " ".join(found[0].split())
    state.pos = found.end()
    return True
