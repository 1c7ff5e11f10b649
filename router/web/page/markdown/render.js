// Render Markdown as elements, and update only what has changed.

import { copyButton, el } from "../dom.js";
import { blocksOf } from "./blocks.js";
import { highlighted } from "./highlight.js";
import { inline } from "./inline.js";
import { mathsOf } from "./maths.js";

const DEEPEST = 12;
const MAX_TEXT = 400_000;
// Limit for highlighting code that still grows, which is repeated in each frame.
const MAX_OPEN_CODE = 8_000;
const MAX_CODE = 200_000;

/** An element that shows a growing text. */
export class MarkdownView {
  constructor() {
    this.node = el("div", { class: "markdown" });
    this.shown = [];  // the source of each child
  }

  show(text) {
    if (text.length > MAX_TEXT) {
      this.shown = [];
      this.node.replaceChildren(el("pre", { class: "long", tabindex: "0" }, text));
      return;
    }
    const blocks = blocksOf(text);
    if (!this.shown.length) this.node.replaceChildren();
    let same = 0;
    while (same < blocks.length && this.shown[same] === keyOf(blocks[same])) same++;
    while (this.node.childNodes.length > same) this.node.lastChild.remove();
    this.node.append(...blocks.slice(same).map(block => element(block, 0)));
    this.shown = blocks.map(keyOf);
  }
}

const keyOf = block => `${block.type}${block.open ? "+" : "-"}${block.raw}`;

function elements(text, depth) {
  if (depth >= DEEPEST) return [el("p", {}, text)];
  return blocksOf(text).map(block => element(block, depth));
}

function element(block, depth) {
  switch (block.type) {
    case "code": return codeBlock(block);
    case "maths": return el("div", { class: "maths", tabindex: "0" }, mathsOf(block.text, true));
    // The page has the h1.
    case "heading": return el(`h${Math.min(6, block.level + 1)}`, {}, inline(block.text));
    case "rule": return el("hr");
    case "quote": return el("blockquote", {}, elements(block.text, depth + 1));
    case "list": return list(block, depth);
    case "table": return table(block);
    default: return el("p", {}, inline(block.text));
  }
}

function codeBlock({ language, text, open }) {
  const plain = text.length > (open ? MAX_OPEN_CODE : MAX_CODE);
  const code = el("code", {}, plain ? text : highlighted(text, language));
  const head = el("figcaption", {}, el("span", {}, language || "text"),
                  copyButton("Copy code", () => text));
  const name = `Code, ${language || "text"}`;
  return el("figure", { class: "code" }, head,
            el("pre", { tabindex: "0", role: "region", "aria-label": name }, code));
}

function list({ ordered, start, items, loose }, depth) {
  const nodes = items.map(item => listItem(item, loose, depth));
  if (!ordered) return el("ul", {}, nodes);
  return el("ol", { start: start === 1 ? null : start }, nodes);
}

function listItem({ text, done }, loose, depth) {
  const inside = elements(text, depth + 1);
  const tight = !loose && inside[0]?.tagName === "P";
  const nodes = tight ? [...inside[0].childNodes, ...inside.slice(1)] : inside;
  if (done === null) return el("li", {}, nodes);
  const name = done ? "Done" : "Not done";
  const box = el("input", { type: "checkbox", disabled: true, checked: done, "aria-label": name });
  return el("li", { class: "task" }, box, " ", nodes);
}

function table({ head, aligns, rows }) {
  const cells = (kind, row) => aligns.map((align, i) =>
    el(kind, { class: `to-${align}`, scope: kind === "th" ? "col" : null }, inline(row[i] ?? "")));
  const body = rows.map(row => el("tr", {}, cells("td", row)));
  const about = { class: "table", tabindex: "0", role: "region", "aria-label": "Table" };
  return el("div", about, el("table", {}, el("thead", {}, el("tr", {}, cells("th", head))),
                             el("tbody", {}, body)));
}
