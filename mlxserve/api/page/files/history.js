// The list of chats: search, open, rename, delete.

import { Refused } from "./api.js";
import * as chats from "./chat.js";
import { $, button, element, visible } from "./show.js";
import { list, remove, rename } from "./store.js";

let asked = 0; // the last question to the server: an older reply comes too late

export async function refresh() {
  const number = ++asked;
  let found;
  try {
    found = await list($("search").value.trim());
  } catch (error) {
    if (number !== asked) return;
    const reason = error instanceof Refused ? error.message : "The server does not answer.";
    $("chat-list").replaceChildren(element("li", "quiet", reason));
    return;
  }
  if (number !== asked) return;
  const none = $("search").value.trim() ? "No chat has these words." : "No chats yet.";
  $("chat-list").replaceChildren(...(found.length ? found.map(row) : [element("li", "quiet", none)]));
}

function row(card) {
  const title = visible(card.title);
  const open = button("", () => chats.open(card.id), "");
  open.className = "open";
  open.append(element("span", "title", title),
    element("span", "quiet", card.excerpt ? visible(card.excerpt) : new Date(card.updated_at * 1000).toLocaleString()));
  if (card.id === chats.currentId()) open.setAttribute("aria-current", "true");
  return element("li", "", open,
    button("✎", () => renamed(card), "Rename " + title), button("✕", () => removed(card), "Delete " + title));
}

async function renamed(card) {
  const title = prompt("A new name for this chat", card.title);
  if (title?.trim()) await attempt(() => rename(card.id, title.trim()));
}

async function removed(card) {
  if (!confirm(`Delete “${visible(card.title)}”? This cannot be undone.`)) return;
  if (await attempt(() => remove(card.id))) chats.forget(card.id);
}

async function attempt(work) {
  try {
    await work();
    return true;
  } catch (error) {
    alert(error.message);
    return false;
  } finally {
    await refresh();
  }
}

export function start() {
  $("search").addEventListener("input", refresh);
  addEventListener("focus", refresh);
  chats.whenSaved(refresh);
}
