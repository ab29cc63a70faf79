// Shortcuts, which one dialog tells. Those that the terminal has as well are the same there.

import { newChat } from "./chat.js";
import { $, on } from "./show.js";

export function start({ engine, search }) {
  const acts = { F1: show, F4: engine, "Ctrl+o": search, "Alt+n": newChat };
  document.addEventListener("keydown", (event) => {
    if (event.isComposing || document.querySelector("dialog[open]")) return;
    const act = acts[(event.ctrlKey ? "Ctrl+" : "") + (event.altKey ? "Alt+" : "") + event.key];
    if (!act) return;
    event.preventDefault();
    act();
  });
  on("keys-open", "click", () => {
    $("settings").close();
    show();
  });
}

function show() {
  $("keys").showModal();
}
