// How answers are sampled: what the dialog's fields say, which this browser keeps.

import { $ } from "./show.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const STORED = "mlxserve-sampling";

// The fields of a request; what was left empty is the model's default.
export function sampling() {
  const found = {};
  for (const name of NUMBERS) if ($(name).value !== "" && $(name).checkValidity()) found[name] = Number($(name).value);
  return found;
}

export function start() {
  const stored = JSON.parse(localStorage.getItem(STORED) || "{}");
  for (const name of NUMBERS) {
    if (typeof stored[name] === "number") $(name).value = stored[name];
    $(name).addEventListener("change", () => localStorage.setItem(STORED, JSON.stringify(sampling())));
  }
}
