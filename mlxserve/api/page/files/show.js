// Small tools of the screen. Everything that comes from the server is shown as text.

export const $ = (id) => document.getElementById(id);
export const wait = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
export const count = (number) => Math.round(number).toLocaleString("en");

export const counted = (number, unit) => `${count(number)} ${unit}${number === 1 ? "" : "s"}`;

export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

export const on = (id, event, act) => $(id).addEventListener(event, act);

// Shows words in the element with this id, and hides it without any.
export function note(id, words) {
  $(id).textContent = words;
  $(id).hidden = !words;
}

// Makes these the choices of a menu. One whose choices are the same stays open.
export function offer(id, options) {
  const facts = (all) => JSON.stringify(Array.from(all, ({ text, value }) => [text, value]));
  if (facts(options) !== facts($(id).options)) $(id).replaceChildren(...options);
}

export function button(text, onClick, label = "") {
  const made = element("button", "button", text);
  made.type = "button";
  if (label) made.ariaLabel = label;
  made.addEventListener("click", onClick);
  return made;
}

// Puts children in the place of those before. What stays is not moved, so that it keeps selection and focus.
export function arrange(parent, children) {
  const staying = new Set(children);
  for (const one of [...parent.childNodes]) if (!staying.has(one)) one.remove();
  children.forEach((child, at) => {
    if (parent.childNodes[at] !== child) parent.insertBefore(child, parent.childNodes[at] ?? null);
  });
}

// The text of an element without other children. One that grows is continued, so that a selection stays.
export function setText(shown, text) {
  const node = shown.firstChild;
  if (node?.nodeType === Node.TEXT_NODE) grow(node, text); else shown.textContent = text;
}

export function grow(node, text) {
  if (text === node.data) return;
  if (text.startsWith(node.data)) node.appendData(text.slice(node.data.length)); else node.data = text;
}

// What reorders a line, or is invisible, is shown as its number, as in the terminal.
export const visible = (text) =>
  text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u{e0000}-\u{e007f}]/gu,
    (char) => `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

let told = 0;

export async function tell(words) { // below the messages, for a while
  const number = ++told;
  note("note", words);
  await wait(10);
  if (number === told) note("note", "");
}

export function say(words, isLost = false) {
  $("state").textContent = words;
  $("state").classList.toggle("lost", isLost);
}
