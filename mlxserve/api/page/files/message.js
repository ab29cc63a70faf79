// How one message is drawn: its text, thinking, what it took, and what can be done with it.

import { copy } from "./clipboard.js";
import { update } from "./markdown.js";
import { parsed } from "./parsing.js";
import { keep } from "./place.js";
import { arrange, button, count, counted, element, setText, visible } from "./show.js";
import { isDocument } from "./tree.js";

const MIN_SECONDS = 0.05; // shorter times would measure the browser
const ENDS = {
  cut: "cut off at the length limit", repeated: "stopped: it repeated itself", stopped: "stopped",
};
const drawn = new WeakMap(); // message -> its element
const bodies = new WeakMap(); // body -> the nodes that it shows; none while it shows the text as it is

// An answer that the server wrote while this page followed has its blocks; any other text is parsed once.
function drawBody(message, body) {
  const nodes = message.blocks ?? parsed(message, () => drawSoon(message));
  if (nodes) drawNodes(nodes, body); else drawPlain(message, body);
}

function drawNodes(nodes, body) {
  if (!bodies.has(body)) body.replaceChildren();
  if (bodies.get(body) !== nodes) update(body, bodies.get(body) ?? [], nodes);
  bodies.set(body, nodes);
}

function drawPlain(message, body) {
  if (bodies.delete(body) || !body.firstChild) body.replaceChildren(element("div", "plain", ""));
  body.firstChild.dir = "auto";
  setText(body.firstChild, visible(message.text ?? ""));
}

let onParsed = () => {};
export const whenParsed = (tell) => { onParsed = tell; }; // with each message whose stored text has its blocks now

const waiting = new Set(); // messages to draw with the next frame

function drawSoon(message) { // together: each redraw that keeps the reader's place lays the messages out
  if (!waiting.size) requestAnimationFrame(() => {
    const all = [...waiting];
    waiting.clear();
    keep(() => all.forEach(drawParts));
    all.forEach((one) => onParsed(one));
  });
  waiting.add(message);
}

function noteOf({ role, state, error, stats, cuts, model }) {
  if (state === "failed") return "✗ " + visible(error);
  const parts = [ENDS[state], cuts && visible(cuts), role === "assistant" && visible(model)].filter(Boolean);
  const { prompt_tokens, cached_tokens, page_size, completion_tokens, accepted_tokens, decode_seconds } = stats;
  if (decode_seconds > MIN_SECONDS && completion_tokens > 1)
    parts.push(((completion_tokens - 1) / decode_seconds).toFixed(1) + " tokens/s");
  if (accepted_tokens > 0)
    parts.push((completion_tokens / Math.max(1, completion_tokens - accepted_tokens)).toFixed(1) + " tokens a step");
  if (prompt_tokens && cached_tokens != null && page_size) {
    const [cached, all] = [Math.floor(cached_tokens / page_size), Math.ceil(prompt_tokens / page_size)];
    parts.push(`${counted(cached, "page")} of ${count(all)} from the cache`);
  } else if (prompt_tokens != null && cached_tokens != null)
    parts.push(`cached ${count(cached_tokens)} of ${count(prompt_tokens)} prompt tokens`);
  return parts.join(" · ");
}

export function thumbnail({ name, url }) {
  if (isDocument(url)) return element("span", "document", visible(name));
  const shown = element("img", "thumbnail");
  if (url.startsWith("data:image/")) shown.src = url;
  shown.alt = name || "Image";
  shown.title = name;
  return shown;
}

const CAN_CONTINUE = new Set(["cut", "stopped", "failed"]);
const CALLS = { asked: "waits for you", running: "running …", refused: "not allowed", stopped: "stopped", failed: "failed" };

const roundParts = new WeakMap(); // what shows the rounds -> its parts: { state, shown }

// The text and the calls of each round before the last text; what a tool returned is folded. A round's text and
// a call that has ended stay as they are.
function drawRounds({ rounds }, into) {
  const wanted = rounds.flatMap(({ text, calls }) => [...(text.trim() ? [text.trim()] : []), ...calls]);
  const before = roundParts.get(into) ?? [];
  const after = wanted.map((one, at) => {
    const state = one.state ?? "text";
    return before[at]?.state === state ? before[at] : { state, shown: drawPart(one) };
  });
  roundParts.set(into, after);
  arrange(into, after.map(({ shown }) => shown));
}

function drawPart(one) {
  if (typeof one !== "string") return drawCall(one);
  const shown = element("div", "plain", visible(one));
  shown.dir = "auto";
  return shown;
}

function drawCall({ name, arguments: written, state, result, seconds }) {
  const parts = [CALLS[state], seconds === null ? "" : seconds.toFixed(2) + " s"].filter(Boolean).join(" · ");
  const head = element("summary", "", element("b", "", visible(name)), ` ${visible(written).slice(0, 300)} `, parts);
  const shown = element("details", "call " + state, head, element("div", "", visible(result || "(nothing)")));
  shown.lastChild.tabIndex = 0; // so that a keyboard can scroll it
  return shown;
}

function made(message) {
  const body = element("div", "body");
  const thinking = element("details", "thinking", element("summary", "", "Thinking"), element("div", "thoughts"));
  const images = element("div", "images", ...message.images.map(thumbnail));
  images.hidden = !message.images.length;
  const shown = element("article", "message " + message.role, element("div", "rounds"), thinking, images, body, element("div", "note"), element("div", "actions"));
  shown.ariaLabel = message.role === "user" ? "You" : "Answer";
  return shown;
}

// Draws a message as it is now and returns its element.
export function draw(message, versions, acts) {
  if (!drawn.has(message)) drawn.set(message, made(message));
  const shown = drawn.get(message);
  drawParts(message);
  drawActions(message, versions, acts, shown.querySelector(".actions"));
  return shown;
}

export const elementOf = (message) => drawn.get(message);

function drawActions(message, versions, acts, into) {
  const at = versions.indexOf(message);
  const goesOn = CAN_CONTINUE.has(message.state) && message.role === "assistant" && acts.isLast(message);
  const state = message.state === "writing" ? "" : `${at + 1}/${versions.length}${goesOn ? " …" : ""}`;
  if (into.dataset.state === state) return; // the focus stays on them
  into.dataset.state = state;
  into.replaceChildren();
  if (!state) return;
  if (versions.length > 1)
    into.append(step(versions[at - 1], "‹", "Earlier version", acts), `${at + 1}/${versions.length}`, step(versions[at + 1], "›", "Later version", acts));
  into.append(button("Copy", (event) => copy(() => acts.textOf(message), event.target)), message.role === "user"
    ? button("Edit", () => acts.edit(message)) : button("Regenerate", () => acts.regenerate(message)));
  if (goesOn) into.append(button("Continue", () => acts.goOn(message), "Continue this answer"));
}

function step(version, sign, label, acts) {
  const made = button(sign, () => {
    acts.choose(version);
    const steps = [...drawn.get(version).querySelectorAll(".step:enabled")];
    (steps.find((one) => one.ariaLabel === label) ?? steps[0])?.focus({ preventScroll: true });
  }, label);
  made.classList.add("step");
  made.disabled = !version;
  return made;
}

// Draws what has changed of a message that is on the screen.
export const drawText = (message) => keep(() => drawParts(message));

function drawParts(message) {
  const shown = drawn.get(message);
  const [rounds, thinking, , body, note] = shown.children;
  drawRounds(message, rounds);
  thinking.hidden = !message.thinking;
  setText(thinking.firstChild, message.state === "writing" && !message.text && !message.blocks?.length ? "Thinking…" : "Thinking");
  setText(thinking.lastChild, visible(message.thinking));
  drawBody(message, body);
  note.textContent = message.state === "writing" ? "" : noteOf(message);
  note.hidden = !note.textContent;
  shown.classList.toggle("failed", message.state === "failed");
  shown.ariaBusy = message.state === "writing";
}
