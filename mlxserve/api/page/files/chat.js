// The open chat on the screen: asking, what the server tells of it, the queue, versions, and an empty page's words.

import { Refused, reasonOf } from "./api.js";
import * as attachments from "./attachments.js";
import * as compare from "./compare.js";
import { downloaded, offer } from "./download.js";
import * as drafts from "./drafts.js";
import { follow, leave as leaveFeed, patched } from "./follow.js";
import { draw, drawText, elementOf, whenParsed } from "./message.js";
import { keep, toEnd, toWords } from "./place.js";
import * as prompts from "./prompts.js";
import { sampling } from "./sampling.js";
import { $, arrange, button, count, element, note, on, say, tell, wait } from "./show.js";
import * as store from "./store.js";
import * as tools from "./tools.js";
import { Chat } from "./tree.js";

const BUNDLED = "mlxserve-mini";
const OTHER_SECONDS = 1; // between looks at an answer that another program writes
const DEMO_IDEAS = [
  "What can you do?", "What is a page?", "Remember the code word plum-42. What is the code word?",
];
const IDEAS = [
  "Explain how a paged KV cache works.", "Write a Python function that parses an ISO date.",
  "What are three good questions to ask a local model?",
];

let chat = new Chat();
let model = null; // its card
let asking = 0; // questions on their way to the server
let queue = []; // { text, images } for the open chat, once its answer has ended
let opening = 0;
let onSaved = () => {}; // the list of chats has changed
let onShown = () => {}; // another chat of it is shown
let sought = null; // { message, words } of a search whose hit is shown
let edited = null; // { message, draft, images }: the question that the composer replaces, and what stood there
let refused = null; // an answer that failed before it began: it is shown below the branch
const mine = new Set(); // ids of the questions of this page

export let ownRequest = ""; // id of the last request of this chat

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
export const whenShown = (tell) => { onShown = tell; };

export async function setSystem(text) {
  if (text === chat.system) return;
  chat.system = text;
  if (chat.id !== null) await attempt(() => store.saveSystem(chat));
}

// What fails is said below the messages.
async function attempt(work) {
  try {
    await work();
    unsaved("");
  } catch (error) {
    unsaved(reasonOf(error));
  }
}

const unsaved = (problem) => note("unsaved", problem && "This chat is not saved: " + problem);

// ---- addresses: #12 is a chat, #12/345 a message of it

const addressOf = (id, messageId) => (id === null ? location.pathname : `#${id}${messageId ? "/" + messageId : ""}`);

function address(id, messageId = null) { // a step of the browser's history
  const wanted = addressOf(id, messageId);
  if (wanted !== (location.hash || location.pathname)) history.pushState(null, "", wanted);
}

function title() {
  document.title = chat.title ? `${chat.title} – mlxserve` : "mlxserve";
}

async function go() { // where the address says
  const [id, messageId] = location.hash.slice(1).split("/").map(Number);
  if (!id) { if (chat.id !== null) empty(); return; }
  if (id !== chat.id || messageId) await open(id, messageId || null);
}

export async function reopen() { // after a reload, or once the server answers again
  if (chat.id === null && !chat.messages.length) await go();
  if (chat.id === null) followChat();
}

export async function open(id, messageId = null, words = "") { // at a message that was searched for, else at the end
  const number = ++opening;
  let found;
  try {
    found = await store.read(id);
  } catch (error) {
    if (number === opening) say(error.message, true);
    return;
  }
  if (number !== opening) return;
  leave();
  chat = found;
  address(id, messageId);
  const hit = chat.known.get(messageId);
  if (hit && !chat.path().includes(hit)) {
    const before = chat.leaf;
    chat.showBranch(hit);
    await saveLeaf(before);
  }
  write(drafts.draftOf(chat));
  drawChat();
  sought = null;
  if (hit) seek(hit, words); else toEnd();
  followChat();
  onShown();
  if (!matchMedia("(min-width: 56rem)").matches) document.body.classList.remove("with-chats");
  $("text").focus();
}

function seek(message, words) { // again once its text has its marks
  sought = { message, words };
  elementOf(message).classList.add("hit");
  toWords(elementOf(message), words);
}

// The chat that was deleted, if it is open, is left.
export function leaveFor(id) {
  if (chat.id === id) newChat();
}

// ---- what the server tells

function followChat() {
  const open = chat;
  follow(open.id, async (event, data) => { if (open === chat) await heard[event]?.(data); },
    (error) => { if (open === chat && open.id !== null && error instanceof Refused && error.status !== 503) unsaved(error.message); });
}

const heard = {
  list: () => onSaved(),
  async state({ chat: card, answer }) {
    onSaved(); // the list may have changed meanwhile
    if (!card) return; // it is the list's
    const written = chat.known.get(answer?.id);
    if (!store.takeCard(chat, card) || (answer && !written) || chat.messages.some((one) => one.state === "writing" && one !== written))
      await store.readAgain(chat);
    store.takeCard(chat, card);
    const message = chat.known.get(answer?.id);
    if (message) {
      Object.assign(message, { state: "writing", rounds: answer.rounds, thinking: answer.thinking, blocks: answer.blocks });
      if (message.rounds.length || answer.blocks.length) message.text = null;
      if (answer.question) confirmCall(message, answer.question);
    } else if (chat.writing && !asking) lookAgain(chat);
    unsaved("");
    drawChat();
  },
  async message(sent) {
    if (sent.is_left_out || !chat.isWithin(sent)) {
      if (!asking) await store.readAgain(chat); // else it is in the reply
    } else {
      const images = chat.known.get(sent.id)?.images;
      const message = chat.take({ ...sent, blocks: sent.state === "writing" ? [] : undefined });
      if (images) message.images = images;
    }
    drawChat();
  },
  async chat(card) {
    if (!store.takeCard(chat, card) && !asking) {
      await store.readAgain(chat);
      store.takeCard(chat, card);
    }
    title();
    drawChat();
    onSaved();
  },
  request({ request_id }) { // the server has started its tools
    ownRequest = request_id;
    tools.refresh();
  },
  thinking: ({ id, text }) => change(id, (one) => { one.thinking += text; }),
  round: ({ id, index, round }) => change(id, (one) => {
    if (index >= one.rounds.length) Object.assign(one, { text: null, thinking: "", blocks: [] });
    one.rounds = [...one.rounds.slice(0, index), round, ...one.rounds.slice(index + 1)];
  }),
  blocks: ({ id, patches }) => change(id, (one) => {
    one.text = null;
    one.blocks = patched(one.blocks ?? [], patches);
  }),
  question: (asked) => { const message = chat.known.get(asked.id); if (message) confirmCall(message, asked); },
  decided: () => tools.close(),
  unsaved: ({ problem }) => unsaved(problem),
  end(end) {
    const message = chat.known.get(end.id);
    if (!message) return;
    Object.assign(message, end);
    for (const { calls } of message.rounds)
      for (const call of calls) if (call.state === "asked" || call.state === "running") call.state = "stopped";
    tools.close();
    ended(message);
  },
  deleted() {
    newChat();
    onSaved();
  },
};

function change(id, work) {
  const message = chat.known.get(id);
  if (!message) return;
  work(message);
  if (elementOf(message)) drawText(message);
}

function confirmCall(message, { call_id, name, description, arguments: written }) {
  const open = chat;
  tools.confirm({ name, description, arguments: written }, (decision) =>
    store.decide(open, message, call_id, decision).catch((error) => tell(error.message)));
}

async function lookAgain(open) { // the terminal writes this answer
  await wait(OTHER_SECONDS);
  if (open !== chat || open.writing?.blocks) return; // it is followed now
  await attempt(() => store.readAgain(open));
  if (open !== chat) return;
  drawChat();
  if (open.writing && !open.writing.blocks) lookAgain(open);
}

// ---- the screen

export function drawChat() {
  const path = chat.path();
  const acts = { choose: show, edit, regenerate, goOn, textOf: (message) => store.textOf(chat, message), isLast: (message) => message === chat.leaf };
  const below = refused && !path.includes(refused) ? [refused] : [];
  const versions = (message) => (below.includes(message) ? [message] : chat.versions(message));
  keep(() => arrange($("log"), path.length || below.length
    ? compare.arranged([...path, ...below], versions, (message) => draw(message, versions(message), acts), show)
    : [welcome()]));
  const { prompt_tokens, completion_tokens } = path.findLast((one) => one.stats.prompt_tokens)?.stats ?? {};
  $("context").textContent = prompt_tokens && model
    ? `${count(prompt_tokens + completion_tokens)} / ${count(model.max_model_len)} tokens` : "";
  title();
  drawQueue();
}

function welcome() {
  const shown = element("div");
  shown.id = "welcome";
  shown.append(element("p", "", "What you write here goes to this server and to no other."));
  if (!model) return shown;
  if (model.id === BUNDLED) {
    shown.append(element("p", "quiet",
      "This included model of 6 MB answers questions about mlxserve and little else."), offer());
  } else {
    shown.append(element("p", "quiet", `${model.id}, with a context of ${count(model.max_model_len)} tokens.`), ...downloaded(model.id));
  }
  for (const idea of model.id === BUNDLED ? DEMO_IDEAS : IDEAS)
    shown.append(button(idea, () => submit({ text: idea, images: [] })));
  shown.append(...prompts.beginnings());
  return shown;
}

function drawQueue() {
  const isBusy = chat.writing !== null || asking > 0;
  $("queue").hidden = !queue.length;
  $("queue").replaceChildren(...queue.map(({ text }, number) => element("li", "", "Next: " + text.slice(0, 80) + " ",
    button("Remove", () => { queue.splice(number, 1); drawQueue(); }, "Remove this message"))));
  $("composer").ariaBusy = asking > 0;
  $("stop").hidden = !isBusy;
  $("send").textContent = isBusy ? "Queue" : "Send";
}

// ---- asking

function submit(asked) { // by the person who writes
  if (chat.writing || asking) { queue.push(asked); drawQueue(); return; }
  ask(asked, true);
}

function ask(asked, isTyped) {
  const replaced = edited?.message;
  if (edited) endEdit();
  const parent = replaced ? replaced.parent : chat.leaf;
  begin({ text: asked.text, images: asked.images.map(({ name, url }) => ({ name, url })), parent_id: parent?.id ?? null }, asked, isTyped);
}

// Has the server begin an answer. What it refuses goes back to the composer.
async function begin(body, asked = null, isTyped = false) {
  const open = chat;
  asking++;
  refused = null;
  drawQueue();
  try {
    if (open.id === null) await created(open, asked.text);
    const { question, answer } = await store.begin(open, { model: model.id, ...body, ...sampling() });
    if (question) {
      mine.add(question.id);
      compare.begun(question);
      open.take({ ...question, images: asked.images });
      drafts.sent(open);
    }
    if (!open.known.has(answer.id)) open.leaf = open.take({ ...answer, blocks: [] }); // else its events came first
    if (refused && question && refused.parent?.id === question.id) give(asked);
    unsaved("");
  } catch (error) {
    if (open === chat) await notBegun(open, asked, error);
    return;
  } finally {
    asking--;
    if (open === chat) drawChat();
  }
  if (open !== chat) return;
  if (isTyped) toEnd();
  onSaved();
  askNext(); // the answer may have ended before the reply to its question
}

async function created(open, text) {
  await store.create(open, text);
  if (open !== chat) return;
  address(open.id);
  followChat();
}

async function notBegun(open, asked, error) {
  if (asked) give(asked);
  if (error.status !== 409) unsaved(reasonOf(error));
  else { // both sides are shown: what was written elsewhere, and what was not sent
    await attempt(() => store.readAgain(open));
    tell("This chat has gone on elsewhere, as shown above. What you wrote was not sent; send it again to add it below.");
  }
}

function ended(message) {
  const isEmptyFailure = message.state === "failed" && !message.blocks?.length && !message.text && !message.rounds.length;
  if (isEmptyFailure) { // the server shows the branch before; a question without an answer goes back to the composer
    refused = message;
    const other = chat.versions(message).findLast((one) => one !== message);
    if (!other && mine.has(message.parent?.id)) give(message.parent);
    if (chat.leaf === message && other) chat.showBranch(other);
    else if (chat.leaf === message) chat.leaf = message.parent?.parent ?? null;
  }
  drawChat();
  $("announce").textContent = message.state === "done" ? "Answer: " + wordsOf(elementOf(message)) : "The answer ended: " + message.state;
  askNext();
}

function askNext() { // the second model, then what was queued, once the answer before it is there
  if (chat.writing || asking) return;
  const other = compare.next(chat);
  if (other) { begin(other); return; }
  if (!queue.length) return;
  if (refused || !["done", "cut"].includes(chat.leaf?.state)) { returnQueue(); return; }
  const next = queue.shift();
  drawQueue();
  ask(next, false); // sent some time ago: the reader stays
}

function wordsOf(shown) { // without the bars above code
  const body = shown?.querySelector(".body").cloneNode(true);
  body?.querySelectorAll(".head").forEach((one) => one.remove());
  return [...(body?.childNodes ?? [])].map((one) => one.textContent).join("\n");
}

function returnQueue() { // nothing is sent that was not meant for what is there now
  if (!queue.length) return;
  give({ text: queue.map(({ text }) => text).join("\n\n"), images: queue.flatMap(({ images }) => images) });
  queue = [];
  drawQueue();
}

function give({ text, images }) {
  attachments.hold(images);
  write([$("text").value, text].filter(Boolean).join("\n\n"));
  keepDraft();
}

function stop() {
  const message = chat.writing;
  tools.close(); // what it asks is not decided
  if (message) store.stop(chat, message).catch((error) => { if (error.status !== 404) tell(error.message); });
}

// ---- versions

async function show(message) {
  if (chat.writing) return;
  const before = chat.leaf;
  chat.showBranch(message);
  drawChat();
  await saveLeaf(before);
}

async function saveLeaf(before) {
  const open = chat;
  if (chat.leaf === before) return;
  await attempt(async () => {
    try {
      await store.saveLeaf(open, before);
    } catch (error) {
      if (error.status !== 409) throw error;
      await store.readAgain(open); // it has gone on elsewhere
      if (open === chat) drawChat();
    }
  });
}

function regenerate(message) {
  if (chat.writing || asking) return;
  const path = chat.path();
  const later = path.length - 1 - path.indexOf(message);
  if (path.includes(message) && later > 0)
    tell(`${later} later ${later === 1 ? "message stays" : "messages stay"} with the version before; ‹ shows them.`);
  begin({ parent_id: message.parent.id, ...compare.modelOf(message) });
}

function goOn(message) {
  if (!chat.writing && !asking) begin({ continues: message.id, ...compare.modelOf(message) });
}

function edit(message) {
  const before = edited ?? { draft: $("text").value, images: attachments.images() };
  edited = { ...before, message };
  $("editing").hidden = false;
  attachments.replace(message.images);
  write(message.text);
  $("text").focus();
}

function endEdit() { // what stood in the composer before is there again
  const { draft, images } = edited;
  edited = null;
  $("editing").hidden = true;
  attachments.replace(images);
  write(draft);
}

function leave() { // a running answer goes on in the server
  returnQueue();
  if (edited) endEdit();
  drafts.keep(chat);
  drafts.flush();
  attachments.replace([]);
  prompts.left();
  leaveFeed();
  tools.close();
  unsaved("");
  refused = null;
}

function empty() { // a chat that is not on the server yet
  opening++;
  leave();
  chat = new Chat();
  write(drafts.draftOf(chat));
  followChat();
  onShown();
  drawChat();
  $("text").focus();
}

export function newChat() {
  empty();
  address(null);
}

function write(text) { // into the composer
  $("text").value = text;
  fit();
}

function fit() { // the composer grows with its text
  const text = $("text");
  text.style.height = "auto";
  text.style.height = `${text.scrollHeight + 2}px`;
}

function keepDraft() { // an edited question is none
  if (!edited) drafts.keep(chat);
}

export function start() {
  on("composer", "submit", (event) => {
    event.preventDefault();
    if (!model) return;
    const asked = attachments.withFiles($("text").value.trim());
    if (!asked.text && !asked.images.length) return;
    if (!edited) write("");
    submit(asked);
  });
  on("text", "input", () => { fit(); keepDraft(); });
  on("text", "keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    $("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    const isElsewhere = event.target === $("search") || document.querySelector("dialog:not(#call)[open]");
    if (event.key !== "Escape" || event.defaultPrevented || isElsewhere) return;
    if (chat.writing) stop(); else if (edited) endEdit();
  });
  whenParsed((message) => {
    if (message === sought?.message) toWords(elementOf(message), sought.words);
  });
  on("stop", "click", stop);
  on("edit-cancel", "click", endEdit);
  on("new", "click", newChat);
  addEventListener("popstate", go);
  addEventListener("beforeunload", (event) => { // the browser asks whether to lose what the server does not have yet
    if (asking) event.preventDefault();
  });
  addEventListener("pagehide", () => {
    returnQueue();
    keepDraft();
    drafts.leave();
  });
  write(location.hash ? "" : drafts.draftOf(chat));
  drawChat();
  $("text").focus();
}
