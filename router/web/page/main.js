// The page: its two views, the model, the theme, the key and the shortcuts.

import { ChatView } from "./chat/chat_view.js";
import { Sidebar } from "./chat/sidebar.js";
import { ChatStore } from "./chat/store.js";
import { askForKey, showShortcuts } from "./dialogs.js";
import { announce, copy, el, icon, iconButton, relabel } from "./dom.js";
import { number } from "./format.js";
import { listModels, storedKey, whenKeyWanted } from "./server.js";

const at = id => document.getElementById(id);
const NARROW = matchMedia("(max-width: 800px)");
const THEMES = [["auto", "Theme: system", "auto"], ["light", "Theme: light", "sun"],
                ["dark", "Theme: dark", "moon"]];

// Storage keys, for this tab and for this browser.
const CHAT = "tandem.chat", MODEL = "tandem.model", THEME = "tandem.theme";

const NO_MODEL = { id: "", context: 0, defaults: {} };

class Page {
  constructor() {
    this.store = new ChatStore();
    this.models = [];
    this.picker = at("model");
    this.chat = new ChatView(this.store, () => this.chosenModel(), () => this.onChat());
    this.sidebar = new Sidebar(this.store, this.chat, id => this.openChat(id));
    this.cluster = null;
  }

  async start() {
    at("chats").append(this.sidebar.node);
    at("chat-view").append(this.chat.node);
    this.addButtons();
    whenKeyWanted(() => this.askForKey());
    this.keyButton.hidden = !storedKey();
    addEventListener("popstate", () => this.showView());
    document.addEventListener("click", event => this.onLink(event));
    document.addEventListener("keydown", event => this.onKey(event));
    document.addEventListener("dragover", event => this.onDrag(event));
    document.addEventListener("drop", event => this.onDrag(event));
    NARROW.addEventListener("change", () => this.showSidebar(!NARROW.matches));
    addEventListener("storage", ({ key, newValue }) => key === THEME && this.showTheme(newValue));
    at("shade").addEventListener("click", () => this.showSidebar(false));
    this.showSidebar(!NARROW.matches);
    this.showView();
    this.findModels();
    const last = sessionStorage.getItem(CHAT);
    if (last) await this.chat.open(last);
    this.sidebar.refresh();
  }

  addButtons() {
    at("menu").append(icon("menu"));
    at("menu").addEventListener("click", () => this.showSidebar(!this.sidebarShown));
    this.keyButton = iconButton("key", "API key", () => this.askForKey());
    this.themeButton = iconButton("auto", "", () => this.nextTheme());
    this.showTheme(localStorage.getItem(THEME));
    this.settingsButton = iconButton("sliders", "Settings of this chat", () => this.chat.settings());
    at("tools").append(this.keyButton, this.settingsButton, this.themeButton);
    this.picker.addEventListener("change", () => localStorage.setItem(MODEL, this.picker.value));
  }

  get view() {
    return location.pathname.endsWith("/cluster") ? "cluster" : "chat";
  }

  onLink(event) {
    const link = event.target.closest?.("a[data-view]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    history.pushState(null, "", link.href);
    this.showView();
  }

  /** Attach dropped files to the message, so that the browser does not open them. */
  onDrag(event) {
    const { dataTransfer: data } = event;
    if (!data.types.includes("Files")) return;
    event.preventDefault();
    const accepted = this.view === "chat" && !document.querySelector("dialog[open]");
    data.dropEffect = accepted ? "copy" : "none";
    if (accepted && event.type === "drop") this.chat.composer.attach(data.files);
  }

  async showView() {
    const { view } = this;
    for (const name of ["chat", "cluster"]) at(`${name}-view`).hidden = name !== view;
    for (const link of document.querySelectorAll(".tabs a")) {
      const here = link.dataset.view === view;
      if (here) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    document.title = view === "cluster" ? "Cluster · Tandem" : "Tandem";
    document.body.dataset.view = view;
    this.settingsButton.hidden = view !== "chat";
    if (view === "chat") this.chat.composer.field.focus();
    if (view === "cluster") await this.makeCluster();
    this.cluster?.show(this.view === "cluster");
  }

  /** Load the cluster's scripts on demand. */
  async makeCluster() {
    const { ClusterView } = await import("./cluster/cluster_view.js");
    if (this.cluster) return;
    this.cluster = new ClusterView(() => this.chosenModel());
    at("cluster-view").append(this.cluster.node);
  }

  chosenModel() {
    const { models } = this;
    return models.find(({ id }) => id === this.picker.value) ?? models[0] ?? NO_MODEL;
  }

  showSidebar(shown) {
    this.sidebarShown = shown;
    document.body.classList.toggle("with-sidebar", shown);
    at("chats").inert = !shown;
    at("menu").setAttribute("aria-expanded", String(shown));
    at("menu").setAttribute("aria-label", shown ? "Hide the chats" : "Show the chats");
  }

  onChat() {
    if (!this.sidebar) return;
    sessionStorage.setItem(CHAT, this.chat.chat.id);
    this.sidebar.refresh();
  }

  async openChat(id) {
    if (this.view !== "chat") history.pushState(null, "", "./");
    this.showView();
    if (NARROW.matches) this.showSidebar(false);
    await this.chat.open(id);
    if (this.models.some(model => model.id === this.chat.chat.model)) {
      this.picker.value = this.chat.chat.model;
    }
  }

  async findModels() {
    clearTimeout(this.searching);
    let again = 30_000;
    try {
      this.showModels(await listModels());
    } catch (error) {
      again = error.status === 401 ? 60_000 : 2_000;
      this.showNoModel(error);
    }
    this.searching = setTimeout(() => this.findModels(), again);
  }

  showModels(models) {
    if (JSON.stringify(models) === JSON.stringify(this.models)) return;
    this.models = models;
    const selected = this.picker.value || localStorage.getItem(MODEL);
    this.picker.replaceChildren(...models.map(model =>
      el("option", { value: model.id, title: aboutContext(model) }, model.id)));
    if (models.some(model => model.id === selected)) this.picker.value = selected;
    this.picker.disabled = false;
    this.picker.title = aboutContext(this.chosenModel());
  }

  showNoModel({ status, message }) {
    this.models = [];
    const reason = { 0: "no connection", 401: "a key is needed" }[status] ?? "no model yet";
    this.picker.replaceChildren(el("option", { value: "" }, reason));
    this.picker.disabled = true;
    this.picker.title = message;
    if (status === 401) this.keyButton.hidden = false;
  }

  async askForKey() {
    if (!await askForKey()) return;
    this.keyButton.hidden = false;
    this.findModels();
    announce("Key saved");
  }

  nextTheme() {
    const now = THEMES.findIndex(([name]) => name === document.documentElement.dataset.theme);
    const [next] = THEMES[(now + 1) % THEMES.length];
    localStorage.setItem(THEME, next);
    this.showTheme(next);
  }

  showTheme(chosen) {
    const [theme, label, shape] = THEMES.find(([name]) => name === chosen) ?? THEMES[0];
    document.documentElement.dataset.theme = theme;
    relabel(this.themeButton, shape, label);
  }

  onKey(event) {
    if (document.querySelector("dialog[open]")) return;
    const typing = event.target.matches?.("input, textarea, select");
    const action = (event.ctrlKey || event.metaKey) ? this.withControl(event) :
      event.altKey ? this.withAlt(event) : this.alone(event, typing);
    if (action) {
      event.preventDefault();
      action();
    }
  }

  withControl(event) {
    const key = event.key.toLowerCase();
    if (event.shiftKey && key === "o") return () => this.openChat(null);
    if (event.shiftKey && (event.code === "Semicolon" || key === ";")) {
      return () => copy(this.chat.lastAnswer());
    }
    if (event.shiftKey || event.altKey) return null;
    if (key === "k") return () => this.searchChats();
    return key === "," ? () => this.chat.settings() : null;
  }

  withAlt(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    return step && this.view === "chat" ? () => this.chat.step(step) : null;
  }

  alone(event, typing) {
    if (event.key === "Escape" && document.querySelector(":popover-open")) return null;
    if (event.key === "Escape" && this.chat.running) return () => this.chat.stop();
    if (typing) return null;
    if (event.key === "?") return showShortcuts;
    return event.key === "/" && this.view === "chat" ? () => this.chat.composer.field.focus() : null;
  }

  searchChats() {
    this.showSidebar(true);
    this.sidebar.search.focus();
    this.sidebar.search.select();
  }

}

const aboutContext = ({ context }) => `Context of ${number(context)} tokens`;

new Page().start();
