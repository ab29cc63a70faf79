// The list of chats in groups that open and close: pinned ones, folders, then days.

import { arrange, element, setText, visible } from "./show.js";

const CLOSED = "mlxserve-closed-groups";
const DAY = 24 * 3600; // seconds
const shown = new Map(); // key -> { item, name, rows }
const closed = new Set(JSON.parse(localStorage.getItem(CLOSED) ?? "[]"));

// The elements of the list. `cards` come with the pinned ones first, then by time; `row` makes a card's element.
export function grouped(cards, row) {
  const groups = new Map();
  for (const card of cards) {
    const [key, name] = groupOf(card);
    if (!groups.has(key)) groups.set(key, { name, rows: [] });
    groups.get(key).rows.push(row(card));
  }
  const keys = [...groups.keys()];
  const folders = keys.filter((key) => key.startsWith("folder:")).sort((one, two) => one.localeCompare(two));
  const others = keys.filter((key) => key.startsWith("day:"));
  return [...keys.filter((key) => key === "pinned"), ...folders, ...others].map((key) => drawn(key, groups.get(key)));
}

function groupOf({ is_pinned, folder, updated_at }) {
  if (is_pinned) return ["pinned", "Pinned"];
  if (folder) return ["folder:" + folder, visible(folder)];
  const today = new Date().setHours(0, 0, 0, 0) / 1000;
  const days = [[today, "Today"], [today - DAY, "Yesterday"], [today - 7 * DAY, "Last 7 days"], [-Infinity, "Earlier"]];
  const [, name] = days.find(([from]) => updated_at >= from);
  return ["day:" + name, name];
}

function drawn(key, { name, rows }) {
  if (!shown.has(key)) shown.set(key, made(key));
  const group = shown.get(key);
  setText(group.name, name);
  arrange(group.rows, rows);
  return group.item;
}

function made(key) {
  const name = element("summary", "quiet");
  const rows = element("ul", "list");
  const box = element("details", "", name, rows);
  box.open = !closed.has(key);
  box.addEventListener("toggle", () => {
    if (box.open) closed.delete(key); else closed.add(key);
    localStorage.setItem(CLOSED, JSON.stringify([...closed]));
  });
  return { item: element("li", "group", box), name, rows };
}
