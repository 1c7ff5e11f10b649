// The fields of a request that the settings have; one that is empty is left to the server, which
// then takes the model's default, or `otherwise`.

const number = (name, label, min, max, step, help, otherwise = "") =>
  ({ kind: "number", name, label, min, max, step, help, otherwise });
const whole = (name, label, min, max, help, otherwise) =>
  number(name, label, min, max, 1, help, otherwise);
const lines = (name, label, help) => ({ kind: "lines", name, label, help });

export const FIELDS = [
  number("temperature", "Temperature", 0, 2, 0.1, "Higher is more varied; 0 always takes the likeliest token."),
  number("top_p", "Top p", 0, 1, 0.05, "Draw from the likeliest tokens that together have this probability."),
  whole("top_k", "Top k", -1, 1_000_000, "Draw from this many of the likeliest tokens; 0: from all."),
  number("min_p", "Min p", 0, 1, 0.01, "Leave out tokens less likely than this share of the likeliest."),
  number("presence_penalty", "Presence penalty", -2, 2, 0.1, "Above 0: prefer tokens that have not appeared."),
  number("frequency_penalty", "Frequency penalty", -2, 2, 0.1, "Above 0: the more often a token has appeared, the less likely."),
  number("repetition_penalty", "Repetition penalty", 0.01, 10, 0.05, "Above 1: repeat less of the prompt and the answer."),
  whole("max_tokens", "Max tokens", 1, 2 ** 31 - 2, "The longest that an answer may be.", "no limit"),
  whole("min_tokens", "Min tokens", 0, 2 ** 31 - 2, "The shortest that an answer may be.", "0"),
  whole("seed", "Seed", -(2 ** 53) + 1, 2 ** 53 - 1, "The same seed gives the same answer.", "random"),
  lines("stop", "Stop strings", "One per line; an answer ends before the first of them."),
  { kind: "choice", name: "reasoning_effort", label: "Reasoning effort",
    options: ["", "low", "medium", "high"], help: "For models that have one." },
  whole("thinking_token_budget", "Thinking budget", -1, 2 ** 31 - 2,
        "The most tokens of reasoning; needs a reasoning parser.", "no limit"),
  lines("mcp", "MCP servers", "Servers of the router whose tools the model may use, one label per line."),
  { kind: "switch", name: "ask", label: "Ask before each call",
    help: "Calls of MCP servers wait until you allow them." },
  { kind: "switch", name: "ignore_eos", label: "Go on after the end",
    help: "Generate until max tokens." },
];
