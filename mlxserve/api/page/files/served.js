// The server's models beside its engine: what is loaded, in how much memory, and for admins what to do about it.

import { ask, json, reasonOf, send } from "./api.js";
import { $, arrange, button, element, setText, wait } from "./show.js";

const MODELS = "/api/v1/models";
const SECONDS = 2; // between looks, while the engine is shown
const REFUSED_SECONDS = 30;
const rows = new Map(); // name -> its element
let busy = ""; // the model that is loaded or unloaded from here
let forced = ""; // the model that answers, and is unloaded with the next press

const gib = (bytes) => `${(bytes / 2 ** 30).toFixed(2)} GiB`;

function left(seconds) {
  if (seconds === null) return "";
  return seconds < 90 ? `unloads in ${Math.ceil(seconds)} s` : `unloads in ${Math.round(seconds / 60)} min`;
}

function wordsOf({ id, state, memory, size, num_requests, unloads_in_seconds, pinned }) {
  const isHere = state === "loaded" || state === "unloading";
  return [
    state === "unloaded" ? (id === busy ? "loading …" : "not loaded") : state === "loaded" ? "" : state + " …",
    isHere ? gib(memory) : size ? gib(size) + " of weights" : "",
    num_requests ? `${num_requests} request${num_requests > 1 ? "s" : ""}` : isHere && !pinned ? left(unloads_in_seconds) : "",
  ].filter(Boolean).join(" · ");
}

function made(name) {
  const load = button("Load", () => change(name, "load", {}), `Load ${name}`);
  const pin = button("Pin", () => change(name, "load", { pinned: pin.ariaPressed !== "true" }), `Pin ${name}: it stays loaded`);
  const unload = button("Unload", () => change(name, "unload", { force: forced === name }), `Unload ${name}`);
  return element("li", "served", element("div", "", element("b", "", name), element("span", "quiet")), load, pin, unload);
}

function row(card) {
  if (!rows.has(card.id)) rows.set(card.id, made(card.id));
  const shown = rows.get(card.id);
  const [words, load, pin, unload] = shown.children;
  const isLoaded = card.state === "loaded";
  setText(words.lastChild, wordsOf(card));
  load.hidden = card.state !== "unloaded";
  pin.hidden = unload.hidden = !isLoaded;
  pin.ariaPressed = card.pinned;
  for (const one of [load, pin, unload]) one.disabled = card.id === busy;
  return shown;
}

// Where the focus was on a button that has gone, the one that took its place has it.
function keepFocus(change) {
  const before = document.activeElement, inside = before?.closest(".served");
  change();
  if (inside && (before.hidden || before.disabled)) inside.querySelector("button:enabled:not([hidden])")?.focus();
}

function draw({ data, memory_limit }) {
  const memory = data.reduce((sum, one) => sum + one.memory, 0);
  $("served-memory").textContent = gib(memory) + (memory_limit ? ` of ${gib(memory_limit)}` : "");
  keepFocus(() => arrange($("served-list"), data.map(row)));
  $("served").hidden = false;
}

async function refresh() {
  draw(await json(ask(MODELS)));
}

async function change(name, what, fields) {
  busy = name;
  forced = "";
  $("served-note").textContent = "";
  refresh().catch(() => {}); // the next look tells
  try {
    await send("POST", `${MODELS}/${what}`, { model: name, ...fields });
  } catch (error) {
    const isInUse = error.status === 409 && what === "unload";
    if (isInUse) forced = name;
    $("served-note").textContent = isInUse ? `${name} is answering. Unload again ends its answers.` : reasonOf(error);
  }
  busy = "";
  refresh().catch(() => {});
}

export async function start() {
  for (;;) {
    let seconds = SECONDS;
    if (!document.hidden && document.body.classList.contains("with-engine")) {
      try {
        await refresh();
      } catch (error) {
        $("served").hidden = true;
        if (error.status === 403) seconds = REFUSED_SECONDS;
      }
    }
    await wait(seconds);
  }
}
