// Where the reader is in the messages. A redraw leaves them there, at the end only if they are at the end;
// what they send takes them to the end.

import { $ } from "./show.js";

const NEAR = 40; // pixels from the end within which a growing answer is followed
const MARGIN = 8; // pixels above a message that is looked for

let drawing = 0; // redraws inside each other: the outermost one counts
let last = null; // as `here` found it, before what changes the size of the messages' box
let size = "";

export function toEnd() {
  $("log").scrollTop = $("log").scrollHeight;
  note();
}

function toMessage(shown) {
  $("log").scrollTop += shown.getBoundingClientRect().top - top() - MARGIN;
  note();
}

// To the first of these words in a message, which is marked; without it to the message itself.
export function toWords(shown, words) {
  const range = found(shown, words.toLowerCase());
  globalThis.CSS?.highlights?.delete("hit");
  if (!range) { toMessage(shown); return; }
  if (globalThis.Highlight) CSS.highlights.set("hit", new Highlight(range));
  $("log").scrollTop += range.getBoundingClientRect().top - top() - $("log").clientHeight / 3;
  note();
}

function found(shown, words) {
  const texts = document.createTreeWalker(shown.querySelector(".body"), NodeFilter.SHOW_TEXT);
  while (words && texts.nextNode()) {
    const at = texts.currentNode.data.toLowerCase().indexOf(words);
    if (at < 0) continue;
    const range = new Range();
    range.setStart(texts.currentNode, at);
    range.setEnd(texts.currentNode, at + words.length);
    return range;
  }
  return null;
}

// Runs what changes the messages, and puts what the reader saw back in its place.
export function keep(change) {
  const place = drawing ? null : here();
  drawing++;
  try {
    change();
  } finally {
    drawing--;
  }
  if (place) restore(place);
}

const top = () => $("log").getBoundingClientRect().top;
const topOf = (one) => one.getBoundingClientRect().top;

function here() {
  const log = $("log");
  if (log.scrollHeight - log.scrollTop - log.clientHeight < NEAR) return { isEnd: true };
  const edge = top();
  const message = firstBelow(log.children, edge);
  const block = message && firstBelow(message.querySelector(".body")?.children ?? [], edge);
  // What is gone after a redraw, as the version that was shown, leaves its place to what stands before it.
  const seen = [block, message, message?.previousElementSibling].filter(Boolean);
  return { seen: seen.map((one) => [one, topOf(one)]) };
}

// Of elements below each other, the first that reaches below the edge.
function firstBelow(elements, edge) {
  let from = 0, to = elements.length;
  while (from < to) {
    const middle = (from + to) >> 1;
    if (elements[middle].getBoundingClientRect().bottom > edge) to = middle; else from = middle + 1;
  }
  return elements[from];
}

function restore({ isEnd, seen }) {
  if (isEnd) { toEnd(); return; }
  const [one, before] = seen.find(([element]) => element.isConnected) ?? [];
  if (one) $("log").scrollTop += topOf(one) - before;
  note();
}

const sizeNow = () => `${$("log").clientWidth} ${$("log").clientHeight}`;

function note() {
  last = here();
  size = sizeNow();
}

export function start() {
  const log = $("log");
  note();
  // A box that has become smaller scrolls by itself, before the observer hears of its size.
  log.addEventListener("scroll", () => { if (size === sizeNow()) note(); }, { passive: true });
  log.addEventListener("toggle", note, { capture: true });
  new ResizeObserver(() => { if (size !== sizeNow()) restore(last); }).observe(log);
}
