// How answers are sampled: what the dialog's fields say, which this browser keeps.

import { $ } from "./show.js";

const NAMES = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "effort"];
const STORED = "mlxserve-sampling";

// The fields of a request; what was left empty is the model's default.
export function sampling(effort = "reasoning_effort") { // the name of the field for the effort
  const found = {};
  for (const name of NAMES) {
    const { value } = $(name);
    if (value !== "" && $(name).checkValidity()) found[name === "effort" ? effort : name] = name === "effort" ? value : Number(value);
  }
  return found;
}

export function setSampling(values) {
  for (const name of NAMES) $(name).value = values[name] ?? "";
  keep();
}

function keep() {
  localStorage.setItem(STORED, JSON.stringify(sampling("effort")));
}

export function start() {
  const stored = JSON.parse(localStorage.getItem(STORED) || "{}");
  for (const name of NAMES) {
    if (stored[name] !== undefined) $(name).value = stored[name];
    $(name).addEventListener("change", keep);
  }
}
