// Fields of a request in the settings. An empty one is left out, and the server uses the model's
// default, or `otherwise`.

import { NUMBERS } from "./sampling_numbers.js";

const whole = (name, label, min, max, help, otherwise) =>
  ({ kind: "number", name, label, min, max, step: 1, help, otherwise });
const lines = (name, label, help) => ({ kind: "lines", name, label, help });

export const FIELDS = [
  ...NUMBERS,
  whole("max_tokens", "Max tokens", 1, 2 ** 31 - 2, "Maximum length of an answer.", "no limit"),
  whole("min_tokens", "Min tokens", 0, 2 ** 31 - 2, "Minimum length of an answer.", "0"),
  whole("seed", "Seed", -(2 ** 53) + 1, 2 ** 53 - 1, "The same seed gives the same answer.", "random"),
  lines("stop", "Stop strings", "One per line; an answer ends before the first of them."),
  { kind: "choice", name: "reasoning_effort", label: "Reasoning effort",
    options: ["", "low", "medium", "high"], help: "For models that support it." },
  whole("thinking_token_budget", "Thinking budget", -1, 2 ** 31 - 2,
        "Maximum tokens of reasoning; needs a reasoning parser.", "no limit"),
  lines("mcp", "MCP servers", "MCP servers whose tools the model may use, one label per line."),
  { kind: "switch", name: "ask", label: "Ask before each call",
    help: "Tool calls of MCP servers need your approval." },
  { kind: "switch", name: "ignore_eos", label: "Go on after the end",
    help: "Generate until max tokens." },
];
