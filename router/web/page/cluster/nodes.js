// The nodes as cards, with lines for KV transfers between them.

import { el, fill, svg } from "../dom.js";
import { number, percent, seconds } from "../format.js";

// Every pair of nodes has a line, up to this number.
const MAX_IDLE_LINES = 64;
// How long a finished transfer stays visible.
const LINGER_SECONDS = 2;
// With more cards than this, details are hidden.
const MAX_FULL_CARDS = 6;
// With more labels than this, which would cover the lines, one label has the sums.
const MAX_LABELS = 6;
const ROLES = { prefill: "Prefill nodes", decode: "Decode nodes" };

export class NodeMap {
  constructor() {
    this.lines = svg("svg", { class: "lines", "aria-hidden": "true" });
    this.labels = el("div", { class: "labels", "aria-hidden": "true" });
    this.columns = Object.fromEntries(Object.keys(ROLES).map(role => [role, new Column(role)]));
    const { prefill, decode } = this.columns;
    this.node = el("div", { class: "map" }, this.lines, prefill.node, decode.node, this.labels);
    this.flows = [];
    this.short = name => name;  // a node's name without the common domain
    new ResizeObserver(() => this.draw()).observe(this.node);
  }

  show(state) {
    this.flows = flowsOf(state.prefills);
    const domain = sharedDomain(state.nodes.map(node => node.node_id));
    this.short = name => (name.endsWith(domain) ? name.slice(0, name.length - domain.length) : name);
    const moving = new Set(this.flows.filter(flow => flow.prompts)
      .flatMap(flow => [flow.from, flow.to]));
    for (const [role, column] of Object.entries(this.columns)) {
      column.show(state.nodes.filter(node => node.role === role),
                  state.others.find(other => other.role === role),
                  state.missing.filter(node => node.role === role), moving, this.short);
    }
    this.draw();
  }

  draw() {
    const frame = this.node.getBoundingClientRect();
    if (!frame.width) return;
    this.lines.setAttribute("viewBox", `0 0 ${frame.width} ${frame.height}`);
    const [left, right] = ["prefill", "decode"].map(role => this.columns[role].cards);
    const idle = left.size * right.size <= MAX_IDLE_LINES ?
      [...left.keys()].flatMap(from => [...right.keys()].map(to => ({ from, to }))) : [];
    const paths = idle.map(link => this.path(link, "idle", frame));
    const drawn = this.flows
      .map(flow => ({ flow, path: this.path(flow, flow.prompts ? "moving" : "moved", frame) }))
      .filter(({ path }) => path);
    paths.push(...drawn.map(({ path }) => path));
    this.lines.replaceChildren(...paths.filter(Boolean).map(path => path.node));
    this.labels.replaceChildren(...(drawn.length > MAX_LABELS ?
      [summary(this.flows, [frame.width / 2, frame.height / 2])] :
      drawn.map(({ flow, path }) => label(flow, path.middle))));
  }

  path({ from, to }, kind, frame) {
    const [start, end] = [this.columns.prefill.cards.get(from), this.columns.decode.cards.get(to)];
    if (!start || !end) return null;
    const [a, b] = [start, end].map(card => card.node.getBoundingClientRect());
    const { d, middle } = curve(a, b, frame);
    return { node: svg("path", { d, class: kind }), middle };
  }
}

/** A curve between two cards, relative to `frame`. */
function curve(a, b, frame) {
  const beside = b.left > a.right;
  const [x1, y1] = beside ? [a.right, (a.top + a.bottom) / 2] : [(a.left + a.right) / 2, a.bottom];
  const [x2, y2] = beside ? [b.left, (b.top + b.bottom) / 2] : [(b.left + b.right) / 2, b.top];
  const [bendX, bendY] = beside ? [(x2 - x1) / 2, 0] : [0, (y2 - y1) / 2];
  const within = (x, y) => [x - frame.left, y - frame.top];
  const d = `M${within(x1, y1)}C${within(x1 + bendX, y1 + bendY)} ` +
    `${within(x2 - bendX, y2 - bendY)} ${within(x2, y2)}`;
  return { d, middle: within((x1 + x2) / 2, (y1 + y2) / 2) };
}

/** Prompts by the pair of nodes between which they move. */
function flowsOf(prefills) {
  const flows = new Map();
  for (const each of prefills) {
    const running = each.ended_seconds_ago === null;
    if (!running && (each.ended_seconds_ago > LINGER_SECONDS || each.failed)) continue;
    const key = JSON.stringify([each.prefill_node, each.decode_node]);
    if (!flows.has(key)) {
      flows.set(key, { from: each.prefill_node, to: each.decode_node, prompts: 0, tokens: 0,
                       elapsed: 0, done: 0 });
    }
    const flow = flows.get(key);
    if (running) {
      flow.prompts++;
      flow.tokens += each.tokens;
      flow.elapsed = Math.max(flow.elapsed, each.seconds);
    } else {
      flow.done += each.moved_tokens;
      flow.took = each.seconds;
    }
  }
  return [...flows.values()];
}

function label({ from, to, prompts, tokens, elapsed, done, took }, place) {
  const text = prompts ? moving(prompts, tokens, elapsed) :
    `${number(done)} tokens in ${seconds(took, 1)}`;
  const pair = el("span", { class: "pair" }, `${from} → ${to}: `);
  return placed(el("span", { class: prompts ? "flow" : "flow over" }, pair, text), place);
}

/** One label for all lines, including those of hidden nodes. */
function summary(flows, place) {
  const sum = name => flows.reduce((all, flow) => all + flow[name], 0);
  const longest = Math.max(...flows.map(flow => flow.elapsed));
  const text = sum("prompts") ? moving(sum("prompts"), sum("tokens"), longest) :
    `${number(sum("done"))} tokens have moved`;
  return placed(el("span", { class: "flow" }, text), place);
}

function moving(prompts, tokens, elapsed) {
  const count = prompts > 1 ? `${prompts} prompts, ` : "";
  return `${count}${number(tokens)} tokens · ${seconds(elapsed, 1)}`;
}

function placed(element, [x, y]) {
  element.style.left = `${x}px`;
  element.style.top = `${y}px`;
  return element;
}

/** The domain that all names share, or an empty text. */
function sharedDomain(names) {
  if (names.length < 2) return "";
  let shared = names[0];
  for (const name of names) while (!name.endsWith(shared)) shared = shared.slice(1);
  const [domain] = /\.[a-z].*$/i.exec(shared) ?? [""];
  return names.includes(domain) ? "" : domain;
}

/** The nodes of one role. */
class Column {
  constructor(role) {
    this.role = role;
    this.cards = new Map();
    this.list = el("ul");
    this.rest = el("p", { class: "note" });
    this.title = el("h2", {}, ROLES[role]);
    this.node = el("section", { class: `column ${role}`, "aria-label": ROLES[role] }, this.title,
                   this.list, this.rest);
  }

  show(nodes, others, missing, moving, short) {
    const names = new Set(nodes.map(node => node.node_id));
    for (const name of this.cards.keys()) if (!names.has(name)) this.cards.delete(name);
    for (const node of nodes) {
      if (!this.cards.has(node.node_id)) this.cards.set(node.node_id, new Card());
      this.cards.get(node.node_id).show(node, moving.has(node.node_id), short);
    }
    fill(this.list, nodes.map(node => this.cards.get(node.node_id).node));
    this.node.classList.toggle("dense", nodes.length > MAX_FULL_CARDS);
    this.title.textContent = `${ROLES[this.role]} (${nodes.length + (others?.nodes ?? 0)})`;
    this.rest.replaceChildren(...this.remarks(nodes, others, missing, short));
  }

  remarks(nodes, others, missing, short) {
    const lines = [];
    if (others) lines.push(`${number(others.nodes)} more are left out: ${sumOf(others)}`);
    if (!nodes.length) lines.push(NONE[this.role]);
    for (const { node_id, state, reason, seconds_ago, returned } of missing) {
      const ago = `${seconds(seconds_ago)} ago${returned ? ", and back" : ""}`;
      lines.push(`${short(node_id)}: ${state} ${ago}: ${reason}`);
    }
    return lines.map(line => el("span", {}, line));
  }
}

const NONE = {
  prefill: "None: prompts are computed where they are decoded.",
  decode: "None has joined yet.",
};

function sumOf({ states, running, waiting, queued_prefill_tokens, kv_used }) {
  const words = Object.entries(states).map(([state, count]) => `${count} ${state}`);
  return `${words.join(", ")}; ${number(running)} running, ${number(waiting)} waiting, ` +
    `${number(queued_prefill_tokens)} tokens queued, KV ${percent(kv_used)} in use.`;
}

class Card {
  constructor() {
    this.name = el("b");
    this.state = el("span", { class: "state" });
    this.used = el("i", { class: "used" });
    this.cached = el("i", { class: "cached" });
    this.meter = el("div", { class: "meter", role: "meter", "aria-valuemin": 0, "aria-valuemax": 100 },
                    this.used, this.cached);
    this.kv = el("span");
    this.load = el("span");
    this.node = el("li", { class: "card" }, el("header", {}, this.name, this.state),
                   this.meter, el("p", {}, this.kv), el("p", {}, this.load));
  }

  show(node, moving, short) {
    const name = node.node_id;
    this.name.textContent = short(name);
    this.meter.setAttribute("aria-label", `KV in use on ${name}`);
    this.node.classList.toggle("moving", moving);
    this.state.className = `state ${node.state}`;
    this.state.textContent = node.state;
    this.used.style.width = percent(node.kv_used);
    this.cached.style.width = percent(node.kv_cached);
    this.meter.setAttribute("aria-valuenow", Math.round(node.kv_used * 100));
    const cached = node.kv_cached >= 0.005 ? more(`, ${percent(node.kv_cached)} cached`) : "";
    const kv = node.kv_tokens ? [`KV ${percent(node.kv_used)} in use`, cached,
                                 ` of ${number(node.kv_tokens)}`, more(" tokens")] :
      ["KV not reported yet"];
    this.kv.replaceChildren(...kv);
    this.node.title = `${name}: heard of ${seconds(node.heartbeat_age_seconds, 1)} ago` +
      (node.version ? `, version ${node.version}` : "");
    this.load.replaceChildren(...(node.role === "prefill" ? prefillLoad(node) : decodeLoad(node)));
  }
}

function prefillLoad(node) {
  const rate = node.prefill_tokens_per_second;
  return [`${number(node.queued_prefill_tokens)} tokens to compute`,
          rate ? more(`, at ${number(rate)} a second`) : ""];
}

function decodeLoad(node) {
  const receiving = node.transfers ? `, ${node.transfers} receiving KV` : "";
  return [`${node.running} running, ${node.waiting} waiting${receiving}`];
}

/** Text that small screens hide. */
const more = text => el("span", { class: "more" }, text);
