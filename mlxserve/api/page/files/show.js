// Small tools of the screen. Everything that comes from the server is shown as text.

export const $ = (id) => document.getElementById(id);
export const wait = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
export const count = (number) => Math.round(number).toLocaleString("en");

export function element(tag, className = "", ...children) {
  const made = document.createElement(tag);
  made.className = className;
  made.append(...children);
  return made;
}

export function button(text, onClick, label = "") {
  const made = element("button", "button", text);
  made.type = "button";
  if (label) made.setAttribute("aria-label", label);
  made.addEventListener("click", onClick);
  return made;
}

// What reorders a line, or is invisible, is shown as its number, as in the terminal.
export const visible = (text) =>
  text.replace(/[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\u{e0000}-\u{e007f}]/gu,
    (char) => `⟨U+${char.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

let told = 0;

export async function tell(words) { // below the messages, for a while
  const number = ++told;
  $("note").textContent = words;
  $("note").hidden = false;
  await wait(10);
  if (number === told) $("note").hidden = true;
}

export function say(words, isLost = false) {
  $("state").textContent = words;
  $("state").classList.toggle("lost", isLost);
}
