// The open chat on the screen: asking, answering, the queue, versions, and an empty page's words.

import { fill } from "./answer.js";
import * as attachments from "./attachments.js";
import { downloaded, offer } from "./download.js";
import { draw, drawText, elementOf } from "./message.js";
import { keep, toEnd, toMessage } from "./place.js";
import { sampling } from "./sampling.js";
import { $, arrange, button, count, element, say } from "./show.js";
import { read, save, saveAnswer, saveLast, saveLeaf, saveSystem } from "./store.js";
import { Chat } from "./tree.js";

const CHECKPOINT_MILLISECONDS = 1000;
const DRAFT = "mlxserve-draft";
const BUNDLED = "mlxserve-mini";
const DEMO_IDEAS = [
  "What can you do?", "What is a page?", "Remember the code word plum-42. What is the code word?",
];
const IDEAS = [
  "Explain how a paged KV cache works.", "Write a Python function that parses an ISO date.",
  "What are three good questions to ask a local model?",
];

let chat = new Chat();
let model = null; // its card
let running = null; // { chat, message, stop: AbortController } of the answer that is being written
let unsaved = null; // { chat, message } of the last answer, until the server has all of it
let queue = []; // { text, images }, for the chat that is being answered
let opening = 0;
let onSaved = () => {};
let edited = null; // the question that the composer replaces

export let ownRequest = ""; // id of the last request of this page

export function serve(card) {
  const isNew = card.id !== model?.id || card.max_model_len !== model.max_model_len;
  model = card;
  attachments.serve(card);
  $("model").textContent = card.id;
  $("model").title = card.id;
  if (isNew) drawChat();
}

export const currentId = () => chat.id;
export const system = () => chat.system;
export const whenSaved = (tell) => { onSaved = tell; };

export function setSystem(text) {
  if (text === chat.system) return;
  chat.system = text;
  saveSystem(chat);
}

// ---- chats of the server

async function saved() { // the address keeps the chat over a reload
  if (chat.id !== null) history.replaceState(null, "", "#" + chat.id);
  await onSaved();
}

export async function open(id, messageId = null) { // at a message that was searched for, else at the end
  const number = ++opening;
  let found;
  try {
    found = await read(id);
  } catch (error) {
    if (number === opening) say(error.message, true);
    return;
  }
  if (number !== opening) return;
  leave();
  chat = found;
  history.replaceState(null, "", "#" + id);
  const hit = chat.messages.find((one) => one.id === messageId);
  if (hit && !chat.path().includes(hit)) chat.showBranch(hit);
  drawChat();
  drawQueue();
  if (hit) mark(elementOf(hit)); else toEnd();
  onSaved();
  if (!matchMedia("(min-width: 56rem)").matches) document.body.classList.remove("with-chats");
  $("text").focus();
}

function mark(shown) {
  shown.classList.add("hit");
  toMessage(shown);
}

// The chat that is about to be deleted, if it is open; it is left, and its answer stopped.
export function leaveFor(id) {
  const left = chat;
  if (left.id !== id) return {};
  newChat();
  return left;
}

// ---- the screen

function drawChat() {
  const path = chat.path();
  const acts = { choose: show, edit, regenerate };
  keep(() => arrange($("log"), path.length
    ? path.map((message) => draw(message, chat.versions(message), acts))
    : [welcome()]));
  const { prompt_tokens, completion_tokens } = path.findLast((one) => one.stats.prompt_tokens)?.stats ?? {};
  $("context").textContent = prompt_tokens && model
    ? `${count(prompt_tokens + completion_tokens)} / ${count(model.max_model_len)} tokens` : "";
}

function welcome() {
  const shown = element("div");
  shown.id = "welcome";
  shown.append(element("p", "", "What you write here goes to this server and to no other."));
  if (!model) return shown;
  if (model.id === BUNDLED) {
    shown.append(element("p", "quiet",
      "This is the included model: 6 MB that greet and answer about mlxserve."), offer());
  } else {
    shown.append(element("p", "quiet", `${model.id}, with a context of ${count(model.max_model_len)} tokens.`), ...downloaded(model.id));
  }
  for (const idea of model.id === BUNDLED ? DEMO_IDEAS : IDEAS)
    shown.append(button(idea, () => submit({ text: idea, images: [] })));
  return shown;
}

function drawQueue() {
  $("queue").hidden = !queue.length;
  $("queue").replaceChildren(...queue.map(({ text }, number) => element("li", "", "Next: " + text.slice(0, 80) + " ",
    button("Remove", () => { queue.splice(number, 1); drawQueue(); }, "Remove this message"))));
  $("stop").hidden = !running;
  $("send").textContent = running ? "Queue" : "Send";
}

// ---- asking

function submit(asked) { // by the person who writes
  if (running?.chat === chat) { queue.push(asked); drawQueue(); return; }
  ask(asked);
  toEnd();
}

function ask(asked) {
  const replaced = edited;
  cancelEdit();
  const question = chat.add(replaced ? replaced.parent : chat.leaf, "user", asked.text, asked.images);
  save(chat, question);
  answer(question);
}

async function answer(question) {
  const mine = chat; // what arrives belongs to this chat, whichever is open then
  const message = mine.add(question, "assistant");
  const stop = new AbortController();
  running = { chat: mine, message, stop };
  unsaved = running;
  message.model = model.id;
  message.state = "writing";
  drawChat();
  drawQueue();
  save(mine, message).then(() => { if (mine === chat) saved(); });
  const checkpoints = setInterval(() => saveAnswer(mine, message), CHECKPOINT_MILLISECONDS);
  await fill(message, { model: model.id, messages: mine.wire(question), ...sampling() }, stop.signal,
    () => { if (mine === chat) drawText(message); },
    (id) => { ownRequest = id; });
  clearInterval(checkpoints);
  const isLast = running?.message === message;
  if (isLast) running = null;
  saveAnswer(mine, message).then(() => {
    if (unsaved?.message === message) unsaved = null;
    return onSaved();
  });
  if (mine === chat && isLast) ended(question, message);
}

function ended(question, message) {
  const isEmptyFailure = message.state === "failed" && !message.text && !message.rounds.length;
  if (isEmptyFailure) { // the question goes back to the composer
    chat.leaf = question.parent;
    saveLeaf(chat);
  }
  drawChat();
  if (isEmptyFailure) {
    const failed = draw(message, [message], { regenerate: () => { chat.leaf = question; answer(question); } });
    keep(() => $("log").append(failed));
    give(question);
  }
  $("announce").textContent = message.state === "done" ? "Answer: " + message.text : "The answer ended: " + message.state;
  if (message.state === "done" || message.state === "cut") {
    const next = queue.shift();
    drawQueue();
    if (next !== undefined) ask(next); // sent some time ago: the reader stays
  } else returnQueue();
}

function returnQueue() { // nothing is sent that was not meant for what is there now
  give({ text: queue.map(({ text }) => text).join("\n\n"), images: queue.flatMap(({ images }) => images) });
  queue = [];
  drawQueue();
}

function give({ text, images }) {
  attachments.hold(images);
  if (text) $("text").value = [$("text").value, text].filter(Boolean).join("\n\n");
  fit();
}

function stop() {
  running?.stop.abort();
}

// ---- versions

function show(message) {
  if (running?.chat === chat) return;
  chat.showBranch(message);
  saveLeaf(chat);
  drawChat();
}

function regenerate(message) {
  if (running?.chat === chat) return;
  answer(message.parent);
}

function edit(message) {
  edited = message;
  $("editing").hidden = false;
  attachments.clear();
  attachments.hold(message.images);
  $("text").value = message.text;
  fit();
  $("text").focus();
}

function cancelEdit() {
  if (edited) {
    $("text").value = "";
    attachments.clear();
  }
  edited = null;
  $("editing").hidden = true;
  fit();
}

function leave() { // a running answer ends, in its own chat
  stop();
  running = null;
  returnQueue();
  cancelEdit();
}

function newChat() {
  opening++;
  leave();
  chat = new Chat();
  history.replaceState(null, "", location.pathname);
  onSaved();
  drawChat();
  drawQueue();
  $("text").focus();
}

function fit() { // the composer grows with its text
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
  sessionStorage.setItem(DRAFT, text.value);
}

export function start() {
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    if (!model) return;
    const asked = attachments.withFiles($("text").value.trim());
    if (!asked.text && !asked.images.length) return;
    $("text").value = "";
    fit();
    submit(asked);
  });
  $("text").addEventListener("input", fit);
  $("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.defaultPrevented || $("settings").open || $("tools").open) return;
    if (running) stop(); else cancelEdit();
  });
  $("stop").addEventListener("click", stop);
  $("edit-cancel").addEventListener("click", cancelEdit);
  $("new").addEventListener("click", newChat);
  addEventListener("beforeunload", (event) => { // the browser asks whether to lose what the server does not have yet
    if (chat.path().some(({ id }) => id === null)) event.preventDefault();
  });
  addEventListener("pagehide", () => { if (unsaved) saveLast(unsaved.chat, unsaved.message); });
  $("text").value = sessionStorage.getItem(DRAFT) || "";
  fit();
  drawChat();
  $("text").focus();
}

export async function reopen() { // after a reload
  const id = Number(location.hash.slice(1));
  if (id && chat.id === null && !chat.messages.length) await open(id);
}
