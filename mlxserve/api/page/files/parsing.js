// The blocks of stored texts, which the server parses: many at once, those at the end of a chat first.

import { send } from "./api.js";

const FIRST = 12; // texts of the first request: about what a window shows
const MOST = 500; // texts of one request
const MOST_CHARACTERS = 400_000;
const MAX_KEPT = 4_000_000; // characters of texts whose blocks are kept, for chats that are opened again
const blocks = new Map(); // text -> its blocks
let size = 0;
let wanted = new Map(); // text -> the functions to call once it has blocks
let isAsking = false;

// The blocks of a message's text, or null, and then `tell` is called once there are some.
export function parsed({ text }, tell) {
  if (!text) return [];
  if (blocks.has(text)) return blocks.get(text);
  if (!wanted.has(text)) wanted.set(text, []);
  wanted.get(text).push(tell);
  if (!isAsking) {
    isAsking = true;
    queueMicrotask(ask); // all that is drawn now comes together
  }
  return null;
}

async function ask() {
  for (let most = FIRST; wanted.size; most = MOST) {
    const texts = newest(most);
    const tells = texts.map((text) => wanted.get(text));
    for (const text of texts) wanted.delete(text);
    let found = [];
    try {
      found = (await (await send("POST", "/api/v1/render", { texts })).json()).data;
    } catch { /* they stay plain until the chat is opened again */ continue; }
    texts.forEach((text, at) => keep(text, found[at]));
    for (const tell of tells.flat()) tell();
  }
  isAsking = false;
}

function newest(most) {
  const texts = [];
  let characters = 0;
  for (const text of [...wanted.keys()].reverse()) {
    characters += text.length;
    if (texts.length && (texts.length === most || characters > MOST_CHARACTERS)) break;
    texts.push(text);
  }
  return texts;
}

function keep(text, nodes) {
  blocks.set(text, nodes);
  size += text.length;
  for (const [old] of blocks) {
    if (size <= MAX_KEPT || old === text) break;
    blocks.delete(old);
    size -= old.length;
  }
}
