// Convert the part of TeX that models write to MathML. With an unknown command, the whole formula stays
// source text, which is better than a wrong formula.

import { el, mathml } from "../dom.js";
import { ACCENTS, DELIMITERS, FONTS, FUNCTIONS, LARGE, SPACES, SYMBOLS } from "./maths_symbols.js";

const MAX_LENGTH = 5_000;
const DEEPEST = 40;
const LOW = 1.3;  // a fence is low if its row is this much higher
const TOKEN = /\\(?:[a-zA-Z]+\*?|[^])|\s+|[^]/gu;
const ENVIRONMENTS = {
  matrix: ["", ""], pmatrix: ["(", ")"], bmatrix: ["[", "]"], Bmatrix: ["{", "}"],
  vmatrix: ["|", "|"], Vmatrix: ["‖", "‖"], cases: ["{", ""], array: ["", ""],
  aligned: ["", ""], align: ["", ""], gathered: ["", ""], gather: ["", ""], split: ["", ""],
  equation: ["", ""], smallmatrix: ["", ""],
};

/** The element of a formula: `math`, or `code` with its source. */
export function mathsOf(source, display) {
  const text = source.trim();
  try {
    if (text.length > MAX_LENGTH) throw new UnknownMaths("too long");
    const row = new Formula(text).whole();
    const node = mathml("math", { display: display ? "block" : "inline", "aria-label": text }, row);
    requestAnimationFrame(() => stretchFences(node));
    return node;
  } catch (error) {
    if (!(error instanceof UnknownMaths)) throw error;
    return el("code", { class: "tex" }, text);
  }
}

/** Stretch fences to the height of their content if the browser has not, for lack of a mathematical
 * font. */
function stretchFences(node) {
  for (const sign of node.querySelectorAll("mo[fence]")) {
    const ratio = heightOf(sign.parentNode) / heightOf(sign);
    if (ratio > LOW) sign.style.transform = `scaleY(${ratio.toFixed(2)})`;
  }
}

const heightOf = node => node.getBoundingClientRect().height;

class UnknownMaths extends Error {}

const operator = (text, more = {}) => mathml("mo", more, text);
const fence = text => operator(text, { fence: "true", stretchy: "true" });
const row = nodes => (nodes.length === 1 ? nodes[0] : mathml("mrow", {}, nodes));

class Formula {
  constructor(text) {
    this.tokens = text.match(TOKEN) ?? [];
    this.at = 0;
    this.depth = 0;
    this.font = null;
  }

  whole() {
    const nodes = this.until(() => false);
    if (this.at < this.tokens.length) throw new UnknownMaths(this.tokens[this.at]);
    return row(nodes);
  }

  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) this.at++;
    return this.tokens[this.at];
  }

  take(expected) {
    const token = this.peek();
    if (token === undefined || (expected && token !== expected)) {
      throw new UnknownMaths(`${expected ?? "more"} is missing`);
    }
    this.at++;
    return token;
  }

  /** The nodes up to an end token, which is not consumed. */
  until(ends) {
    if (++this.depth > DEEPEST) throw new UnknownMaths("too deep");
    const nodes = [];
    for (let token = this.peek(); token !== undefined && !ends(token); token = this.peek()) {
      if (token === "}" || token === "&" || token === "\\\\") break;
      nodes.push(this.scripted());
    }
    this.depth--;
    return nodes;
  }

  /** An atom with its subscript and superscript. */
  scripted() {
    const first = this.peek();
    const base = first === "^" || first === "_" ? mathml("mrow", {}) : this.atom();
    let below = null, above = null;
    for (let token = this.peek(); ; token = this.peek()) {
      if (token === "_" && !below) below = (this.take(), this.argument());
      else if (token === "^" && !above) above = (this.take(), this.argument());
      else if (token === "'") above = this.primes(above);
      else break;
    }
    return scripts(base, below, above);
  }

  primes(above) {
    let text = "";
    while (this.peek() === "'") text += (this.take(), "′");
    return above ? mathml("mrow", {}, above, operator(text)) : operator(text);
  }

  argument() {
    return this.peek() === "{" ? this.group() : this.atom();
  }

  group() {
    this.take("{");
    const nodes = this.until(() => false);
    this.take("}");
    return mathml("mrow", {}, nodes);
  }

  atom() {
    const token = this.take();
    if (token === "{") {
      this.at--;
      return this.group();
    }
    if (token.startsWith("\\")) return this.command(token.slice(1));
    if (/[0-9.]/.test(token)) return this.number(token);
    if (/\p{L}/u.test(token)) return this.letter(token);
    if ("^_}&#%$".includes(token)) throw new UnknownMaths(token);
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token,
                    "()[]|".includes(token) ? { stretchy: "false" } : {});
  }

  number(first) {
    let text = first;
    while (/^[0-9.]$/.test(this.tokens[this.at] ?? "")) text += this.tokens[this.at++];
    return mathml("mn", {}, this.font ? styled(text, this.font) : text);
  }

  letter(text) {
    if (!this.font) return mathml("mi", {}, text);
    // Letters in one font are one word.
    while (/^\p{L}$/u.test(this.tokens[this.at] ?? "")) text += this.tokens[this.at++];
    return mathml("mi", { mathvariant: "normal" }, styled(text, this.font));
  }

  command(name) {
    if (name.endsWith("*") && name.length > 1 && name !== "operatorname*") {
      this.tokens[--this.at] = "*";
      name = name.slice(0, -1);
    }
    if (Object.hasOwn(SYMBOLS, name)) return symbol(SYMBOLS[name]);
    if (Object.hasOwn(LARGE, name)) return large(name);
    if (Object.hasOwn(SPACES, name)) return mathml("mspace", { width: SPACES[name] });
    if (Object.hasOwn(FONTS, name)) return this.inFont(FONTS[name]);
    if (Object.hasOwn(ACCENTS, name)) return this.accent(ACCENTS[name]);
    if (FUNCTIONS.has(name)) return mathml("mi", {}, name);
    return this.structure(name);
  }

  structure(name) {
    switch (name) {
      case "frac": case "dfrac": case "tfrac": case "cfrac":
        return mathml("mfrac", {}, this.argument(), this.argument());
      case "binom": case "dbinom": case "tbinom": return this.binomial();
      case "sqrt": return this.root();
      case "text": case "textrm": case "textit": case "textbf": case "mbox": case "operatorname":
      case "operatorname*":
        return this.words(name);
      case "left": return this.fenced();
      case "begin": return this.environment();
      case "overset": case "stackrel": return this.stacked("mover");
      case "underset": return this.stacked("munder");
      case "underbrace": return this.braced("munder", "⏟");
      case "overbrace": return this.braced("mover", "⏞");
      case "boxed": return mathml("mrow", { class: "boxed" }, this.argument());
      case "not": return this.negated();
      case "displaystyle": case "textstyle": case "limits": case "nolimits": case "nonumber":
        return mathml("mrow", {});
      case "tag": return mathml("mrow", {}, mathml("mspace", { width: "2em" }),
                                mathml("mtext", {}, `(${this.rawArgument()})`));
      case "pmod": return mathml("mrow", {}, operator("("), mathml("mi", {}, "mod"),
                                 mathml("mspace", { width: "0.3em" }), this.argument(),
                                 operator(")"));
      case "middle": return fence(this.delimiter());
      default:
        if (/^(?:big|Big|bigg|Bigg)[lrm]?$/.test(name)) return fence(this.delimiter());
        throw new UnknownMaths(name);
    }
  }

  binomial() {
    const [over, under] = [this.argument(), this.argument()];
    const both = mathml("mfrac", { linethickness: "0" }, over, under);
    return mathml("mrow", {}, fence("("), both, fence(")"));
  }

  root() {
    if (this.peek() !== "[") return mathml("msqrt", {}, this.argument());
    this.take("[");
    const degree = row(this.until(token => token === "]"));
    this.take("]");
    return mathml("mroot", {}, this.argument(), degree);
  }

  words(name) {
    const text = this.rawArgument();
    const shown = name === "textbf" ? styled(text, FONTS.mathbf) : text;
    if (name.startsWith("operatorname")) return mathml("mi", { mathvariant: "normal" }, shown);
    return mathml("mtext", {}, shown.replaceAll(" ", "\u00A0"));
  }

  /** The raw text between braces. */
  rawArgument() {
    this.take("{");
    let text = "", open = 0;
    for (; this.at < this.tokens.length; this.at++) {
      const token = this.tokens[this.at];
      if (token === "}" && open-- === 0) return this.at++, text;
      if (token === "{") open++;
      else if (token !== "}") text += token.length === 2 ? token.replace("\\", "") : token;
    }
    throw new UnknownMaths("} is missing");
  }

  inFont(font) {
    const before = this.font;
    this.font = font;
    const nodes = this.argument();
    this.font = before;
    return nodes;
  }

  accent([sign, stretchy]) {
    const over = operator(sign, { stretchy });
    const under = sign === "_";
    return mathml(under ? "munder" : "mover", { accent: "true" }, this.argument(), over);
  }

  stacked(tag) {
    const small = this.argument();
    return mathml(tag, {}, this.argument(), small);
  }

  braced(tag, sign) {
    const both = mathml(tag, {}, this.argument(), operator(sign, { stretchy: "true" }));
    const mark = this.peek();
    if (mark !== "_" && mark !== "^") return both;
    this.take();
    return mathml(tag, {}, both, this.argument());
  }

  negated() {
    const node = this.atom();
    node.textContent += "\u0338";
    return node;
  }

  delimiter() {
    const token = this.take();
    const name = token.startsWith("\\") ? token.slice(1) : token;
    if (name === ".") return "";
    if (token.length === 1 && "()[]|/<>".includes(name)) return name;
    if (Object.hasOwn(DELIMITERS, name)) return DELIMITERS[name];
    throw new UnknownMaths(token);
  }

  fenced() {
    const left = this.delimiter();
    const nodes = this.until(token => token === "\\right");
    this.take("\\right");
    return mathml("mrow", {}, fence(left), nodes, fence(this.delimiter()));
  }

  environment() {
    const name = this.rawArgument().replace("*", "");
    if (!Object.hasOwn(ENVIRONMENTS, name)) throw new UnknownMaths(name);
    if (name === "array") this.rawArgument();
    const rows = [[]];
    for (;;) {
      rows.at(-1).push(this.until(token => token === "\\end"));
      const end = this.take();
      if (end === "\\end") break;
      if (end === "\\\\") rows.push([]);
      else if (end !== "&") throw new UnknownMaths(end);
    }
    this.rawArgument();
    if (rows.length > 1 && rows.at(-1).flat().length === 0) rows.pop();
    const aligned = /^(?:align|aligned|split)$/.test(name);
    const [left, right] = ENVIRONMENTS[name];
    const table = mathml("mtable", { class: aligned ? "aligned" : name }, rows.map(tableRow));
    return mathml("mrow", {}, left ? [fence(left)] : [], table, right ? [fence(right)] : []);
  }
}

const tableRow = cells => mathml("mtr", {}, cells.map(nodes => mathml("mtd", {}, nodes)));

function scripts(base, below, above) {
  const limits = base.hasAttribute("movablelimits");
  const tags = limits ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
  if (below && above) return mathml(tags[2], {}, base, below, above);
  if (below) return mathml(tags[0], {}, base, below);
  return above ? mathml(tags[1], {}, base, above) : base;
}

function symbol(text) {
  return /^[\p{L}∞∅ℏ∂∇ℓ]$/u.test(text) ? mathml("mi", {}, text) : operator(text);
}

function large(name) {
  const sign = LARGE[name];
  const text = /^[a-z ]+$/.test(sign);
  const limits = !sign.includes("∫") && !sign.includes("∮");
  const attributes = limits ? { movablelimits: "true" } : {};
  return operator(sign, text ? attributes : { ...attributes, largeop: "true" });
}

/** Letters and digits in one of Unicode's mathematical alphabets. */
function styled(text, font) {
  return [...text].map(sign => {
    if (font.exceptions?.[sign]) return font.exceptions[sign];
    for (const [first, last, base] of font.ranges) {
      if (sign >= first && sign <= last) {
        return String.fromCodePoint(base + sign.codePointAt(0) - first.codePointAt(0));
      }
    }
    return sign;
  }).join("");
}
