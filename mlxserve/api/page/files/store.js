// The chats of the server, which are the terminal's, too: reading them, asking in them, and what else is written.

import { ask, json, send } from "./api.js";
import { Chat } from "./tree.js";

const CHATS = "/api/v1/chats";
const MAX_TITLE = 200;

const place = (chat) => `${CHATS}/${chat.id}`;

let listed = { tag: "", data: [] }; // the whole list as it came last

export async function list(words) {
  if (words) return (await json(ask(`${CHATS}?search=${encodeURIComponent(words)}`))).data;
  const reply = await ask(CHATS, { headers: { "if-none-match": listed.tag } });
  if (reply.status !== 304) listed = { tag: reply.headers.get("etag"), ...await reply.json() };
  return listed.data;
}

export const rename = (id, title) => send("PATCH", `${CHATS}/${id}`, { title: title.slice(0, MAX_TITLE) });
export const put = (id, { folder, is_pinned }) => send("PATCH", `${CHATS}/${id}`, { folder, is_pinned });
export const remove = (id) => json(ask(`${CHATS}/${id}`, { method: "DELETE" }));
export const exported = async (id, format) => (await ask(`${CHATS}/${id}/export?format=${format}`)).text();

export async function read(id) {
  const chat = new Chat();
  chat.id = id;
  await readAgain(chat);
  return chat;
}

// What the server has of a chat, into the messages that are here.
export async function readAgain(chat) {
  const found = await json(ask(place(chat)));
  for (let next = found; next.has_more; found.messages.push(...next.messages))
    next = await json(ask(`${place(chat)}?after=${next.messages.at(-1).id}`));
  for (const sent of found.messages) {
    const known = chat.known.get(sent.id);
    // What was followed has its blocks, and is as it was.
    if (!known?.blocks || known.state !== sent.state) chat.take({ ...sent, blocks: undefined });
  }
  takeCard(chat, found);
  chat.draft = found.draft;
}

// The title and the end of the branch that is shown; false if that message is not known here.
export function takeCard(chat, { title, system, leaf_id }) {
  Object.assign(chat, { title, system });
  if (leaf_id !== null && !chat.known.has(leaf_id)) return false;
  chat.leaf = chat.known.get(leaf_id) ?? null;
  return true;
}

export async function create(chat, title) {
  const made = await json(send("POST", CHATS, { title: title.slice(0, MAX_TITLE), system: chat.system }));
  Object.assign(chat, { id: made.id, title: made.title });
}

// Has the server begin an answer. Writes name the end of the branch that is shown here: the server refuses with
// 409 what was meant for another one.
export const begin = (chat, body) =>
  json(send("POST", `${place(chat)}/answers`, { leaf_id: chat.leaf?.id ?? null, ...body }));
export const stop = (chat, message) => ask(`${place(chat)}/answers/${message.id}`, { method: "DELETE" });
export const decide = (chat, message, call_id, decision) =>
  send("POST", `${place(chat)}/answers/${message.id}/decision`, { call_id, decision });
export const saveSystem = (chat) => send("PATCH", place(chat), { system: chat.system });
export const saveLeaf = (chat, before) =>
  send("PATCH", place(chat), { leaf_id: chat.leaf.id, seen_leaf_id: before?.id ?? null });
export const saveDraft = (chat, draft, options = {}) => send("PATCH", place(chat), { draft }, options);

// The text of an answer that was followed: here are its blocks.
export async function textOf(chat, message) {
  if (message.text === null)
    message.text = (await json(ask(`${place(chat)}?after=${message.id - 1}`))).messages.find(({ id }) => id === message.id).text;
  return message.text;
}
