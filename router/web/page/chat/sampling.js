// The fields of a request that the settings have; one that is empty is left to the server.

const number = (name, label, min, max, step, help) =>
  ({ kind: "number", name, label, min, max, step, help });
const whole = (name, label, min, max, help) => number(name, label, min, max, 1, help);
const lines = (name, label, help) => ({ kind: "lines", name, label, help });

export const FIELDS = [
  number("temperature", "Temperature", 0, 2, 0.1, "0 always takes the most likely token."),
  number("top_p", "Top p", 0, 1, 0.05, "Only the likeliest tokens that have this much together."),
  whole("top_k", "Top k", -1, 1_000_000, "Only so many of the likeliest tokens; 0 is off."),
  number("min_p", "Min p", 0, 1, 0.01, "Only tokens at least this likely, of the likeliest."),
  number("presence_penalty", "Presence penalty", -2, 2, 0.1, "Against tokens already there."),
  number("frequency_penalty", "Frequency penalty", -2, 2, 0.1, "Against tokens by their number."),
  number("repetition_penalty", "Repetition penalty", 0.01, 10, 0.05, "Above 1: against repeating."),
  whole("max_tokens", "Max tokens", 1, 2 ** 31 - 2, "An answer ends here at the latest."),
  whole("min_tokens", "Min tokens", 0, 2 ** 31 - 2, "An answer does not end before."),
  whole("seed", "Seed", -(2 ** 53) + 1, 2 ** 53 - 1, "The same answer again."),
  lines("stop", "Stop strings", "One a line; an answer ends before any of them."),
  { kind: "choice", name: "reasoning_effort", label: "Reasoning effort",
    options: ["", "low", "medium", "high"], help: "For models whose template takes it." },
  whole("thinking_token_budget", "Thinking budget", -1, 2 ** 31 - 2,
        "Tokens of reasoning; needs a reasoning parser."),
  lines("mcp", "MCP servers", "Labels of the router's servers whose tools the model may use, one a line."),
  { kind: "switch", name: "ask", label: "Ask before each call",
    help: "Calls of MCP servers wait until you allow them." },
  { kind: "switch", name: "ignore_eos", label: "Go on after the end",
    help: "Generates up to max tokens." },
];

/** The value of an input, as a request has it. */
export function valueOf(field, input) {
  switch (field.kind) {
    case "number": return input.value === "" ? null : Number(input.value);
    case "lines": return input.value ? input.value.split("\n").filter(line => line) : null;
    case "switch": return input.checked || null;
    default: return input.value || null;
  }
}
