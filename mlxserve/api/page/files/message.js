// How one message is drawn: its text, thinking, what it took, and what can be done with it.

import { copy, parse, update } from "./markdown.js";
import { thumbnail } from "./pictures.js";
import { keep } from "./place.js";
import { arrange, button, count, element, setText, visible, wait } from "./show.js";

const MIN_SECONDS = 0.05; // shorter times would measure the browser
const ENDS = {
  cut: "cut off at the length limit", repeated: "stopped: it repeated itself", stopped: "stopped",
};
const PARSE_SECONDS = 0.3; // between two parses of a text that grows
const drawn = new WeakMap(); // message -> its element
const parses = new WeakMap(); // message -> { text, nodes, isAsked }: what of it was parsed last
const bodies = new WeakMap(); // body -> the nodes that it shows; none while it shows the text as it is
const CONTINUED = new Set("p ul ol li blockquote h1 h2 h3 h4 h5 h6".split(" "));

// The text with its marks as far as the server has parsed it; until then, and without it, plain.
function drawBody(message, body) {
  if (!message.text.startsWith(parses.get(message)?.text ?? "")) parses.delete(message); // that went to a round
  const parsed = parses.get(message);
  if (parsed?.nodes) drawNodes(message, parsed, body); else drawPlain(message, body);
  if (parsed?.text !== message.text && !parsed?.isAsked && message.text) ask(message);
}

function drawNodes(message, { text, nodes }, body) {
  body.querySelector(".rest")?.remove();
  if (!bodies.has(body)) body.replaceChildren();
  if (bodies.get(body) !== nodes) update(body, bodies.get(body) ?? [], nodes);
  bodies.set(body, nodes);
  if (message.state !== "writing" && text !== message.text) // it has ended since
    endOf(body).append(element("span", "plain rest", visible(message.text.slice(text.length))));
}

function drawPlain(message, body) {
  if (bodies.delete(body) || !body.firstChild) body.replaceChildren(element("div", "plain", ""));
  setText(body.firstChild, visible(message.text));
}

function endOf(body) { // where its last line goes on
  let end = body;
  while (CONTINUED.has(end.lastChild?.localName)) end = end.lastChild;
  return end;
}

async function ask(message) {
  const parsed = parses.get(message) || { text: "", nodes: null, isAsked: false };
  parses.set(message, parsed);
  parsed.isAsked = true;
  const text = message.text;
  try {
    [parsed.nodes] = await parse([text]);
  } catch {
    parsed.nodes = null; // it stays plain
  }
  parsed.text = text;
  if (message.state === "writing") await wait(PARSE_SECONDS);
  parsed.isAsked = false;
  drawSoon(message);
}

const waiting = new Set(); // messages to draw with the next frame

function drawSoon(message) { // together: each redraw that keeps the reader's place lays the messages out
  if (!waiting.size) requestAnimationFrame(() => {
    const all = [...waiting];
    waiting.clear();
    keep(() => all.forEach(drawParts));
  });
  waiting.add(message);
}

function noteOf({ state, error, stats, cuts }) {
  if (state === "failed") return "✗ " + visible(error);
  const parts = [ENDS[state], cuts && visible(cuts)].filter(Boolean);
  const { prompt_tokens, cached_tokens, completion_tokens, accepted_tokens, decode_seconds } = stats;
  if (decode_seconds > MIN_SECONDS && completion_tokens > 1)
    parts.push(((completion_tokens - 1) / decode_seconds).toFixed(1) + " tokens/s");
  if (accepted_tokens > 0)
    parts.push((completion_tokens / Math.max(1, completion_tokens - accepted_tokens)).toFixed(1) + " tokens a step");
  if (prompt_tokens != null && cached_tokens != null)
    parts.push(`cached ${count(cached_tokens)} of ${count(prompt_tokens)} prompt tokens`);
  return parts.join(" · ");
}

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

const drawPart = (one) => (typeof one === "string" ? element("div", "plain", visible(one)) : drawCall(one));

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
  shown.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
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
  const state = message.state === "writing" ? "" : `${at + 1}/${versions.length}`;
  if (into.dataset.state === state) return; // the focus stays on them
  into.dataset.state = state;
  into.replaceChildren();
  if (!state) return;
  if (versions.length > 1)
    into.append(step(versions[at - 1], "‹", "Earlier version", acts), state, step(versions[at + 1], "›", "Later version", acts));
  into.append(button("Copy", (event) => copy(message.text, event.target)), message.role === "user"
    ? button("Edit", () => acts.edit(message)) : button("Regenerate", () => acts.regenerate(message)));
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
  setText(thinking.firstChild, message.state === "writing" && !message.text ? "Thinking…" : "Thinking");
  setText(thinking.lastChild, visible(message.thinking));
  drawBody(message, body);
  note.textContent = message.state === "writing" ? "" : noteOf(message);
  note.hidden = !note.textContent;
  shown.classList.toggle("failed", message.state === "failed");
  shown.setAttribute("aria-busy", String(message.state === "writing"));
}
