// How one message is drawn: its text, thinking, what it took, and what can be done with it.

import { button, count, element, visible } from "./show.js";

const MIN_SECONDS = 0.05; // shorter times would measure the browser
const ENDS = {
  cut: "cut off at the length limit", repeated: "stopped: it repeated itself", stopped: "stopped",
};
const drawn = new WeakMap(); // message -> its element

function inline(text, into) { // `code` and **bold**
  for (const part of text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/)) {
    const isCode = part.length > 2 && part.startsWith("`") && part.endsWith("`");
    const isBold = part.length > 4 && part.startsWith("**") && part.endsWith("**");
    if (!isCode && !isBold) { into.append(part); continue; }
    into.append(element(isCode ? "code" : "b", "", part.slice(isCode ? 1 : 2, isCode ? -1 : -2)));
  }
}

function plain(text, into) {
  into.replaceChildren();
  visible(text).split(/^```[^\n]*\n?/m).forEach((part, number) => {
    if (number % 2 === 0) inline(part.replace(/^\n+|\n+$/g, ""), into);
    else into.append(element("pre", "", element("code", "", part.replace(/\n$/, ""))));
  });
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

function made(message) {
  const body = element("div", "body");
  const thinking = element("details", "thinking", element("summary", "", "Thinking"), element("div"));
  const shown = element("article", "message " + message.role, thinking, body, element("div", "note"), element("div", "actions"));
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
  const [thinking, body, note] = shown.children;
  thinking.hidden = !message.thinking;
  thinking.firstChild.textContent = message.state === "writing" && !message.text ? "Thinking…" : "Thinking";
  thinking.lastChild.textContent = visible(message.thinking);
  plain(message.text, body);
  note.textContent = message.state === "writing" ? "" : noteOf(message);
  note.hidden = !note.textContent;
  shown.classList.toggle("failed", message.state === "failed");
  shown.setAttribute("aria-busy", String(message.state === "writing"));
}

export async function copy(text, pressed) {
  const before = pressed.textContent;
  try {
    await navigator.clipboard.writeText(text);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "The browser refused";
  }
  setTimeout(() => { pressed.textContent = before; }, 1500);
}
