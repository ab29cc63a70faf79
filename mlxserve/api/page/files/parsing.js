// The blocks of stored texts, which the server parses: many at once, those at the end of a chat first.

import { json, send } from "./api.js";

const FIRST = 12; // texts of the first request: about what a window shows
const MOST = 500; // texts of one request
const MOST_CHARACTERS = 400_000;
const MAX_KEPT = 4_000_000; // characters of texts whose blocks are kept, for chats that are opened again
const blocks = new Map(); // text -> its blocks
let size = 0;
const wanted = new Map(); // text -> the functions to call once it has blocks
let underway = new Map(); // the same, of the texts that the server parses now
let isAsking = false;

// The blocks of a message's text, or null, and then `tell` is called once there are some.
export function parsed({ text }, tell) {
  if (!text) return [];
  if (blocks.has(text)) return blocks.get(text);
  const tells = underway.get(text) ?? wanted.get(text) ?? [];
  tells.push(tell);
  if (!underway.has(text)) wanted.set(text, tells);
  if (!isAsking) {
    isAsking = true;
    queueMicrotask(ask); // all that is drawn now comes together
  }
  return null;
}

async function ask() {
  for (let most = FIRST; wanted.size; most = MOST) {
    const texts = newest(most);
    underway = new Map(texts.map((text) => [text, wanted.get(text)]));
    for (const text of texts) wanted.delete(text);
    try {
      const { data } = await json(send("POST", "/api/v1/render", { texts }));
      texts.forEach((text, at) => keep(text, data[at]));
    } catch { underway.clear(); /* they stay plain until they are drawn again */ }
    const tells = [...underway.values()].flat();
    underway = new Map();
    for (const tell of tells) tell();
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
