// Two models side by side: both answer a question, and their answers stand in columns. They are versions of one
// answer, from either of which the chat goes on. The second begins once the first has ended, so that neither slows
// the other.

import { $, arrange, button, element, offer, on } from "./show.js";

const STORED = "mlxserve-second";
let first = ""; // the chat's model
let wanted = 0; // the id of the question that the second model answers next
let redraw = () => {};
const drawn = new WeakMap(); // question -> its columns, answer -> its column

const second = () => $("second").value;

// The server's models, and the one that is chosen.
export function serve(names, chosen) {
  const others = names.filter((one) => one !== chosen);
  const before = second() || sessionStorage.getItem(STORED);
  offer("second", [new Option("none", ""), ...others.map((one) => new Option(one, one))]);
  $("second").value = others.includes(before) ? before : "";
  $("second-choice").hidden = !others.length;
  if (first !== chosen) { first = chosen; show(); }
}

function show() {
  $("beside").hidden = !second();
  $("beside").firstChild.textContent = `Questions go to ${first}, then to ${second()}; both answers stand side by side. `;
  redraw();
}

export function begun(question) {
  wanted = second() ? question.id : 0;
}

// The model that goes on with an answer, or answers again in its column, if it is not the chat's.
export const modelOf = (message) => (second() && message.model === second() ? { model: second() } : {});

// What the server is asked once the first answer is there; null if nothing.
export function next({ leaf }) {
  const isWanted = wanted !== 0 && leaf?.parent?.id === wanted;
  wanted = 0;
  if (!isWanted || !second() || leaf.model === second() || !["done", "cut", "repeated"].includes(leaf.state)) return null;
  return { parent_id: leaf.parent.id, model: second() };
}

// Elements of a branch's messages; `shown` draws a message, `choose` shows the branch of another answer.
export function arranged(path, versions, shown, choose) {
  return path.map((message) => {
    const pair = second() && message.role === "assistant" && pairOf(message, versions(message));
    return pair ? columns(message, pair, shown, choose) : shown(message);
  });
}

function pairOf(message, versions) {
  const of = (model) => (message.model === model ? message : versions.findLast((one) => one.model === model));
  const pair = [of(first), of(second())];
  return pair.every(Boolean) && pair.includes(message) ? pair : null;
}

function columns(message, pair, shown, choose) {
  const { parent } = message;
  if (!drawn.has(parent)) drawn.set(parent, element("div", "columns"));
  arrange(drawn.get(parent), pair.map((one) => column(one, one === message, shown, choose)));
  return drawn.get(parent);
}

function column(one, isShown, shown, choose) {
  if (!drawn.has(one)) {
    const made = element("section", "column", element("div", "row", element("b", "", one.model),
      button("Continue from here", () => choose(one), `Continue from here: ${one.model}`)));
    made.ariaLabel = one.model;
    drawn.set(one, made);
  }
  const made = drawn.get(one), [head] = made.children;
  head.lastChild.ariaPressed = isShown;
  arrange(made, [head, shown(one)]);
  return made;
}

export function start(onChange) {
  redraw = onChange;
  on("second", "change", () => {
    sessionStorage.setItem(STORED, second());
    show();
  });
  on("beside-off", "click", () => {
    $("second").value = "";
    $("second").dispatchEvent(new Event("change"));
    $("text").focus();
  });
}
