// The list of chats: search, rename, delete, files.

import { announce, download, el, iconButton } from "../dom.js";
import { askForText, confirmed } from "../dialogs.js";
import { mentions } from "./conversation.js";
import { fileName, fromJson, toJson, toMarkdown } from "./files.js";

const PAGE = 200;  // maximum number of shown entries

/** `view` shows the chats, and has their current state; `open` shows one by its id (null:
 * a new one). */
export class Sidebar {
  constructor(store, view, open) {
    this.store = store;
    this.view = view;
    this.open = open;
    this.shown = PAGE;
    this.search = el("input", { type: "search", placeholder: "Search chats", "aria-label":
      "Search chats", oninput: () => this.refresh() });
    this.list = el("ul", { class: "chats" });
    this.note = el("p", { class: "note" });
    const fresh = el("button", { class: "fresh", type: "button", onclick: () => open(null) },
                     "New chat");
    const files = el("div", { class: "files" },
      el("button", { class: "quiet", type: "button", onclick: () => this.choose() }, "Import"),
      el("button", { class: "quiet", type: "button", onclick: () => this.saveAll() }, "Export all"));
    this.node = el("nav", { "aria-label": "Chats" }, fresh, this.search, this.list, this.note, files);
  }

  async refresh() {
    const words = this.search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const heads = await this.store.heads();
    const matches = words.length ? await this.matching(heads, words) : heads;
    const focused = this.focusedEntry();
    this.list.replaceChildren(...matches.slice(0, this.shown).map(head => this.entry(head)));
    if (matches.length > this.shown) this.list.append(this.more(matches.length - this.shown));
    if (focused) this.list.querySelector(focused)?.focus();
    this.note.textContent = this.about(matches, words);
  }

  about(matches, words) {
    if (!this.store.lasting) return "This browser does not store chats here: closing the page deletes them.";
    if (matches.length) return "";
    return words.length ? "No chat contains these words." : "Chats stay in this browser.";
  }

  async matching(heads, words) {
    const chats = await this.store.chats();
    const ids = new Set(chats.filter(chat => mentions(chat, words)).map(chat => chat.id));
    return heads.filter(head => ids.has(head.id));
  }

  more(left) {
    const show = () => {
      this.shown += PAGE;
      this.refresh();
    };
    return el("li", {}, el("button", { class: "quiet", type: "button", onclick: show },
                           `${left} more`));
  }

  /** A selector of the focused button in the list, to restore the focus in a new list. */
  focusedEntry() {
    const id = document.activeElement?.closest?.(".chats li")?.dataset.id;
    if (!id || !this.list.contains(document.activeElement)) return null;
    const button = document.activeElement.matches(".title") ? ".title" : ".icon-button";
    return `li[data-id="${CSS.escape(id)}"] ${button}`;
  }

  entry({ id, title }) {
    const name = el("button", { class: "title", type: "button", onclick: () => this.open(id),
                                "aria-current": id === this.view.chat.id ? "true" : null }, title);
    const menu = iconButton("more", `More about “${title}”`, event => this.menu(event, id, title),
                            { "aria-haspopup": "menu" });
    return el("li", { "data-id": id }, name, this.mark(id), menu);
  }

  /** A dot beside a chat with an answer in progress, or with an unread one. */
  mark(id) {
    const running = this.view.answers.inChat(id).length > 0;
    if (!running && !this.view.unseen.has(id)) return null;
    return el("span", { class: running ? "mark running" : "mark", role: "img",
                        "aria-label": running ? "is being answered" : "has a new answer" });
  }

  menu(event, id, title) {
    const item = (name, action, kind) => el("button", { type: "button", role: "menuitem",
      class: kind, onclick: () => (menu.hidePopover(), action()) }, name);
    const menu = el("div", { popover: "auto", role: "menu", class: "menu", "aria-label": title,
      onkeydown: moveInMenu, ontoggle: change => change.newState === "closed" && menu.remove() },
      ...this.view.answers.inChat(id).map(({ message }) =>
        item("Stop the answer", () => this.view.stop(message))),
      item("Rename", () => this.rename(id, title)),
      item("Export as JSON", () => this.save(id, "json")),
      item("Export as Markdown", () => this.save(id, "md")),
      item("Delete", () => this.remove(id, title), "danger"));
    this.node.append(menu);  // not on the entry, which may have been replaced
    menu.showPopover();
    place(menu, event.currentTarget);
    menu.firstChild.focus();
  }

  /** The chat as loaded in the page, or else from the store. */
  async chat(id) {
    return this.view.live(id) ?? this.store.get(id);
  }

  async rename(id, title) {
    const name = await askForText("Rename the chat", "Title", title);
    if (!name) return;
    const chat = await this.chat(id);
    chat.title = name;
    await this.store.put(chat);
    this.refresh();
  }

  async remove(id, title) {
    if (!await confirmed(`“${title}” will be gone.`, "Delete")) return;
    this.view.forget(id);
    await this.store.remove(id);
    announce("Chat deleted");
    if (id === this.view.chat.id) this.open(null);
    this.refresh();
  }

  async save(id, ending) {
    const chat = await this.chat(id);
    if (ending === "md") download(fileName(chat, ending), "text/markdown", toMarkdown(chat));
    else download(fileName(chat, ending), "application/json", toJson([chat]));
  }

  async saveAll() {
    download("tandem-chats.json", "application/json", toJson(await this.store.chats()));
  }

  choose() {
    const input = el("input", { type: "file", accept: ".json,application/json",
                                onchange: () => input.files[0] && this.load(input.files[0]) });
    input.click();
  }

  async load(file) {
    try {
      const chats = fromJson(await file.text());
      for (const chat of chats) await this.store.put(chat);
      announce(`${chats.length} chats imported`);
      await this.refresh();
      if (chats.length === 1) this.open(chats[0].id);
    } catch (error) {
      this.note.textContent = `Not imported: ${error.message}`;
      announce(this.note.textContent);
    }
  }
}

function moveInMenu(event) {
  const items = [...event.currentTarget.children];
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const at = items.indexOf(document.activeElement);
  items[(at + step + items.length) % items.length].focus();
}

function place(menu, button) {
  const { left, right, bottom } = button.getBoundingClientRect();
  const { width, height } = menu.getBoundingClientRect();
  menu.style.left = `${Math.max(8, Math.min(left, innerWidth - width - 8, right - width))}px`;
  menu.style.top = `${Math.min(bottom + 4, innerHeight - height - 8)}px`;
}
