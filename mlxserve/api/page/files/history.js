// The list of chats: search, open, rename, delete.

import { Refused } from "./api.js";
import * as chats from "./chat.js";
import { $, arrange, button, count, element, setText, visible } from "./show.js";
import { list, remove, rename } from "./store.js";

const rows = new Map(); // chat's id -> { card, shown }: what the server said last, and its row
let asked = 0; // the last question to the server: an older reply comes too late

export async function refresh() {
  const number = ++asked;
  let found;
  try {
    found = await list($("search").value.trim());
  } catch (error) {
    if (number !== asked) return;
    const reason = error instanceof Refused ? error.message : "The server does not answer.";
    redraw([element("li", "quiet", reason)]);
    return;
  }
  if (number !== asked) return;
  const none = $("search").value.trim() ? "No chat has these words." : "No chats yet.";
  redraw(found.length ? found.map(row) : [element("li", "quiet", none)]);
}

function redraw(lines) { // the keyboard stays where it was; it goes to the search if its chat is gone
  const held = document.activeElement.closest("#chat-list li") && document.activeElement;
  arrange($("chat-list"), lines);
  if (held && document.activeElement !== held) (held.isConnected ? held : $("search")).focus({ preventScroll: true });
}

// A chat keeps its row: a button that is pressed when the list is drawn again would lose its click.
function row(card) {
  const one = rows.get(card.id) ?? made();
  rows.set(card.id, one);
  one.card = card;
  const [open, rename, remove] = one.shown.children;
  const title = visible(card.title);
  const when = new Date(card.updated_at * 1000);
  const [name, place] = open.children;
  setText(name, title);
  setText(place, card.excerpt ? `${when.toLocaleDateString()} · ${visible(card.excerpt)}` : when.toLocaleString());
  open.ariaCurrent = card.id === chats.currentId() ? "true" : null;
  rename.setAttribute("aria-label", "Rename " + title);
  remove.setAttribute("aria-label", "Delete " + title);
  return one.shown;
}

function made() {
  const open = button("", () => openAt(one.card));
  open.classList.add("open");
  open.append(element("span", "title"), element("span", "quiet"));
  const one = { card: null, shown: element("li", "", open,
    button("✎", () => renamed(one.card)), button("✕", () => removed(one.card))) };
  return one;
}

function openAt({ id, message_id }) { // at the message that was searched for
  const [words] = $("search").value.trim().split(/\s+/);
  chats.open(id, words ? message_id : null, words);
}

async function renamed(card) {
  const title = prompt("A new name for this chat", card.title);
  if (title?.trim()) await attempt(() => rename(card.id, title.trim()));
}

async function removed(card) {
  if (!confirm(`Delete “${visible(card.title)}”, with the cached pages of its prompts? This cannot be undone.`)) return;
  chats.leaveFor(card.id);
  let reply = null;
  await attempt(async () => { reply = await remove(card.id); });
  if (!reply) return;
  rows.delete(card.id);
  $("chats-note").textContent = told(reply.cache);
}

function told({ pages, pages_on_disk, problem, models_not_loaded }) {
  const stay = "stay on disk until they are the oldest there, or until `mlxserve cache clear`";
  if (problem) return `Deleted, but its cached pages ${stay}: ${problem}`;
  const words = `Deleted, with ${count(pages)} cached pages in memory and ${count(pages_on_disk)} on disk.`;
  const others = models_not_loaded.map(visible).join(", ");
  return others ? `${words} Pages of ${others}, which is not loaded, ${stay}.` : words;
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
