// The dialog: the chat's system prompt, and export. How answers are sampled is in sampling.js.

import * as chats from "./chat.js";
import { $, element, on } from "./show.js";
import { exported } from "./store.js";

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
  on("settings-open", "click", () => {
    $("system").value = chats.system();
    $("settings").showModal();
  });
  on("settings", "close", () => chats.setSystem($("system").value.trim()));
  on("export-markdown", "click", () => download("markdown"));
  on("export-json", "click", () => download("json"));
}
