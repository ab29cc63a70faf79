// Keeps chats on the server, in the terminal's file. What cannot be saved now is saved with what follows.

import { ask, send } from "./api.js";
import { $ } from "./show.js";
import { Chat } from "./tree.js";

const CHATS = "/api/v1/chats";
const KEEPALIVE_SIZE = 60_000; // the most that browsers send after the page is gone
const MAX_TITLE = 200;
const writing = new Set(); // of all chats: promises that never fail

const json = async (reply) => (await reply).json();

export const list = async (words) =>
  (await json(ask(CHATS + (words ? "?search=" + encodeURIComponent(words) : "")))).data;
export const rename = (id, title) => send("PATCH", `${CHATS}/${id}`, { title: title.slice(0, MAX_TITLE) });
export const remove = (id) => json(ask(`${CHATS}/${id}`, { method: "DELETE" }));
export const exported = async (id, format) => (await ask(`${CHATS}/${id}/export?format=${format}`)).text();

export async function read(id) {
  await Promise.all(writing); // it may be the chat that was left just now
  const found = await json(ask(`${CHATS}/${id}`));
  for (let next = found; next.has_more; found.messages.push(...next.messages))
    next = await json(ask(`${CHATS}/${id}?after=${next.messages.at(-1).id}`));
  const chat = new Chat();
  Object.assign(chat, { id: found.id, title: found.title, system: found.system, leftOut: found.left_out });
  const known = new Map();
  for (const { parent_id, ...one } of found.messages) {
    const message = { ...one, parent: known.get(parent_id) ?? null };
    if (message.state === "writing") message.state = "stopped"; // nothing here goes on with it
    known.set(message.id, message);
    chat.messages.push(message);
  }
  chat.leaf = known.get(found.leaf_id) ?? null;
  return chat;
}

// One after the other, so that a message is never written before its parent.
function later(chat, work) {
  const write = chat.writes.then(() => (chat.isGone ? null : work())).then(() => tell(""), (error) => tell(error.message));
  chat.writes = write;
  writing.add(write);
  return write.finally(() => writing.delete(write));
}

function tell(problem) {
  $("unsaved").textContent = problem && "This chat is not saved: " + problem;
  $("unsaved").hidden = !problem;
}

// The message and those above it, as far as the server does not have them.
export const save = (chat, message) => later(chat, async () => {
  if (chat.id === null) {
    const title = chat.path(message)[0].text.slice(0, MAX_TITLE);
    const made = await json(send("POST", CHATS, { title, system: chat.system }));
    Object.assign(chat, { id: made.id, title: made.title });
  }
  for (const one of chat.path(message)) {
    if (one.id !== null) continue;
    const { role, text, images, state, model } = one;
    const parent_id = one.parent ? one.parent.id : null;
    one.id = (await json(send("POST", `${CHATS}/${chat.id}/messages`, { role, text, images, state, model, parent_id }))).id;
  }
});

const place = (chat, answer) => `${CHATS}/${chat.id}/messages/${answer.id}`;

function content({ text, thinking, state, error, stats, rounds }) {
  const { prompt_tokens, cached_tokens, completion_tokens, accepted_tokens, first_token_seconds, decode_seconds } = stats;
  return { text, thinking, state, error: error.slice(0, 1000), rounds,
    stats: { prompt_tokens, cached_tokens, completion_tokens, accepted_tokens, first_token_seconds, decode_seconds } };
}

export async function saveAnswer(chat, answer) {
  await save(chat, answer);
  return later(chat, () => send("PATCH", place(chat, answer), content(answer)));
}

export const saveSystem = (chat) =>
  later(chat, async () => { if (chat.id !== null) await send("PATCH", `${CHATS}/${chat.id}`, { system: chat.system }); });

export const saveLeaf = (chat) => later(chat, async () => {
  if (chat.leaf && chat.leaf.id !== null) await send("PATCH", `${CHATS}/${chat.id}`, { leaf_id: chat.leaf.id });
});

// While the page goes away. A longer text is there as it was at the last checkpoint.
export function saveLast(chat, answer) {
  if (answer.id === null || JSON.stringify(content(answer)).length > KEEPALIVE_SIZE / 4) return;
  const state = answer.state === "writing" ? "stopped" : answer.state;
  send("PATCH", place(chat, answer), { ...content(answer), state }, { keepalive: true }).catch(() => {});
}
