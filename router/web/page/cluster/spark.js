// A chart of the last half minute, with four values per second.

import { el, svg } from "../dom.js";

const SLOT_MS = 250;
const SLOTS = 120;
const WIDTH = 300, HEIGHT = 56;

/** Values by time. `add` adds to the current slot. */
export class Series {
  constructor() {
    this.values = new Map();
  }

  add(amount, now = performance.now()) {
    const slot = Math.floor(now / SLOT_MS);
    this.values.set(slot, (this.values.get(slot) ?? 0) + amount);
    for (const old of this.values.keys()) {
      if (old >= slot - SLOTS) break;
      this.values.delete(old);
    }
  }

  /** Add an amount, spread evenly between two times. */
  spread(amount, from, to) {
    const slots = Math.max(1, Math.floor(to / SLOT_MS) - Math.floor(from / SLOT_MS));
    for (let slot = slots - 1; slot >= 0; slot--) this.add(amount / slots, to - slot * SLOT_MS);
  }

  /** The mean rate per second between two times. */
  rate(from, to) {
    const [first, last] = [Math.floor(from / SLOT_MS), Math.floor(to / SLOT_MS)];
    let sum = 0;
    for (let slot = first; slot < last; slot++) sum += this.values.get(slot) ?? 0;
    return last > first ? sum / ((last - first) * SLOT_MS / 1000) : 0;
  }

  /** Rates of all past slots, oldest first. */
  rates(now) {
    const last = Math.floor(now / SLOT_MS);
    return Array.from({ length: SLOTS }, (_, i) => {
      const here = last - SLOTS + i;
      const both = (this.values.get(here - 1) ?? 0) + (this.values.get(here) ?? 0);
      return both / (2 * SLOT_MS / 1000);  // two slots, to smooth the line
    });
  }
}

/** Draws a series; `bands` are times [from, to] to mark. */
export class Spark {
  constructor(name) {
    this.bands = svg("g", { class: "bands" });
    this.area = svg("path", { class: "area" });
    this.line = svg("path", { class: "line" });
    const box = { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
    this.drawing = svg("svg", { ...box, class: "spark", role: "img", "aria-label": name },
                       this.bands, this.area, this.line);
    this.node = el("div", { class: "spark-box" }, this.drawing);
  }

  draw(series, bands, now, least = 1) {
    const rates = series.rates(now);
    const top = Math.max(least, ...rates) * 1.1;
    const points = rates.map((rate, i) =>
      `${(i * WIDTH / (SLOTS - 1)).toFixed(1)},${(HEIGHT - rate / top * (HEIGHT - 4) - 2).toFixed(1)}`);
    this.line.setAttribute("d", `M${points.join("L")}`);
    this.area.setAttribute("d", `M0,${HEIGHT}L${points.join("L")}L${WIDTH},${HEIGHT}Z`);
    this.bands.replaceChildren(...bands.map(band => rectangle(band, now)).filter(Boolean));
  }
}

function rectangle([from, to], now) {
  const span = SLOTS * SLOT_MS;
  const x = time => Math.max(0, WIDTH * (1 - (now - time) / span));
  const [left, right] = [x(from), x(to || now)];
  if (right <= 0) return null;
  return svg("rect", { x: left, y: 0, width: Math.max(1, right - left), height: HEIGHT });
}
