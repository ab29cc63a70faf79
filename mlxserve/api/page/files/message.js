// How one message is drawn: its text, thinking, what it took, and what can be done with it.

import { build, copy, parse } from "./markdown.js";
import { thumbnail } from "./pictures.js";
import { button, count, element, visible, wait } from "./show.js";

const MIN_SECONDS = 0.05; // shorter times would measure the browser
const ENDS = {
  cut: "cut off at the length limit", repeated: "stopped: it repeated itself", stopped: "stopped",
};
const PARSE_SECONDS = 0.3; // between two parses of a text that grows
const drawn = new WeakMap(); // message -> its element
const parses = new WeakMap(); // message -> { text, nodes }: what of it was parsed last

// The text with its marks as far as the server has parsed it; until then, and without it, plain.
function drawBody(message, body) {
  if (!message.text) parses.delete(message); // what it had went to a round
  const parsed = parses.get(message);
  if (parsed?.nodes && (parsed.text === message.text || message.state === "writing")) {
    if (parsed.drawn !== parsed.nodes) build(parsed.nodes, body);
    parsed.drawn = parsed.nodes;
  } else body.replaceChildren(element("div", "plain", visible(message.text)));
  if (parsed?.text !== message.text && !parsed?.isAsked && message.text) ask(message);
}

async function ask(message) {
  const parsed = parses.get(message) || { text: "", nodes: null, isAsked: false, drawn: null };
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
  drawText(message);
}

function noteOf({ state, error, stats }) {
  if (state === "failed") return "✗ " + visible(error);
  const parts = state in ENDS ? [ENDS[state]] : [];
  const { prompt_tokens, cached_tokens, completion_tokens, decode_seconds } = stats;
  if (decode_seconds > MIN_SECONDS && completion_tokens > 1)
    parts.push(((completion_tokens - 1) / decode_seconds).toFixed(1) + " tokens/s");
  if (prompt_tokens != null && cached_tokens != null)
    parts.push(`cached ${count(cached_tokens)} of ${count(prompt_tokens)} prompt tokens`);
  return parts.join(" · ");
}

const CALLS = { asked: "waits for you", running: "running …", refused: "not allowed", stopped: "stopped", failed: "failed" };

// The text and the calls of each round before the last text; what a tool returned is folded.
function drawRounds({ rounds }, into) {
  const state = JSON.stringify(rounds.map(({ calls }) => calls.map((call) => call.state)));
  if (into.dataset.state === state) return;
  into.dataset.state = state;
  into.replaceChildren(...rounds.flatMap(({ text, calls }) => [
    ...(text.trim() ? [element("div", "plain", visible(text.trim()))] : []), ...calls.map(drawCall)]));
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
  shown.setAttribute("aria-label", message.role === "user" ? "You" : "Answer");
  return shown;
}

// Draws a message as it is now and returns its element.
export function draw(message, versions, acts) {
  if (!drawn.has(message)) drawn.set(message, made(message));
  const shown = drawn.get(message);
  drawText(message);
  const actions = shown.querySelector(".actions");
  const isUser = message.role === "user";
  actions.replaceChildren();
  if (message.state === "writing") return shown;
  if (versions.length > 1) {
    const at = versions.indexOf(message);
    const step = (to, sign, label) => {
      const made = button(sign, () => acts.choose(versions[to]), label);
      made.disabled = to < 0 || to >= versions.length;
      return made;
    };
    actions.append(step(at - 1, "‹", "Earlier version"), `${at + 1}/${versions.length}`, step(at + 1, "›", "Later version"));
  }
  actions.append(button("Copy", (event) => copy(message.text, event.target)));
  actions.append(isUser
    ? button("Edit", () => acts.edit(message))
    : button("Regenerate", () => acts.regenerate(message)));
  return shown;
}

export function drawText(message) {
  const shown = drawn.get(message);
  const [rounds, thinking, , body, note] = shown.children;
  drawRounds(message, rounds);
  thinking.hidden = !message.thinking;
  thinking.firstChild.textContent = message.state === "writing" && !message.text ? "Thinking…" : "Thinking";
  thinking.lastChild.textContent = visible(message.thinking);
  drawBody(message, body);
  note.textContent = message.state === "writing" ? "" : noteOf(message);
  note.hidden = !note.textContent;
  shown.classList.toggle("failed", message.state === "failed");
  shown.setAttribute("aria-busy", String(message.state === "writing"));
}
