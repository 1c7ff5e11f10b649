"""TeX in Markdown, shown as its source, in which Markdown's own syntax is ignored."""

from __future__ import annotations

import re

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline

# To exclude prices, there must be no space inside the dollars, and no digit after them. The length
# is limited, so that the search for the end is short.
FORMULA = re.compile(
    r"\$\$.{1,1000}?\$\$|\\\[.{1,1000}?\\\]|\\\(.{1,1000}?\\\)"
    r"|\$(?!\s)[^$\n]{1,1000}?(?<!\s)\$(?!\d)",
    re.DOTALL,
)


def keep_formulas(parser: MarkdownIt) -> MarkdownIt:
    """Add a rule to the parser that treats formulas as plain text."""
    parser.inline.ruler.before("escape", "formula", _formula)
    return parser


def _formula(state: StateInline, silent: bool) -> bool:
    if state.src[state.pos] not in "$\\":
        return False
    match = FORMULA.match(state.src, state.pos, state.posMax)
    if match is None:
        return False
    if not silent:
        state.push("text", "", 0).content = " ".join(match[0].split())
    state.pos = match.end()
    return True
