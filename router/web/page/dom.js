// Elements are created by name and filled with text. Nothing here parses HTML; the page's policy
// (require-trusted-types-for) enforces that.

const SVG = "http://www.w3.org/2000/svg", MATHML = "http://www.w3.org/1998/Math/MathML";

/** An element. `on…` attributes are listeners, `true` sets an empty attribute, and `null`,
 * `undefined` and `false` leave one out. */
export function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

export function mathml(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(MATHML, tag), attributes, children);
}

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) {
      node.setAttribute(name, value);
    }
  }
  node.append(...children.flat().filter(child => child !== null && child !== undefined));
  return node;
}

const SHAPES = {
  menu: "M4 7h16M4 12h16M4 17h16",
  attach: "M18 11l-6.5 6.5a3.5 3.5 0 0 1-5-5L13 6a2.3 2.3 0 0 1 3.3 3.3L10 15.6",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M6.5 6.5h11v11h-11z",
  copy: "M9 9h10v11H9zM5 15V4h10",
  check: "M5 13l4 4L19 7",
  edit: "M5 19l1-4L16 5l3 3L9 18zM14 7l3 3",
  again: "M19 12a7 7 0 1 1-2-5l2 2M19 4v5h-5",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M12 5v14M6 13l6 6 6-6",
  more: "M6 12h.01M12 12h.01M18 12h.01",
  close: "M6 6l12 12M18 6L6 18",
  sliders: "M4 8h9M17 8h3M4 16h3M11 16h9M15 5.5v5M9 13.5v5",
  key: "M14 10a4 4 0 1 0-3.5 4L13 16h2v2h2v2h3v-3l-6-6",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 3v1.5M12 19.5V21M3 12h1.5M19.5 12H21M5.6 5.6l1.1 1.1M17.3 17.3l1.1 1.1M5.6 18.4l1.1-1.1M17.3 6.7l1.1-1.1",
  moon: "M19 14.5A7.5 7.5 0 0 1 9.5 5a7.5 7.5 0 1 0 9.5 9.5z",
  auto: "M12 4a8 8 0 1 0 0 16 8 8 0 0 0 0-16zM12 4v16M15 5v14M18 8v8",
};

export function icon(name) {
  const shape = svg("path", { d: SHAPES[name] });
  return svg("svg", { viewBox: "0 0 24 24", class: `icon icon-${name}`, "aria-hidden": "true" }, shape);
}

/** A button that shows an icon; `label` is its name, and its tooltip. */
export function iconButton(name, label, onclick, attributes = {}) {
  const all = { type: "button", class: "icon-button", "aria-label": label, title: label };
  return el("button", { ...all, ...attributes, onclick }, icon(name));
}

/** Change the icon and label of an `iconButton`. */
export function relabel(button, name, label) {
  button.replaceChildren(icon(name));
  button.setAttribute("aria-label", label);
  button.title = label;
}

/** A button that copies the result of `text()`, and confirms it. */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    const done = await copy(text());
    relabel(button, done ? "check" : "close", done ? "Copied" : "Could not copy");
    setTimeout(() => relabel(button, "copy", label), 1500);
  });
  return button;
}

/** Copy a text, and confirm it; false if the browser does not allow it. */
export async function copy(text) {
  let done = true;
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    done = copyBySelection(text);  // no clipboard over plain HTTP
  }
  announce(done ? "Copied" : "Could not copy");
  return done;
}

function copyBySelection(text) {
  const before = document.activeElement;
  const field = el("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}

/** Replace the children of an element. Unchanged ones at its beginning are not touched, so that they
 * keep the focus and the selection. */
export function fill(parent, nodes) {
  let same = 0;
  while (same < nodes.length && parent.childNodes[same] === nodes[same]) same++;
  while (parent.childNodes.length > same) parent.lastChild.remove();
  parent.append(...nodes.slice(same));
}

/** Announce a text to screen readers. */
export function announce(text) {
  const region = document.getElementById("live");
  region.textContent = "";
  setTimeout(() => (region.textContent = text), 30);
}

/** Download a file that the page has created. */
export function download(name, kind, text) {
  const url = URL.createObjectURL(new Blob([text], { type: kind }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

/** A function that runs `work` at most once per frame; in a hidden page, by a timer. */
export function framed(work) {
  let pending = false;
  const run = () => {
    pending = false;
    work();
  };
  return () => {
    if (pending) return;
    pending = true;
    if (document.hidden) setTimeout(run, 200);
    else requestAnimationFrame(run);
  };
}
