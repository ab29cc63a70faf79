// The dialog: the chat's system prompt, how answers are sampled, and export.

import * as chats from "./chat.js";
import { $, element } from "./show.js";
import { exported } from "./store.js";

const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const STORED = "mlxserve-sampling";

// The fields of a request; what was left empty is the model's default.
export function sampling() {
  const found = {};
  for (const name of NUMBERS) if ($(name).value !== "" && $(name).checkValidity()) found[name] = Number($(name).value);
  return found;
}

async function download(format) {
  const id = chats.currentId();
  if (id === null) { $("export-note").textContent = "There is nothing to export yet."; return; }
  try {
    const url = URL.createObjectURL(new Blob([await exported(id, format)]));
    const link = element("a");
    Object.assign(link, { href: url, download: `chat-${id}.${format === "json" ? "json" : "md"}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
    $("export-note").textContent = "";
  } catch (error) {
    $("export-note").textContent = error.message;
  }
}

export function start() {
  const stored = JSON.parse(localStorage.getItem(STORED) || "{}");
  for (const name of NUMBERS) {
    if (typeof stored[name] === "number") $(name).value = stored[name];
    $(name).addEventListener("change", () => localStorage.setItem(STORED, JSON.stringify(sampling())));
  }
  $("settings-open").addEventListener("click", () => {
    $("system").value = chats.system();
    $("settings").showModal();
  });
  $("settings").addEventListener("close", () => chats.setSystem($("system").value.trim()));
  $("export-markdown").addEventListener("click", () => download("markdown"));
  $("export-json").addEventListener("click", () => download("json"));
}
