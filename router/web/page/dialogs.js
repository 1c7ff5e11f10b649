// Dialogs: browsers keep the focus inside, close them by Escape, and give the focus back.

import { el, iconButton } from "./dom.js";
import { storeKey, storedKey } from "./server.js";

/** Show a dialog with a title; returns it. */
export function show(title, kind, ...children) {
  const close = iconButton("close", "Close", () => dialog.close());
  const head = el("header", {}, el("h2", { id: "dialog-title" }, title), close);
  const dialog = el("dialog", { class: kind, "aria-labelledby": "dialog-title" }, head, children);
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", event => event.target === dialog && dialog.close());
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** True if the user agrees. */
export function confirmed(question, action) {
  return new Promise(resolve => {
    const yes = el("button", { class: "danger", autofocus: true, onclick: () => end(true) }, action);
    const no = el("button", { class: "quiet", onclick: () => end(false) }, "Cancel");
    const dialog = show("Are you sure?", "box", el("p", {}, question),
                        el("div", { class: "buttons" }, no, yes));
    const end = answer => {
      resolve(answer);
      dialog.close();
    };
    dialog.addEventListener("close", () => resolve(false));
  });
}

/** Ask for a line of text; null if there is none. */
export function asked(title, label, value) {
  return new Promise(resolve => {
    const input = el("input", { value, maxlength: 200, autofocus: true });
    const form = el("form", { method: "dialog" }, el("label", {}, label, input), saveButton());
    const dialog = show(title, "box", form);
    form.addEventListener("submit", () => resolve(input.value.trim() || null));
    dialog.addEventListener("close", () => resolve(null));
    input.select();
  });
}

const saveButton = () => el("div", { class: "buttons" }, el("button", {}, "Save"));

/** Ask for the server's key, unless that is already being done; `saved` is called with a new one. */
export function askForKey(saved) {
  if (document.querySelector("dialog.key")) return;
  const input = el("input", { type: "password", value: storedKey(), autocomplete: "off",
                              spellcheck: "false", autofocus: true });
  const lasting = el("input", { type: "checkbox" });
  const about = storedKey() ? "The server does not accept this key." :
    "This server answers only with a key: one of its --api-key or --api-key-file.";
  const form = el("form", { method: "dialog" }, el("p", {}, about), el("label", {}, "API key", input),
                  el("label", { class: "check" }, lasting, "Keep it on this device"), saveButton());
  form.addEventListener("submit", () => {
    storeKey(input.value.trim(), lasting.checked);
    saved();
  });
  show("API key", "box key", form);
}

export const SHORTCUTS = [
  ["Enter", "Send the message"],
  ["Shift + Enter", "Break the line"],
  ["Escape", "Stop the answer"],
  ["↑ in an empty field", "Edit the last message"],
  ["Alt + ← / →", "Show another version of the last answer"],
  ["Ctrl + Shift + O", "New chat"],
  ["Ctrl + K", "Search the chats"],
  ["Ctrl + Shift + ;", "Copy the last answer"],
  ["Ctrl + ,", "Settings"],
  ["/", "Go to the message field"],
  ["?", "These shortcuts"],
];

export function showShortcuts() {
  const rows = SHORTCUTS.map(([keys, meaning]) =>
    el("tr", {}, el("th", { scope: "row" }, el("kbd", {}, keys)), el("td", {}, meaning)));
  const note = "On a Mac, Command stands for Ctrl.";
  show("Keyboard shortcuts", "box", el("table", { class: "keys" }, rows), el("p", {}, note));
}
