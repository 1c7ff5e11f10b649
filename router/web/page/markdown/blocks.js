// The blocks of a text in Markdown: paragraphs, headings, lists, tables, quotes, code, mathematics.
// The time is linear in the number of lines, whatever a model writes.

const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]|$)/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(?:( +)|$)/;
const MATHS = [["$$", "$$"], ["\\[", "\\]"]];

/** The blocks of `text` in order; `raw` is the source of each, to detect unchanged ones. */
export function blocksOf(text) {
  return new Blocks(text.replace(/\r\n?/g, "\n").split("\n")).all();
}

class Blocks {
  constructor(lines) {
    this.lines = lines;
    this.at = 0;
    this.unclosed = new Set();  // fences of mathematics that have no end below
  }

  all() {
    const blocks = [];
    while (this.at < this.lines.length) {
      if (isBlank(this.lines[this.at])) {
        this.at++;
        continue;
      }
      const from = this.at;
      const block = this.next();
      block.raw = this.lines.slice(from, this.at).join("\n");
      blocks.push(block);
    }
    return blocks;
  }

  next() {
    const line = this.lines[this.at];
    return this.fence(line) ?? this.maths(line) ?? this.heading(line) ?? this.rule(line) ??
      this.quote(line) ?? this.list(line) ?? this.table(line) ?? this.paragraph();
  }

  fence(line) {
    const [, mark, info] = FENCE.exec(line) ?? [];
    if (!mark || (mark[0] === "`" && info.includes("`"))) return null;
    const indent = line.length - line.trimStart().length;
    const end = new RegExp(`^ {0,3}${mark[0]}{${mark.length},}[ \t]*$`);
    const code = [];
    for (this.at++; this.at < this.lines.length; this.at++) {
      if (end.test(this.lines[this.at])) {
        this.at++;
        return { type: "code", language: languageOf(info), text: code.join("\n"), open: false };
      }
      code.push(unindented(this.lines[this.at], indent));
    }
    return { type: "code", language: languageOf(info), text: code.join("\n"), open: true };
  }

  maths(line) {
    const start = line.trimStart();
    const [opens, closes] = MATHS.find(([opening]) => start.startsWith(opening)) ?? [];
    if (!opens || this.unclosed.has(opens)) return null;
    const parts = [];
    for (let at = this.at; at < this.lines.length; at++) {
      const part = at === this.at ? start.slice(opens.length) : this.lines[at];
      const end = part.trimEnd();
      if (end.endsWith(closes)) {
        this.at = at + 1;
        parts.push(end.slice(0, -closes.length));
        return { type: "maths", text: parts.join("\n") };
      }
      // Mathematics followed by text on the same line is a paragraph.
      if (at === this.at && part.includes(closes)) return null;
      parts.push(part);
    }
    this.unclosed.add(opens);
    return null;
  }

  heading(line) {
    const [, marks] = HEADING.exec(line) ?? [];
    if (!marks) return null;
    this.at++;
    let text = line.trim().slice(marks.length).trim();
    const closing = /(^|[ \t])#+$/.exec(text.slice(-20));
    if (closing) text = text.slice(0, text.length - closing[0].length).trimEnd();
    return { type: "heading", level: marks.length, text };
  }

  rule(line) {
    if (!RULE.test(line)) return null;
    this.at++;
    return { type: "rule" };
  }

  quote(line) {
    if (!QUOTE.test(line)) return null;
    const inside = [];
    while (this.at < this.lines.length && QUOTE.test(this.lines[this.at])) {
      inside.push(this.lines[this.at++].replace(QUOTE, ""));
    }
    return { type: "quote", text: inside.join("\n") };
  }

  list(line) {
    const first = ITEM.exec(line);
    if (!first) return null;
    const ordered = first[2].length > 1;
    const list = { type: "list", ordered, start: ordered ? parseInt(first[2]) : 1, items: [] };
    let depth = first[1].length, body = null, width = 0, loose = false, blank = false;
    for (; this.at < this.lines.length; this.at++) {
      const here = this.lines[this.at];
      if (isBlank(here)) {
        blank = true;
        body.push("");
        continue;
      }
      const item = ITEM.exec(here);
      const indent = here.length - here.trimStart().length;
      if (item && indent < Math.max(width, depth + 1) && !RULE.test(here)) {
        if (indent + 1 < depth || (item[2].length > 1) !== ordered) break;
        depth = indent;
        loose ||= blank && body !== null;
        width = item[0].length - Math.max(0, (item[3] ?? "").length - 4);
        list.items.push((body = [here.slice(item[0].length)]));
      } else if (indent >= width) {
        body.push(unindented(here, width));
      } else if (blank || this.startsBlock(here, this.at)) {
        break;
      } else {
        body.push(here.trimStart());
      }
      blank = false;
    }
    list.loose = loose;
    list.items = list.items.map(asItem);
    return list;
  }

  table(line) {
    if (!this.startsTable(line, this.at)) return null;
    const aligns = cellsOf(this.lines[this.at + 1]).map(alignment);
    const rows = [];
    for (this.at += 2; this.at < this.lines.length; this.at++) {
      const row = this.lines[this.at];
      if (isBlank(row) || !row.includes("|")) break;
      rows.push(cellsOf(row));
    }
    return { type: "table", head: cellsOf(line), aligns, rows };
  }

  paragraph() {
    const lines = [this.lines[this.at++].trimStart()];
    while (this.at < this.lines.length) {
      const line = this.lines[this.at];
      if (isBlank(line) || this.startsBlock(line, this.at)) break;
      lines.push(line.trimStart());
      this.at++;
    }
    return { type: "paragraph", text: lines.join("\n") };
  }

  startsBlock(line, at) {
    return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) ||
      startsItem(line) || this.startsMaths(line) || this.startsTable(line, at);
  }

  startsMaths(line) {
    const start = line.trimStart();
    return MATHS.some(([opens]) => start.startsWith(opens) && !this.unclosed.has(opens));
  }

  startsTable(line, at) {
    const under = this.lines[at + 1] ?? "";
    if (!line.includes("|") || !under.includes("-") || /[^|:\- \t]/.test(under)) return false;
    const marks = cellsOf(under);
    return marks.every(mark => /^:?-+:?$/.test(mark)) && marks.length === cellsOf(line).length;
  }
}

/** Only a list that begins with a bullet or with 1 interrupts a paragraph. */
function startsItem(line) {
  const item = ITEM.exec(line);
  return Boolean(item && item[3] && (item[2].length === 1 || parseInt(item[2]) === 1));
}

function asItem(lines) {
  const [, box] = /^\[([ xX])\] /.exec(lines[0]) ?? [];
  const done = box === undefined ? null : box !== " ";
  if (box !== undefined) lines = [lines[0].slice(4), ...lines.slice(1)];
  return { text: lines.join("\n").trimEnd(), done };
}

function cellsOf(line) {
  let row = line.trim();
  if (row.startsWith("|")) row = row.slice(1);
  if (row.endsWith("|") && !row.endsWith("\\|")) row = row.slice(0, -1);
  const cells = [""];
  for (let i = 0, code = false; i < row.length; i++) {
    if (row[i] === "\\" && row[i + 1] === "|") cells[cells.length - 1] += row[++i];
    else if (row[i] === "|" && !code) cells.push("");
    else {
      if (row[i] === "`") code = !code && row.indexOf("`", i + 1) > 0;
      cells[cells.length - 1] += row[i];
    }
  }
  return cells.map(cell => cell.trim());
}

function alignment(mark) {
  const left = mark.startsWith(":"), right = mark.endsWith(":");
  return left && right ? "center" : right ? "right" : "left";
}

const isBlank = line => line.trim() === "";
const languageOf = info => info.trim().split(/[\s{,]/, 1)[0].toLowerCase().slice(0, 20);

function unindented(line, width) {
  let cut = 0;
  while (cut < width && line[cut] === " ") cut++;
  return line.slice(cut);
}
