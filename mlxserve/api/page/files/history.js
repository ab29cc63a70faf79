// The list of chats: search, open, pin, rename, put into folders, delete.

import { reasonOf } from "./api.js";
import * as chats from "./chat.js";
import { grouped } from "./groups.js";
import { menuButton } from "./menu.js";
import { $, arrange, button, count, element, on, setText, visible } from "./show.js";
import { list, put, remove, rename } from "./store.js";

const rows = new Map(); // chat's id -> { card, shown }: what the server said last, and its row
const SOON = 100; // milliseconds in which changes are shown together
let folders = []; // names, as the whole list has them
let asked = 0; // the last question to the server: an older reply comes too late
let due = null; // the timer of the next question

export async function refresh() {
  const number = ++asked;
  let found;
  try {
    found = await list($("search").value.trim());
  } catch (error) {
    if (number !== asked) return;
    redraw(() => [element("li", "quiet", reasonOf(error))]);
    return;
  }
  if (number !== asked) return;
  const isSearch = $("search").value.trim() !== "";
  if (!isSearch) folders = [...new Set(found.map(({ folder }) => folder))].filter(Boolean).sort((one, two) => one.localeCompare(two));
  const none = isSearch ? "No chat has these words." : "No chats yet.";
  redraw(() => !found.length ? [element("li", "quiet", none)] : isSearch ? found.map(row) : grouped(found, row));
}

function refreshSoon() {
  due ??= setTimeout(() => { due = null; refresh(); }, SOON);
}

function redraw(lines) { // the keyboard stays where it was; it goes to the search if its chat is gone
  const held = document.activeElement.closest("#chat-list li") && document.activeElement;
  arrange($("chat-list"), lines());
  if (held && document.activeElement !== held) (held.isConnected ? held : $("search")).focus({ preventScroll: true });
}

// A chat keeps its row: a button that is pressed when the list is drawn again would lose its click.
function row(card) {
  const one = rows.get(card.id) ?? made();
  rows.set(card.id, one);
  one.card = card;
  const [open, menu] = one.shown.children;
  const [name, facts] = open.children;
  const title = visible(card.title);
  const when = new Date(card.updated_at * 1000);
  setText(name, title);
  const folder = card.is_pinned && card.folder ? visible(card.folder) + " · " : "";
  setText(facts, card.excerpt ? `${when.toLocaleDateString()} · ${visible(card.excerpt)}` : folder + when.toLocaleString());
  mark(one);
  menu.ariaLabel = "Menu of " + title;
  return one.shown;
}

function mark({ card, shown }) {
  shown.firstChild.ariaCurrent = card.id === chats.currentId() ? "true" : null;
}

function made() {
  const open = button("", () => openAt(one.card));
  open.classList.add("open");
  open.append(element("span", "title short"), element("span", "quiet short"));
  const one = { shown: element("li", "", open, menuButton(() => acts(one.card))) };
  return one;
}

function acts(card) {
  const { id, is_pinned, folder: own } = card;
  return [
    [is_pinned ? "Unpin" : "Pin", () => attempt(() => put(id, { is_pinned: !is_pinned }))],
    ["Rename", () => renamed(card)],
    ...(folders.length ? ["", ...folders] : []).map((folder) => [
      folder ? "In " + visible(folder) : "In no folder", () => attempt(() => put(id, { folder })), folder === own]),
    ["New folder", () => moved(card)],
    ["Delete", () => removed(card)],
  ];
}

async function moved({ id, folder }) {
  const name = prompt("The name of a folder for this chat", folder);
  if (name?.trim()) await attempt(() => put(id, { folder: name.trim() }));
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
  } catch (error) {
    alert(error.message);
  } finally {
    await refresh();
  }
}

export function start() {
  on("search", "input", refresh);
  addEventListener("focus", refresh);
  chats.whenSaved(refreshSoon);
  chats.whenShown(() => rows.forEach(mark));
}
