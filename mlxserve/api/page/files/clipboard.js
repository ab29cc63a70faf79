// Copying, also on a page of plain http, whose browser has no clipboard but that of a selection.

import { element } from "./show.js";

// `text`: the text, or a function that gets it.
export async function copy(text, pressed) {
  const before = pressed.textContent;
  try {
    await write(typeof text === "function" ? await text() : text);
    pressed.textContent = "Copied";
  } catch {
    pressed.textContent = "The browser refused";
  }
  setTimeout(() => { pressed.textContent = before; }, 1500);
}

async function write(text) {
  if (navigator.clipboard) { await navigator.clipboard.writeText(text); return; }
  const held = document.activeElement;
  const field = element("textarea", "unseen");
  field.value = text;
  document.body.append(field);
  field.select();
  const isCopied = document.execCommand("copy");
  field.remove();
  held?.focus({ preventScroll: true });
  if (!isCopied) throw new Error("refused");
}
