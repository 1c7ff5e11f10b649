// The cluster view, which polls the router twice a second while it is shown.

import { el } from "../dom.js";
import { number, seconds } from "../format.js";
import { LOST, request } from "../server.js";
import { NodeMap } from "./nodes.js";
import { Series, Spark } from "./spark.js";
import { Streams } from "./streams.js";

const PERIOD_MS = 500;
const PATIENCE_MS = 5_000;
const LENGTHS = [500, 1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 100_000];
// The initially selected prompt length: the longest that takes at most this many seconds, or
// this one, while no prefill node has reported its speed.
const USUAL = 8_000, UNKNOWN = 1_000, SECONDS = 5;
const SHOWN_PREFILLS = 8;

export class ClusterView {
  /** `model` returns the chosen model: its id, and the length of its context. */
  constructor(model) {
    this.model = model;
    this.shown = false;
    this.map = new NodeMap();
    this.generated = new Series();
    this.streams = new Streams(model);
    this.build();
  }

  build() {
    this.spark = new Spark("Tokens a second of this router");
    this.tiles = Object.fromEntries(["rate", "requests", "moved", "local"].map(name =>
      [name, el("b", {}, "–")]));
    this.problem = el("p", { class: "error", role: "alert", hidden: true });
    const tiles = el("div", { class: "tiles" },
      tile("tokens a second", this.tiles.rate, this.spark.node),
      tile("requests in progress", this.tiles.requests),
      tile("prompts prefilled apart", this.tiles.moved),
      tile("prefilled by decode nodes", this.tiles.local));
    this.recent = el("tbody");
    this.node = el("div", { class: "cluster" }, this.tools(), this.problem, tiles, this.map.node,
                   el("div", { class: "panels" }, this.streamPanel(), this.recentPanel()));
  }

  /** The buttons for trials. */
  tools() {
    this.length = el("select", { "aria-label": "Tokens of the long prompt",
                                 onchange: () => { this.picked = true; } });
    this.long = el("button", { type: "button", onclick: () =>
      this.streams.sendLong(Number(this.length.value)) }, "Send a long prompt");
    this.toggle = el("button", { type: "button", class: "quiet", onclick: () => this.onToggle() },
                     "Start 3 streams");
    const about = "Start a few streams, then send a long prompt: a prefill node computes it, its KV " +
      "moves along the line, and the streams go on.";
    return el("div", { class: "try" }, el("p", { class: "note" }, about),
              el("div", { class: "controls" }, this.toggle, this.long, this.length));
  }

  streamPanel() {
    this.hint = el("p", { class: "note" }, "None of this page runs. A long prompt is marked in " +
      "their lines, from when it was sent to its first token.");
    return el("section", { class: "panel", "aria-labelledby": "streams" },
              el("h2", { id: "streams" }, "Streams"), this.hint, this.streams.list,
              this.streams.results);
  }

  recentPanel() {
    const names = ["Prompt", "From", "To", "Time", "State"];
    const head = el("thead", {}, el("tr", {}, names.map(name => el("th", { scope: "col" }, name))));
    return el("section", { class: "panel", "aria-labelledby": "recent" },
              el("h2", { id: "recent" }, "Prompts that moved"),
              el("div", { class: "table", tabindex: "0", role: "region",
                          "aria-label": "Table of prompts" }, el("table", {}, head, this.recent)));
  }

  /** Start or stop polling. */
  show(shown) {
    if (shown === this.shown) return;
    this.shown = shown;
    if (!shown) {
      this.streams.stop();
      return;
    }
    this.showLengths();
    this.poll();
    this.drawing = setInterval(() => this.draw(), 250);
  }

  showLengths() {
    const { context } = this.model();
    const fitting = LENGTHS.filter(length => length <= context - 300);
    const lengths = fitting.length ? fitting : [Math.max(1, Math.floor(context / 2))];
    this.length.hidden = !context;  // the model is unknown so far
    const rate = this.prefillRate();
    const labels = lengths.map(length => `${number(length)} tokens${duration(length, rate)}`);
    const shown = document.activeElement === this.length && this.length.options.length;
    if (shown || this.length.dataset.labels === String(labels)) return;
    const before = Number(this.length.value);
    const most = rate ? Math.min(USUAL, rate * SECONDS) : UNKNOWN;
    const first = lengths.findLast(each => each <= most) ?? lengths[0];
    const chosen = this.picked && lengths.includes(before) ? before : first;
    this.length.dataset.labels = labels;
    this.length.replaceChildren(...lengths.map((length, i) =>
      el("option", { value: length, selected: length === chosen }, labels[i])));
  }

  /** Tokens per second of the fastest prefill node; 0 if unknown. */
  prefillRate() {
    const nodes = this.state?.nodes.filter(node => node.role === "prefill") ?? [];
    return Math.max(0, ...nodes.map(node => node.prefill_tokens_per_second));
  }

  async poll() {
    while (this.shown) {
      if (!document.hidden) await this.refresh();
      await new Promise(resolve => setTimeout(resolve, PERIOD_MS));
    }
  }

  async refresh() {
    try {
      const signal = AbortSignal.timeout(PATIENCE_MS);
      this.take(await (await request("cluster/state", { signal })).json());
      this.showAway("");
    } catch (error) {
      this.showAway(error.message === LOST || !error.status ? "The server does not respond." :
        error.message);
    }
  }

  /** Show why there is no data, and grey out the last state; an empty text undoes that. */
  showAway(why) {
    this.node.classList.toggle("away", !!why);
    this.problem.hidden = !why;
    if (!why) return;
    const old = this.at ? `This state is ${seconds((performance.now() - this.at) / 1000)} old. ` : "";
    this.problem.textContent = `${why} ${old}Trying again.`;
  }

  take(state) {
    const { state: before, at: since } = this;
    [this.state, this.at] = [state, performance.now()];
    if (before) {
      const tokens = Math.max(0, state.generated_tokens - before.generated_tokens);
      this.generated.spread(tokens, since, this.at);
    }
    this.showLengths();
    this.map.show(state);
    const { moved, moved_tokens, local } = state.totals;
    this.tiles.requests.textContent = number(state.requests);
    this.tiles.moved.textContent = `${number(moved)} · ${number(moved_tokens)} tokens`;
    this.tiles.local.textContent = number(local);
    const left = state.prefills_left_out;
    const rows = state.prefills.slice(0, SHOWN_PREFILLS)
      .map(each => prefillRow(each, this.map.short));
    if (left) rows.push(wideRow(`${number(left)} more are moving.`));
    if (!rows.length) rows.push(wideRow("None in the last minute."));
    this.recent.replaceChildren(...rows);
  }

  draw() {
    if (!this.shown) clearInterval(this.drawing);
    const { at = performance.now() } = this;
    this.spark.draw(this.generated, [], at, 10);
    this.tiles.rate.textContent = number(this.generated.rate(at - 2_000, at));
    this.hint.hidden = this.streams.streams.length > 0;
    this.toggle.textContent = this.streams.running ? "Stop the streams" : "Start 3 streams";
    this.streams.draw();
  }

  onToggle() {
    if (this.streams.running) this.streams.stop();
    else this.streams.start(3);
    this.draw();
  }
}

function tile(name, value, more) {
  return el("div", { class: "tile" }, value, el("span", {}, name), more);
}

const wideRow = text => el("tr", {}, el("td", { colspan: 5 }, text));

function prefillRow(each, short) {
  const running = each.ended_seconds_ago === null;
  const state = running ? "moving" : each.failed ? "failed" : ago(each.ended_seconds_ago);
  return el("tr", { class: running ? "moving" : null, title: phasesOf(each.phases) },
            el("td", {}, `${number(each.tokens)} tokens`), el("td", {}, short(each.prefill_node)),
            el("td", {}, short(each.decode_node)), el("td", {}, seconds(each.seconds, 2)),
            el("td", {}, state));
}

const ago = age => (age < 1 ? "just now" : `${seconds(age)} ago`);

function phasesOf(phases) {
  return Object.entries(phases).map(([name, took]) => `${name} ${seconds(took, 3)}`).join(", ") || null;
}

/** How long a prompt takes, as text for an option; empty if the rate is unknown. */
function duration(tokens, rate) {
  if (!rate) return "";
  const rough = Number((tokens / rate).toPrecision(1));
  return rough < 1 ? ", under 1 s" : `, about ${seconds(rough)}`;
}
