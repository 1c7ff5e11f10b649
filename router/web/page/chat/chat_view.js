// The chat view: shows a conversation, sends messages and streams answers.

import { announce, el, fill, iconButton } from "../dom.js";
import { ServerError } from "../server.js";
import { Answers, MAX_ANSWERS, tellEnd } from "./answers.js";
import { bodyOf, canContinue, continuationOf, stream } from "./answer.js";
import { Composer } from "./composer.js";
import { add, become, newChat, path, siblings, titleOf } from "./conversation.js";
import { MessageView } from "./message_view.js";
import { defaults, showSettings } from "./settings.js";
import { shorten } from "./shorten.js";

const SAVE_EVERY = 2_000;
// Messages to show at first; more are added when the log is scrolled near to its top.
const SHOWN = 50, NEAR = 200;
const ANNOUNCED = 600;  // characters of an answer for screen readers

export class ChatView {
  /** `changed` is called when a chat is shown, saved, or has a new answer; `model` returns the selected
   * model: its id, and the defaults of its parameters. */
  constructor(store, model, changed) {
    this.store = store;
    this.model = model;
    this.changed = changed;
    this.views = new Map();
    this.answers = new Answers((...answer) => this.followAnswer(...answer));
    store.whenChanged(id => this.followChat(id));
    this.unseen = new Set();  // ids of chats with an answer that ended while another was shown
    this.composer = new Composer(this);
    this.build();
    this.start(null);
  }

  build() {
    this.log = el("section", { class: "log", "aria-label": "Messages", tabindex: "-1" });
    this.scroller = el("div", { class: "scroller", onscroll: () => this.noteScroll() }, this.log);
    this.latest = iconButton("down", "Go to the latest message", () => this.follow(true),
                             { class: "icon-button latest", hidden: true });
    this.welcome = welcomeText();
    this.shortened = el("p", { class: "note shortened" },
                        "The model does not see the messages above: they do not fit the context.");
    this.earlier = el("button", { class: "quiet earlier", type: "button",
                                  onclick: () => this.showEarlier() });
    this.node = el("div", { class: "chat" }, this.scroller,
                   el("div", { class: "foot" }, this.latest, this.composer.nodes));
  }

  /** Show a saved chat, or begin a new one. Answers in the previous one continue. */
  async open(id) {
    const saved = id === null ? null : this.answers.chat(id) ?? await this.store.get(id);
    this.start(saved ?? null);
    this.composer.field.focus();
  }

  start(chat) {
    const { sampling, system } = defaults();
    if (this.chat) this.composer.keepDraft(this.draftName);
    this.chat = chat ?? newChat(sampling, system);
    this.answers.update(this.chat);
    this.composer.showDraft(this.draftName);
    this.unseen.delete(this.chat.id);
    this.views.clear();
    this.from = Infinity;
    this.show();
    this.follow(true);
    this.changed();
  }

  /** Chats without a message share one draft. */
  get draftName() {
    return Object.keys(this.chat.messages).length ? this.chat.id : "";
  }

  /** The chat with this id if the page has it loaded, otherwise undefined. */
  live(id) {
    return this.chat.id === id ? this.chat : this.answers.chat(id);
  }

  /** Close a deleted chat. */
  forget(id) {
    this.answers.drop(id);
    this.unseen.delete(id);
    this.composer.drafts.delete(id);
  }

  /** Show the chosen path in the log. */
  show() {
    const all = path(this.chat);
    this.from = Math.max(0, Math.min(this.from, all.length - SHOWN));
    const views = all.slice(this.from).map(message => this.viewOf(message));
    views.forEach((view, i) => (view.last = i === views.length - 1));
    this.earlier.hidden = !this.from;
    this.earlier.textContent = `Show the ${this.from} messages before`;
    const nodes = views.flatMap(({ message, node }) =>
      (message.id === this.chat.begins ? [this.shortened, node] : [node]));
    fill(this.log, [this.earlier, ...(views.length ? nodes : [this.welcome])]);
    this.showRunning();
  }

  /** Show more of a long chat, without moving the log. */
  showEarlier() {
    const { scroller } = this;
    const below = scroller.scrollHeight - scroller.scrollTop;
    this.from = Math.max(0, this.from - SHOWN);
    this.show();
    scroller.scrollTop = scroller.scrollHeight - below;
  }

  viewOf(message) {
    if (!this.views.has(message.id)) this.views.set(message.id, new MessageView(message, this));
    const view = this.views.get(message.id);
    view.state = this.answers.where(message);
    return view;
  }

  settings() {
    showSettings(this.chat, this.model().defaults, () => this.keep());
  }

  async keep(chat = this.chat) {
    if (!Object.keys(chat.messages).length) return;
    await this.save(chat);
    this.changed();
  }

  async save(chat) {
    try {
      if (!await this.store.put(chat)) this.chatDeleted(chat.id);
    } catch (error) {
      this.warn(`The chat could not be saved: ${error.message}`);
    }
  }

  warn(text) {
    this.composer.warn(text);
  }

  /** Another tab has saved or deleted a chat. */
  async followChat(id) {
    this.changed();
    const chat = this.live(id);
    if (!chat) return;
    if (!await this.store.refresh(chat)) return this.chatDeleted(id);
    if (chat !== this.chat) return;
    this.answers.update(chat);
    for (const view of this.views.values()) view.refresh();
    this.show();
    this.follow(false);
  }

  chatDeleted(id) {
    this.forget(id);
    if (this.chat.id === id) {
      this.start(null);
      this.warn("This chat was deleted in another tab.");
    }
    this.changed();
  }

  /** An answer of another tab has begun, grown or ended. */
  async followAnswer(chatId, message, begins) {
    const chat = this.live(chatId), ours = chat?.messages[message.id];
    const state = this.answers.where(message);
    if (ours) become(ours, message);
    // Its tab was closed, and may not have saved its last report.
    if (ours && !state && message.ended === "interrupted") await this.save(chat);
    const view = this.views.get(message.id);
    if (view) {
      view.state = state;
      view.refresh();
      this.follow(false);
    }
    if (state && !begins) return;
    this.showRunning();
    this.changed();
  }

  send() {
    const { text, files, editing } = this.composer;
    if (!(text || files.length) || this.busy || !this.mayAsk()) return;
    const parent = editing ? editing.parent : this.decided(path(this.chat).at(-1));
    this.composer.drafts.delete(this.draftName);
    const fields = files.length ? { files } : {};
    const message = add(this.chat, parent, { role: "user", text, ...fields });
    this.composer.endEdit();
    this.composer.set("");
    this.answer(message.id);
  }

  /** False, with a warning, if the maximum number of answers is in progress. */
  mayAsk() {
    this.warn("");
    if (this.answers.count < MAX_ANSWERS) return true;
    this.warn(`${MAX_ANSWERS} answers are being streamed. Stop one, or wait for one to end.`);
    return false;
  }

  /** Generate an answer below a message: a new version, or the failed `message` again. */
  answer(parent, message = add(this.chat, parent, { role: "assistant" })) {
    return this.generate(message, bodyOf);
  }

  /** Continue an answer. */
  goOn(message) {
    if (!this.mayAsk()) return;
    delete message.error;
    this.generate(message, continuationOf);
  }

  /** Stream an answer; `bodyOf` builds the request. */
  async generate(message, bodyOf) {
    const { chat } = this;
    message.model = this.model().id;
    message.ended = "interrupted";  // the state to restore if the page is closed
    const answer = this.answers.begin(chat, message);
    chat.model = message.model;
    this.refreshVersions(message);
    this.show();
    this.follow(true);
    this.keep().then(() => this.answers.where(message) && this.answers.report(answer));
    try {
      const body = bodyOf(chat, message, message.model);
      await stream(message, body, answer.controller.signal, () => this.arrived(answer));
    } catch (error) {
      this.failed(message, error);
    }
    await this.ended(answer);
  }

  arrived(answer) {
    if (answer.chat === this.chat) {
      this.views.get(answer.message.id)?.refresh();
      this.follow(false);
    }
    this.answers.report(answer);
    if (performance.now() - answer.savedAt > SAVE_EVERY && !answer.dropped) {
      answer.savedAt = performance.now();
      this.save(answer.chat);
    }
  }

  failed(message, error) {
    if (error.name === "AbortError") {
      message.ended = "stopped";
      return;
    }
    const { status = 500, code, retryAfter } = error;
    if (!(error instanceof ServerError)) console.error(error);
    delete message.ended;
    message.error = { message: error.message, status, code };
    if (retryAfter) message.error.until = Date.now() + retryAfter * 1000;
  }

  async ended(answer) {
    const { chat, message, dropped } = answer;
    this.answers.end(answer);
    this.warn("");
    if (!dropped) {
      message.revised = Date.now();
      if (chat === this.chat) this.showEnded(message);
      else this.noteUnseen(chat);
      await this.keep(chat);
    }
    tellEnd(answer);
  }

  showEnded(message) {
    const view = this.views.get(message.id);
    if (view) view.state = "";
    this.follow(false);
    this.showRunning();
    const { text, error } = message;
    announce(error ? `Failed: ${error.message}` : `Answer: ${text.slice(0, ANNOUNCED)}`);
  }

  noteUnseen(chat) {
    this.unseen.add(chat.id);
    announce(`The answer in “${titleOf(chat)}” has ended.`);
  }

  /** The answer in progress on the shown path, or undefined. */
  get running() {
    return path(this.chat).findLast(message => this.answers.where(message));
  }

  /** True if a new message has to wait for an answer. An edited one need not: it is a sibling. */
  get busy() {
    return !!this.running && !this.composer.editing;
  }

  /** Stop an answer, by default the shown one. */
  stop(message = this.running) {
    if (message) this.answers.stop(message);
  }

  showRunning() {
    this.composer.showBusy(this.busy);
  }

  /** Show another version of a message (default: the last), `by` places further. Below it, the path
   * is the one that was chosen last. */
  step(by, message = path(this.chat).at(-1)) {
    const versions = message ? siblings(this.chat, message) : [];
    const version = versions[versions.indexOf(message) + by];
    if (!version) return;
    this.chat.chosen[version.parent] = version.id;
    this.show();
    this.refreshVersions(version);
    this.keep();
    this.viewOf(version).node.querySelector(".versions button:not(:disabled)")?.focus();
  }

  refreshVersions(message) {
    for (const other of siblings(this.chat, message)) this.views.get(other.id)?.show();
  }

  again(message) {
    if (this.mayAsk()) this.answer(message.parent);
  }

  /** Retry a failed answer in its place; text that had arrived stays as a version. */
  retry(message) {
    if (!this.mayAsk()) return;
    const { parent, text, error } = message;
    const has = text || ["reasoning", "calls", "ran", "approvals"].some(name => message[name]);
    if (has || !error) return this.answer(parent);
    delete message.error;
    this.answer(parent, message);
  }

  /** Retry without the oldest messages, which do not fit the context. */
  async shorten(message) {
    const { chat } = this;
    try {
      await shorten(chat, message.parent, this.model().id);
    } catch (error) {
      this.warn(error.message);
      return;
    }
    if (chat !== this.chat) return;
    if (canContinue(chat, message)) this.goOn(message);
    else this.retry(message);
  }

  /** Add the results of an answer's calls, and continue. */
  giveResults(message, results) {
    if (!this.mayAsk()) return;
    let parent = message.id;
    message.calls.forEach(({ id, name }, i) => {
      parent = add(this.chat, parent, { role: "tool", callId: id, name, text: results[i] }).id;
    });
    this.answer(parent);
  }

  /** Approve or deny an answer's calls, and continue. */
  decide(message, decisions) {
    if (!this.mayAsk()) return;
    this.answer(add(this.chat, message.id, { role: "approval", decisions }).id);
  }

  /** The parent for a new message. Calls that still need approval are denied first. */
  decided(last) {
    if (!last?.approvals?.length) return last?.id;
    const decisions = last.approvals.map(call => ({ ...call, approve: false }));
    return add(this.chat, last.id, { role: "approval", decisions }).id;
  }

  editLast() {
    const last = path(this.chat).findLast(message => message.role === "user");
    if (last) this.composer.edit(last);
  }

  lastAnswer() {
    return path(this.chat).findLast(message => message.role === "assistant")?.text ?? "";
  }

  /** Scroll to the end of the log, if it was in sight or `always`. */
  follow(always) {
    if (always) this.follows = true;
    if (this.follows) {
      requestAnimationFrame(() => (this.scroller.scrollTop = this.scroller.scrollHeight));
    }
  }

  noteScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    this.follows = scrollHeight - scrollTop - clientHeight < 80;
    this.latest.hidden = this.follows;
    if (this.from && scrollTop < NEAR) this.showEarlier();
  }
}

function welcomeText() {
  return el("div", { class: "welcome" }, el("h2", {}, "What would you like to know?"),
            el("p", {}, "A long prompt is computed by a prefill node, while the streams of others ",
               "go on. The ", el("a", { href: "cluster", "data-view": "cluster" }, "cluster page"),
               " shows it."));
}
