// Streams to watch, and long prompts that may disturb them. Each is a request of this page.

import { el } from "../dom.js";
import { number, percent, seconds } from "../format.js";
import { ServerError, eventsOf, request } from "../server.js";
import { Series, Spark } from "./spark.js";

const WORDS = ("river stone window garden letter winter copper bridge morning harbour silver paper " +
  "forest candle market engine valley hammer island ribbon thunder meadow lantern compass").split(" ");
const MAX_SECONDS = 180;  // after which a stream ends
const STREAM_TOKENS = 2_000;  // tokens of an answer, before a stream starts the next
const MAX_STREAMS = 8;
const BEFORE_MS = 4_000;  // for a stream's speed before a prompt

export class Streams {
  /** `model` returns the chosen model: its id, and the length of its context. */
  constructor(model) {
    this.model = model;
    this.streams = [];
    this.prompts = [];
    this.list = el("ul", { class: "streams" });
    this.results = el("ul", { class: "results", "aria-live": "polite" });
  }

  get running() {
    return this.streams.some(stream => stream.running);
  }

  start(count) {
    this.stop();
    this.streams = Array.from({ length: Math.min(count, MAX_STREAMS) }, (_, i) =>
      new Stream(i + 1, this));
    this.list.replaceChildren(...this.streams.map(stream => stream.node));
    for (const stream of this.streams) stream.run();
  }

  stop() {
    for (const stream of this.streams) stream.end();
    for (const prompt of this.prompts) prompt.controller.abort();
  }

  async sendLong(tokens) {
    const prompt = new LongPrompt(tokens, this);
    this.prompts = [...this.prompts.slice(-4), prompt];
    this.results.prepend(prompt.node);
    while (this.results.children.length > 5) this.results.lastChild.remove();
    await prompt.run();
  }

  draw() {
    const bands = this.prompts.filter(prompt => prompt.begun)
      .map(prompt => [prompt.begun, prompt.first]);
    for (const stream of this.streams) stream.draw(bands);
    for (const prompt of this.prompts) prompt.show();
  }
}

/** An endless answer. */
class Stream {
  constructor(number, owner) {
    this.owner = owner;
    this.number = number;
    this.series = new Series();
    this.controller = new AbortController();
    this.running = true;
    this.lastAt = 0;
    this.gaps = [];  // [end, length] of the longest recent ones
    this.spark = new Spark(`Tokens a second of stream ${number}`);
    this.rate = el("b");
    this.note = el("span", { class: "note", title: "In the last 30 seconds" });
    this.node = el("li", {}, el("header", {}, el("span", {}, `Stream ${number}`), this.rate),
                   this.spark.node, this.note);
  }

  async run() {
    const until = performance.now() + MAX_SECONDS * 1000;
    try {
      while (this.running && performance.now() < until) await this.once();
    } catch (error) {
      if (error.name !== "AbortError") this.error = error.message;
    }
    this.end();
  }

  async once() {
    const { id, context } = this.owner.model();
    const max_tokens = Math.max(16, Math.min(STREAM_TOKENS, context - 200));
    const fields = { max_tokens, ignore_eos: true, temperature: 1,
                     stream_options: { include_usage: true, continuous_usage_stats: true } };
    const prompt = `Tell a long story about ${randomWords(6)}.`;
    let counted = 0;
    this.lastAt = 0;
    for await (const event of answerTo(prompt, id, fields, this.controller.signal)) {
      const tokens = event.usage?.completion_tokens ?? 0;
      if (tokens > counted) this.arrived(tokens - counted);
      counted = Math.max(counted, tokens);
    }
  }

  arrived(tokens) {
    const now = performance.now();
    this.series.add(tokens, now);
    if (this.lastAt) this.noteGap(now, now - this.lastAt);
    this.lastAt = now;
  }

  noteGap(now, gap) {
    this.gaps = this.gaps.filter(([end, length]) => now - end < 30_000 && length > gap);
    this.gaps.push([now, gap]);
  }

  /** The longest time without a token since a time, in milliseconds. */
  longestGap(since, now) {
    const open = this.running && this.lastAt ? now - this.lastAt : 0;
    return Math.max(open, ...this.gaps.filter(([end]) => end > since).map(([, gap]) => gap));
  }

  end() {
    this.running = false;
    this.controller.abort();
  }

  draw(bands) {
    const now = performance.now();
    if (!this.running && now - this.lastAt > 31_000) return;
    this.spark.draw(this.series, bands, now, 10);
    const rate = this.series.rate(now - 1_000, now);
    this.rate.textContent = this.running ? `${number(rate)} tokens/s` : "ended";
    const gap = this.longestGap(now - 30_000, now) / 1000;
    this.note.textContent = this.error ?? `longest gap ${seconds(gap, 2)}`;
  }
}

/** One long prompt, and its effect on the streams. */
class LongPrompt {
  constructor(tokens, owner) {
    this.tokens = tokens;
    this.owner = owner;
    this.controller = new AbortController();
    this.begun = this.first = 0;
    this.node = el("li", {}, "Writing a prompt…");
  }

  async run() {
    const { signal } = this.controller;
    try {
      const { id } = this.owner.model();
      const prompt = await textOf(this.tokens, id, signal);
      const fields = { max_tokens: 8, stream_options: { include_usage: true } };
      this.begun = performance.now();
      for await (const event of answerTo(prompt, id, fields, signal)) {
        const delta = event.choices[0]?.delta ?? {};
        if (delta.content || delta.reasoning) this.first ||= performance.now();
        if (event.usage) this.event = event;
      }
      this.first ||= performance.now();
      this.result = this.summary();
    } catch (error) {
      this.first ||= performance.now();
      this.result = error.name === "AbortError" ? "Stopped." : `Failed: ${error.message}`;
    }
    this.show();
  }

  show() {
    if (!this.begun || this.shown) return;
    this.shown = this.result;
    const elapsed = (performance.now() - this.begun) / 1000;
    this.node.textContent = this.result ?? `A prompt of about ${number(this.tokens)} tokens is ` +
      `being computed: ${seconds(elapsed, 1)}`;
  }

  summary() {
    const { usage, tandem } = this.event ?? {};
    const where = tandem?.prefill_nodes?.length ? `by ${tandem.prefill_nodes.join(", ")}` :
      "where it is decoded";
    const took = (this.first - this.begun) / 1000;
    return `${number(usage?.prompt_tokens ?? this.tokens)} tokens were computed ${where}; ` +
      `first token after ${seconds(took, 2)}. ${this.effect()}`;
  }

  /** The speed of the streams during the prompt, relative to their speed before. */
  effect() {
    const streams = this.owner.streams.filter(stream => stream.running);
    const sum = (from, to) => streams.reduce((all, { series }) => all + series.rate(from, to), 0);
    const before = sum(this.begun - BEFORE_MS, this.begun);
    if (!before) return "";
    const share = sum(this.begun, this.first) / before;
    const gap = Math.max(...streams.map(stream => stream.longestGap(this.begun, this.first)));
    return `The streams kept ${percent(share)} of their speed; their longest gap was ` +
      `${seconds(gap / 1000, 2)}.`;
  }
}

async function* answerTo(prompt, model, fields, signal) {
  const body = { messages: [{ role: "user", content: prompt }], model, stream: true, ...fields };
  yield* eventsOf(await request("v1/chat/completions", { body, signal }));
}

/** A text of about this many tokens that no node has in its cache. */
async function textOf(tokens, model, signal) {
  const sample = randomWords(400);
  let each = 1.3;  // tokens of a word
  try {
    const body = { prompt: sample, model };
    each = (await (await request("tokenize", { body, signal })).json()).count / 400;
  } catch (error) {
    if (!(error instanceof ServerError)) throw error;
  }
  return randomWords(Math.max(1, Math.floor(tokens / each)));
}

const randomWords = count =>
  Array.from({ length: count }, () => WORDS[Math.floor(Math.random() * WORDS.length)]).join(" ");
