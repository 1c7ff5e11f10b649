// Emphasis, code, links and mathematics in a paragraph. Code, mathematics and escapes are replaced by
// marks first, so that their content is not parsed as Markdown.

import { el } from "../dom.js";
import { mathsOf } from "./maths.js";

const OPENS = "\uE000", CLOSES = "\uE001";  // around the number of something found
const MARK = /\uE000(\d+)\uE001/g;
const DEEPEST = 12;
const MAX_URL = 2000;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const SCHEMES = ["http:", "https:", "mailto:"];

/** The nodes of a text in Markdown. */
export function inline(text) {
  const atoms = [];
  const marked = new Atoms(text.replace(/[\uE000\uE001]/g, ""), atoms).marked();
  return new Spans(marked, atoms, 0).nodes();
}

/** Replaces code, mathematics, escapes and bare addresses by marks. */
class Atoms {
  constructor(text, atoms) {
    this.text = text;
    this.atoms = atoms;
    this.missing = new Set();  // ends that do not occur any more
  }

  marked() {
    const { text } = this;
    let out = "", at = 0;
    while (at < text.length) {
      const atom = this.atom(at);
      if (atom) {
        out += this.mark(atom.node, text.slice(at, atom.end));
        at = atom.end;
      } else {
        const run = text[at] === "`" ? runOf(text, at) : 1;
        out += text.slice(at, at + run);
        at += run;
      }
    }
    return out;
  }

  mark(node, raw) {
    this.atoms.push({ node, raw });
    return OPENS + (this.atoms.length - 1) + CLOSES;
  }

  atom(at) {
    switch (this.text[at]) {
      case "`": return this.code(at);
      case "\\": return this.escape(at);
      case "$": return this.dollars(at);
      case "<": return this.angled(at);
      case "h": return this.bare(at);
      default: return null;
    }
  }

  code(at) {
    const run = runOf(this.text, at), fence = "`".repeat(run);
    let end = this.endOf(fence, at + run);
    while (end >= 0 && runOf(this.text, end) !== run) {
      end = this.endOf(fence, end + runOf(this.text, end));
    }
    if (end < 0) {
      this.missing.add(fence);
      return null;
    }
    let text = this.text.slice(at + run, end).replaceAll("\n", " ");
    if (/^ .*[^ ].* $/.test(text.slice(0, 500))) text = text.slice(1, -1);
    return { node: el("code", {}, text), end: end + run };
  }

  escape(at) {
    const next = this.text[at + 1];
    if (next === "(" || next === "[") {
      const end = this.endOf(next === "(" ? "\\)" : "\\]", at + 2);
      if (end > 0) return this.maths(at + 2, end, end + 2, next === "[");
    }
    if (next === "\n") return { node: el("br"), end: at + 2 };
    if (!next || !PUNCTUATION.test(next)) return null;
    return { node: document.createTextNode(next), end: at + 2 };
  }

  dollars(at) {
    const { text } = this;
    if (text.startsWith("$$", at)) {
      const end = this.endOf("$$", at + 2);
      return end > at + 2 ? this.maths(at + 2, end, end + 2, true) : null;
    }
    // To exclude prices: no space inside, and no digit after it.
    if (!text[at + 1] || /\s/.test(text[at + 1])) return null;
    const line = text.indexOf("\n\n", at);
    for (let end = this.endOf("$", at + 1); end > 0; end = this.endOf("$", end + 1)) {
      if (line > 0 && end > line) return null;
      if (text[end - 1] === "\\") continue;
      if (/\s/.test(text[end - 1]) || /\d/.test(text[end + 1] ?? "")) return null;
      return this.maths(at + 1, end, end + 1, false);
    }
    return null;
  }

  maths(from, to, end, display) {
    return { node: mathsOf(this.text.slice(from, to), display), end };
  }

  angled(at) {
    const [whole, url] = /^<((?:https?:\/\/|mailto:)[^\s<>]{1,2000})>/
      .exec(this.text.slice(at, at + MAX_URL + 20)) ?? [];
    return whole ? { node: link(url, [url]), end: at + whole.length } : null;
  }

  bare(at) {
    if (at > 0 && /[\w/]/.test(this.text[at - 1])) return null;
    const ahead = this.text.slice(at, at + MAX_URL);
    let [url] = /^https?:\/\/[^\s<>"'`\\\uE000]+/.exec(ahead) ?? [];
    // Inside a link, the address is part of the link.
    if (!url || this.text.slice(at - 2, at) === "](") return null;
    while (/[.,;:!?*_~\]]$/.test(url) || (url.endsWith(")") && !url.includes("("))) {
      url = url.slice(0, -1);
    }
    return { node: link(url, [url]), end: at + url.length };
  }

  endOf(mark, from) {
    if (this.missing.has(mark)) return -1;
    const end = this.text.indexOf(mark, from);
    if (end < 0) this.missing.add(mark);
    return end;
  }
}

/** Emphasis, links and line breaks of a text with marks. */
class Spans {
  constructor(text, atoms, depth) {
    this.text = text;
    this.atoms = atoms;
    this.depth = depth;
    this.missing = new Set();
    this.brackets = matchingBrackets(text);
    this.out = [];
    this.plain = "";
  }

  nodes() {
    let at = 0;
    while (at < this.text.length) {
      const span = this.depth < DEEPEST ? this.span(at) : null;
      if (span) {
        this.flush();
        this.out.push(span.node);
        at = span.end;
      } else {
        const run = "*_~".includes(this.text[at]) ? runOf(this.text, at) : 1;
        this.plain += this.text.slice(at, at + run);
        at += run;
      }
    }
    this.flush();
    return this.out;
  }

  span(at) {
    switch (this.text[at]) {
      case "*": case "_": return this.emphasis(at);
      case "~": return this.struck(at);
      case "[": return this.link(at, at);
      case "!": return this.text[at + 1] === "[" ? this.link(at, at + 1) : null;
      case "\n": return { node: el("br"), end: at + 1 };
      default: return null;
    }
  }

  emphasis(at) {
    const sign = this.text[at], run = Math.min(runOf(this.text, at), 3);
    if (!this.opens(at, at + runOf(this.text, at))) return null;
    for (const length of run === 3 ? [3, 2, 1] : [run]) {
      const end = this.closing(sign, length, at + length);
      if (end > 0) return { node: this.emphasised(length, at + length, end), end: end + length };
    }
    return null;
  }

  emphasised(length, from, to) {
    const inside = this.inside(from, to);
    if (length === 1) return el("em", {}, inside);
    const strong = el("strong", {}, inside);
    return length === 2 ? strong : el("em", {}, strong);
  }

  struck(at) {
    if (runOf(this.text, at) !== 2 || !this.opens(at, at + 2)) return null;
    const end = this.closing("~", 2, at + 2);
    return end > 0 ? { node: el("del", {}, this.inside(at + 2, end)), end: end + 2 } : null;
  }

  opens(at, behind) {
    const next = this.text[behind];
    if (!next || /\s/.test(next)) return false;
    return this.text[at] !== "_" || !isWord(this.text[at - 1]);
  }

  /** The position of a closing run of exactly `length`, or at the end of a longer run. */
  closing(sign, length, from) {
    const name = sign + length;
    if (this.missing.has(name)) return -1;
    for (let at = this.text.indexOf(sign, from); at >= 0;) {
      const run = runOf(this.text, at), behind = at + run;
      const closes = run === length || (run === 3 && length < 3);
      const fits = !/\s/.test(this.text[at - 1]) && (sign !== "_" || !isWord(this.text[behind]));
      if (closes && fits && at > from) return behind - length;
      at = this.text.indexOf(sign, behind);
    }
    this.missing.add(name);
    return -1;
  }

  link(at, bracket) {
    const close = this.brackets.get(bracket);
    if (close === undefined || this.text[close + 1] !== "(") return null;
    const target = targetOf(this.text, close + 2);
    if (!target) return null;
    const url = this.restored(target.url);
    const inside = this.inside(bracket + 1, close);
    // An image would be fetched from another server, so it becomes a link.
    const shown = bracket > at ? ["image: ", ...inside] : inside;
    return { node: link(url, shown), end: target.end };
  }

  inside(from, to) {
    return new Spans(this.text.slice(from, to), this.atoms, this.depth + 1).nodes();
  }

  restored(text) {
    return text.replace(MARK, (_, number) => this.atoms[number].raw);
  }

  /** Output the text so far, with its marks replaced by their content. */
  flush() {
    let from = 0;
    for (const mark of this.plain.matchAll(MARK)) {
      if (mark.index > from) this.out.push(this.plain.slice(from, mark.index));
      this.out.push(this.atoms[mark[1]].node);
      from = mark.index + mark[0].length;
    }
    if (from < this.plain.length) this.out.push(this.plain.slice(from));
    this.plain = "";
  }
}

function link(url, shown) {
  const href = safeAddress(url);
  if (!href) return el("span", { class: "dead-link", title: url.slice(0, MAX_URL) }, shown);
  const safe = { target: "_blank", rel: "noopener noreferrer nofollow" };
  return el("a", { href, title: href, ...safe }, shown);
}

/** An address on another server that runs no script, or null. */
function safeAddress(url) {
  try {
    const parsed = new URL(url);
    return SCHEMES.includes(parsed.protocol) ? parsed.href : null;
  } catch {
    return null;
  }
}

function targetOf(text, from) {
  let depth = 0;
  for (let at = from; at < text.length && at < from + MAX_URL; at++) {
    const sign = text[at];
    if (sign === "(" && ++depth > DEEPEST) return null;
    if (sign === ")" && depth-- === 0) return { url: text.slice(from, at).trim(), end: at + 1 };
    if (/\s/.test(sign)) {
      const title = /^\s+(?:"[^"]{0,500}"|'[^']{0,500}')\s{0,9}\)/.exec(text.slice(at, at + 520));
      return title && { url: text.slice(from, at), end: at + title[0].length };
    }
  }
  return null;
}

function matchingBrackets(text) {
  const open = [], pairs = new Map();
  for (let at = 0; at < text.length; at++) {
    if (text[at] === "[") open.push(at);
    else if (text[at] === "]" && open.length) pairs.set(open.pop(), at);
  }
  return pairs;
}

function runOf(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end++;
  return end - at;
}

const isWord = sign => sign !== undefined && /[\p{L}\p{N}]/u.test(sign);
