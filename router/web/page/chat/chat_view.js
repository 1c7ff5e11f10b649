// The chat: one conversation, the answer that is being streamed into it, and the message field.

import { announce, el, icon, iconButton, relabel } from "../dom.js";
import { ServerError } from "../server.js";
import { bodyOf, stream } from "./answer.js";
import { add, choose, messagesUpTo, newChat, path, remove, siblings } from "./conversation.js";
import { MessageView } from "./message_view.js";
import { defaults, showSettings } from "./settings.js";

const SAVE_EVERY = 2_000;
const ANNOUNCED = 600;  // characters of an answer that are read out

export class ChatView {
  /** `changed` is called when the chat was kept; `model` returns the name of the chosen model. */
  constructor(store, model, changed) {
    this.store = store;
    this.model = model;
    this.changed = changed;
    this.views = new Map();
    this.running = null;  // { message, controller }
    this.editing = null;  // the message that the next one stands beside
    this.build();
    this.start(null);
  }

  build() {
    this.log = el("section", { class: "log", "aria-label": "Messages", tabindex: "-1" });
    this.scroller = el("div", { class: "scroller" }, this.log);
    this.scroller.addEventListener("scroll", () => this.noteScroll(), { passive: true });
    this.latest = iconButton("down", "Go to the latest message", () => this.follow(true),
                             { class: "icon-button latest", hidden: true });
    this.field = el("textarea", { id: "message", rows: 1, "aria-label": "Message",
                                  placeholder: "Message", enterkeyhint: "send" });
    this.field.addEventListener("input", () => this.grow());
    this.field.addEventListener("keydown", event => this.onKey(event));
    this.button = el("button", { class: "send", "aria-label": "Send", title: "Send" }, icon("send"));
    this.banner = el("div", { class: "editing", hidden: true }, "Editing: the old version stays.",
                     el("button", { class: "quiet", type: "button", onclick: () => this.endEdit() },
                        "Cancel"));
    const form = el("form", { class: "composer" }, this.field, this.button);
    form.addEventListener("submit", event => {
      event.preventDefault();
      if (this.running) this.stop();
      else this.send();
    });
    this.node = el("div", { class: "chat" }, this.scroller,
                   el("div", { class: "foot" }, this.latest, this.banner, form));
  }

  // ---- which chat ----------------------------------------------------------------------------

  /** Show a kept chat, or begin a new one. */
  async open(id) {
    const chat = id === null ? null : await this.store.get(id);
    if (this.running && chat?.id === this.chat.id) return;
    this.stop();
    this.start(chat ?? null);
    this.field.focus();
  }

  start(chat) {
    const { sampling, system } = defaults();
    this.chat = chat ?? newChat(sampling, system);
    this.endEdit();
    this.views.clear();
    this.show();
    this.follow(true);
    this.changed(this.chat);
  }

  /** Make the log the chosen path. */
  show() {
    const messages = path(this.chat);
    const nodes = messages.map(message => this.viewOf(message).node);
    this.log.replaceChildren(...(nodes.length ? nodes : [welcome()]));
  }

  viewOf(message) {
    if (!this.views.has(message.id)) this.views.set(message.id, new MessageView(message, this));
    return this.views.get(message.id);
  }

  settings() {
    showSettings(this.chat, () => this.keep());
  }

  async keep() {
    if (!Object.keys(this.chat.messages).length) return;
    this.savedAt = performance.now();
    try {
      await this.store.put(this.chat);
    } catch (error) {
      announce(`The chat could not be kept: ${error.message}`);
    }
    this.changed(this.chat);
  }

  // ---- asking --------------------------------------------------------------------------------

  send() {
    const text = this.field.value.trim();
    if (!text || this.running) return;
    const parent = this.editing ? this.editing.parent : path(this.chat).at(-1)?.id;
    const message = add(this.chat, parent, { role: "user", text });
    this.endEdit();
    this.field.value = "";
    this.grow();
    this.answer(message.id);
  }

  /** Have the model answer below a message. */
  async answer(parent) {
    const message = add(this.chat, parent, { role: "assistant", model: this.model() });
    const controller = new AbortController();
    const { chat } = this;
    this.running = { message, controller };
    this.chat.model = message.model;
    this.refreshVersions(message);
    this.show();
    const view = this.viewOf(message);
    view.state = true;
    this.showRunning();
    this.follow(true);
    this.keep();
    try {
      const messages = messagesUpTo(chat, parent);
      const body = bodyOf(messages, message.model, chat.sampling);
      await stream(message, body, controller.signal, () => this.arrived(view));
    } catch (error) {
      this.failed(message, error);
    }
    this.ended(chat, view);
  }

  arrived(view) {
    view.refresh();
    this.follow(false);
    if (performance.now() - this.savedAt > SAVE_EVERY) this.keep();
  }

  failed(message, error) {
    if (error.name === "AbortError") {
      message.ended = "stopped";
      return;
    }
    const { status = 500, retryAfter } = error;
    if (!(error instanceof ServerError)) console.error(error);
    message.error = { message: error.message, status };
    if (retryAfter) message.error.until = Date.now() + retryAfter * 1000;
  }

  ended(chat, view) {
    this.running = null;
    view.state = false;
    this.follow(false);
    this.showRunning();
    const { text, error } = view.message;
    announce(error ? `Failed: ${error.message}` : `Answer: ${text.slice(0, ANNOUNCED)}`);
    if (chat === this.chat) this.keep();
    else this.store.put(chat).then(() => this.changed(this.chat));
  }

  stop() {
    this.running?.controller.abort();
  }

  showRunning() {
    const running = this.running !== null;
    this.button.classList.toggle("stop", running);
    relabel(this.button, running ? "stop" : "send", running ? "Stop" : "Send");
  }

  // ---- actions of messages -------------------------------------------------------------------

  siblings(message) {
    return siblings(this.chat, message);
  }

  choose(message) {
    if (this.running || !message) return;
    choose(this.chat, message);
    this.show();
    this.refreshVersions(message);
    this.keep();
    this.viewOf(message).node.querySelector(".versions button:not(:disabled)")?.focus();
  }

  refreshVersions(message) {
    for (const other of this.siblings(message)) this.views.get(other.id)?.show();
  }

  again(message) {
    if (!this.running) this.answer(message.parent);
  }

  /** Ask again in the place of an answer that failed; what had arrived stays as a version. */
  retry(message) {
    if (this.running) return;
    if (!message.text && !message.reasoning) remove(this.chat, message);
    this.answer(message.parent);
  }

  edit(message) {
    if (this.running) return;
    this.editing = message;
    this.banner.hidden = false;
    this.field.value = message.text;
    this.grow();
    this.field.focus();
  }

  endEdit() {
    if (this.editing) this.field.value = "";
    this.editing = null;
    this.banner.hidden = true;
    this.grow();
  }

  editLast() {
    const last = path(this.chat).findLast(message => message.role === "user");
    if (last) this.edit(last);
  }

  /** Show the version of the last answer that is `by` places further. */
  step(by) {
    const last = path(this.chat).at(-1);
    if (!last) return;
    const all = this.siblings(last);
    this.choose(all[all.indexOf(last) + by]);
  }

  lastAnswer() {
    return path(this.chat).findLast(message => message.role === "assistant")?.text ?? "";
  }

  // ---- the message field and the log ---------------------------------------------------------

  onKey(event) {
    if (event.isComposing) return;
    const empty = !this.field.value;
    if (event.key === "Enter" && !event.shiftKey && !matchMedia("(pointer: coarse)").matches) {
      event.preventDefault();
      if (!this.running) this.send();
    } else if (event.key === "ArrowUp" && empty && !this.running) {
      event.preventDefault();
      this.editLast();
    } else if (event.key === "Escape" && this.editing) {
      this.endEdit();
    }
  }

  grow() {
    if (!this.field.offsetParent) return;
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight}px`;
  }

  /** Keep the end of the log in sight, if it was or `always`. */
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
  }
}

function welcome() {
  return el("div", { class: "welcome" }, el("h2", {}, "What would you like to know?"),
            el("p", {}, "A long prompt is computed by a prefill node, while the streams of others ",
               "go on. The ", el("a", { href: "cluster", "data-view": "cluster" }, "cluster page"),
               " shows it."));
}
