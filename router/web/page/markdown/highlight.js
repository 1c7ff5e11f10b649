// Syntax highlighting of comments, strings, numbers, keywords and function names, for any language.
// Each pattern matches one token at the current position, in time linear in its length.

import { el } from "../dom.js";

const words = text => new Set(text.split(" "));

const C_WORDS = "if else for while do switch case default break continue return struct enum union " +
  "typedef static const void int char float double long short unsigned signed sizeof goto extern " +
  "class public private protected virtual template typename namespace using new delete this bool " +
  "true false nullptr NULL auto constexpr override operator try catch throw inline";
const JAVA_WORDS = "abstract assert boolean break byte case catch char class const continue default " +
  "do double else enum extends final finally float for if implements import instanceof int " +
  "interface long native new package private protected public record return short static super " +
  "switch synchronized this throw throws try var void volatile while true false null fun val when " +
  "object override data sealed string namespace using async await foreach in is readonly get set";
const SCRIPT_WORDS = "async await break case catch class const continue debugger default delete do " +
  "else export extends finally for from function if import in instanceof let new of return static " +
  "super switch this throw try typeof var void while yield true false null undefined interface type " +
  "enum implements private public protected readonly as declare namespace abstract";
const PYTHON_WORDS = "and as assert async await break class continue def del elif else except finally " +
  "for from global if import in is lambda match case nonlocal not or pass raise return try while " +
  "with yield True False None self";
const SHELL_WORDS = "if then else elif fi for in do done while until case esac function return " +
  "local export readonly set unset echo cd exit source sudo";
const RUST_WORDS = "as async await break const continue crate dyn else enum extern false fn for if " +
  "impl in let loop match mod move mut pub ref return self Self static struct super trait true type " +
  "unsafe use where while";
const GO_WORDS = "break case chan const continue default defer else fallthrough for func go goto if " +
  "import interface map package range return select struct switch type var true false nil string " +
  "int error bool byte";
const SQL_WORDS = "select from where and or not in is null as join left right inner outer full on " +
  "group by order having limit offset insert into values update set delete create table index view " +
  "drop alter add primary key foreign references unique default distinct union all case when then " +
  "else end exists between like with asc desc count sum avg min max";

const SLASHES = /\/\/[^\n]*|\/\*[^]*?(?:\*\/|$)/y;
const HASH = /#[^\n]*/y;
const STRING = /"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?/y;
const WITH_BACKTICKS = /"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?|`(?:[^`\\]|\\[^])*`?/y;
const PYTHON_STRING =
  /(?:"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)|"(?:[^"\\\n]|\\[^])*"?|'(?:[^'\\\n]|\\[^])*'?)/y;
const RUST_STRING = /"(?:[^"\\]|\\[^])*"?|'(?:[^'\\\n]|\\[^\n]{1,8})'/y;
const NUMBER = /(?:0[xX][\da-fA-F_]+|0[bB][01_]+|\d[\d_]*(?:\.\d[\d_]*)?(?:[eE][+-]?\d+)?)[a-zA-Z%]{0,3}/y;
const WORD = /[\p{L}_$@][\p{L}\p{N}_$]*/yu;
const CALL = /[ \t]{0,4}\(/y;

const language = (keywords, comment, string, more = {}) =>
  ({ keywords: words(keywords), comment, string, ...more });

const c = language(C_WORDS, SLASHES, STRING, { directive: /#[a-z]+/y });
const java = language(JAVA_WORDS, SLASHES, STRING);
const script = language(SCRIPT_WORDS, SLASHES, WITH_BACKTICKS);
const python = language(PYTHON_WORDS, HASH, PYTHON_STRING);
const shell = language(SHELL_WORDS, HASH, STRING);
const json = language("true false null", SLASHES, STRING);
const configuration = language("true false null yes no on off", HASH, STRING,
                               { key: /[\w.-]{1,80}(?=[ \t]{0,4}[:=])/y });
const markup = { comment: /<!--[^]*?(?:-->|$)/y, tags: /<\/?[a-zA-Z!?][\w:-]*|\/?>/y, string: STRING,
                 keywords: new Set() };
const styles = language("important", SLASHES, STRING, { key: /[\w-]{1,80}(?=[ \t]{0,4}:)/y });
const diff = { lines: { "+": "added", "-": "removed", "@": "keyword" } };

const LANGUAGES = {
  c, cpp: c, "c++": c, h: c, hpp: c, cuda: c, java, kotlin: java, kt: java, cs: java, csharp: java,
  "c#": java, swift: java, dart: java, php: java, scala: java, js: script, javascript: script,
  jsx: script, mjs: script, ts: script, typescript: script, tsx: script, py: python, python,
  python3: python, ipython: python, sh: shell, bash: shell, shell, zsh: shell, console: shell,
  dockerfile: shell, makefile: shell, rust: language(RUST_WORDS, SLASHES, RUST_STRING),
  go: language(GO_WORDS, SLASHES, WITH_BACKTICKS), json, jsonc: json, json5: json, jsonl: json,
  sql: { ...language(SQL_WORDS, /--[^\n]*|\/\*[^]*?(?:\*\/|$)/y, STRING), anyCase: true },
  yaml: configuration, yml: configuration, toml: configuration, ini: configuration, html: markup,
  xml: markup, svg: markup, css: styles, scss: styles, diff, patch: diff,
  ruby: language("def end class module if else elsif unless while do return nil true false self " +
                 "require puts yield begin rescue then", HASH, STRING),
};
LANGUAGES.rs = LANGUAGES.rust;
LANGUAGES.golang = LANGUAGES.go;
LANGUAGES.rb = LANGUAGES.ruby;

/** The nodes of a piece of code. */
export function highlighted(text, name) {
  const rules = Object.hasOwn(LANGUAGES, name) ? LANGUAGES[name] : null;
  if (!rules) return [text];
  return rules.lines ? byLine(text, rules.lines) : new Colours(text, rules).nodes();
}

function byLine(text, kinds) {
  return text.split(/(?<=\n)/).map(line =>
    Object.hasOwn(kinds, line[0]) ? el("span", { class: `hl-${kinds[line[0]]}` }, line) : line);
}

class Colours {
  constructor(text, rules) {
    this.text = text;
    this.rules = rules;
    this.out = [];
    this.plain = "";
  }

  nodes() {
    let at = 0;
    while (at < this.text.length) {
      const [kind, end] = this.token(at);
      const piece = this.text.slice(at, end);
      if (kind) this.put(kind, piece);
      else this.plain += piece;
      at = end;
    }
    if (this.plain) this.out.push(this.plain);
    return this.out;
  }

  put(kind, piece) {
    if (this.plain) this.out.push(this.plain);
    this.plain = "";
    this.out.push(el("span", { class: `hl-${kind}` }, piece));
  }

  token(at) {
    const { comment, directive, tags, key, string } = this.rules;
    for (const [kind, pattern] of [
      ["comment", comment], ["keyword", directive], ["keyword", tags], ["name", key],
      ["string", string],
    ]) {
      const end = pattern ? this.match(pattern, at) : 0;
      if (end) return [kind, end];
    }
    const word = this.match(WORD, at);
    if (word) return [this.kindOf(at, word), word];
    const number = this.match(NUMBER, at);
    return number ? ["number", number] : [null, at + 1];
  }

  kindOf(at, end) {
    const word = this.text.slice(at, end);
    const known = this.rules.anyCase ? word.toLowerCase() : word;
    if (this.rules.keywords.has(known)) return "keyword";
    if (word.length > 1 && "@$".includes(word[0])) return "name";
    return this.match(CALL, end) ? "name" : null;
  }

  match(pattern, at) {
    pattern.lastIndex = at;
    return pattern.test(this.text) ? pattern.lastIndex : 0;
  }
}
