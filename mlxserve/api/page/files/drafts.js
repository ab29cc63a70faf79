// What is typed and not sent yet, by chat: on the server, and in this tab for a chat that is not there yet.

import { $ } from "./show.js";
import { saveDraft } from "./store.js";

const NEW = "mlxserve-draft";
const MILLISECONDS = 500; // without a key
let waiting = null; // { chat, timer } of a draft that the server does not have

export function keep(chat) {
  const text = $("text").value;
  if (chat.id === null) { sessionStorage.setItem(NEW, text); return; }
  if (text === chat.draft) return;
  chat.draft = text;
  clearTimeout(waiting?.timer);
  waiting = { chat, timer: setTimeout(flush, MILLISECONDS) };
}

// Sends a draft that waits; `options` for a page that goes away.
export function flush(options = {}) {
  if (!waiting) return;
  const { chat, timer } = waiting;
  clearTimeout(timer);
  waiting = null;
  saveDraft(chat, chat.draft, options).catch(() => { /* it is in the field, and sent with the next key */ });
}

// While the page goes away: what the server may get later than the question for the chat is in this tab as well.
export function leave() {
  if (waiting) sessionStorage.setItem(`${NEW}-${waiting.chat.id}`, waiting.chat.draft);
  flush({ keepalive: true });
}

export function draftOf(chat) {
  if (chat.id === null) return sessionStorage.getItem(NEW) ?? "";
  const last = `${NEW}-${chat.id}`;
  chat.draft = sessionStorage.getItem(last) ?? chat.draft;
  sessionStorage.removeItem(last);
  return chat.draft;
}

// The question was sent: the server has dropped its draft.
export function sent(chat) {
  if (waiting?.chat === chat) { clearTimeout(waiting.timer); waiting = null; }
  chat.draft = "";
  sessionStorage.removeItem(NEW);
}
