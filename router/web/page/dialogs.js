// Dialogs. Browsers keep the focus inside, close them on Escape, and restore the focus.

import { el, iconButton } from "./dom.js";
import { storeKey, storedKey } from "./server.js";

/** Show a dialog with a title; returns it. */
export function show(title, kind, ...children) {
  const head = el("header", {}, el("h2", { id: "dialog-title" }, title),
                  iconButton("close", "Close", () => dialog.close()));
  const dialog = el("dialog", { class: kind, "aria-labelledby": "dialog-title",
    onclose: () => dialog.remove(),
    onclick: event => event.target === dialog && dialog.close() }, head, children);
  document.body.append(dialog);
  dialog.showModal();
  return dialog;
}

/** The value of the button that closes a dialog; empty if it is closed otherwise. */
function choice(dialog) {
  return new Promise(resolve =>
    dialog.addEventListener("close", () => resolve(dialog.returnValue)));
}

/** Ask for confirmation; true if the user agrees. */
export async function confirmed(question, action) {
  const form = el("form", { method: "dialog", class: "buttons" },
                  el("button", { class: "quiet" }, "Cancel"),
                  el("button", { class: "danger", value: "yes", autofocus: true }, action));
  return await choice(show("Are you sure?", "box", el("p", {}, question), form)) === "yes";
}

/** Ask for a line of text; null if cancelled. */
export async function askForText(title, label, value) {
  const input = el("input", { value, maxlength: 200, autofocus: true });
  const form = el("form", { method: "dialog" }, el("label", {}, label, input), saveButton());
  const dialog = show(title, "box", form);
  input.select();
  return (await choice(dialog) && input.value.trim()) || null;
}

const saveButton = () => el("div", { class: "buttons" }, el("button", { value: "save" }, "Save"));

/** Ask for the server's key, unless a dialog is already open; true if there is a new key. */
export async function askForKey() {
  if (document.querySelector("dialog.key")) return false;
  const input = el("input", { type: "password", value: storedKey(), autocomplete: "off",
                              spellcheck: "false", autofocus: true });
  const lasting = el("input", { type: "checkbox" });
  const about = storedKey() ? "The server does not accept this key." :
    "This server requires an API key, set by --api-key or --api-key-file.";
  const form = el("form", { method: "dialog" }, el("p", {}, about), el("label", {}, "API key", input),
                  el("label", { class: "check" }, lasting, "Remember it on this device"), saveButton());
  if (!await choice(show("API key", "box key", form))) return false;
  storeKey(input.value.trim(), lasting.checked);
  return true;
}

const SHORTCUTS = [
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
