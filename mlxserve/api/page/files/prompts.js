// Saved prompts: a system prompt and sampling under a name, which the server keeps for this key. They are chosen
// on an empty page and in a chat's settings, and the terminal has the same.

import { ask, json, reasonOf, send } from "./api.js";
import { sampling, setSampling } from "./sampling.js";
import { $, button, element, offer, on } from "./show.js";

const PROMPTS = "/api/v1/prompts";
const SHARED = "Chats with the same prompt share its pages: the server computes it once, and again only if its cache has dropped it.";
let saved = [];
let chosen = 0; // the id of the one that the settings show
let place = { choose() {}, redraw() {} };

async function read() {
  const before = JSON.stringify(saved);
  saved = (await json(ask(PROMPTS))).data;
  if (JSON.stringify(saved) === before) return;
  drawChoice();
  place.redraw();
}

export const refresh = () => read().catch(() => {}); // who may not have chats here has no prompts either

function drawChoice() {
  if (!saved.some(({ id }) => id === chosen)) chosen = 0;
  offer("prompt", [new Option(saved.length ? "none" : "none is saved yet", 0), ...saved.map(({ name, id }) => new Option(name, id))]);
  $("prompt").value = chosen;
  $("prompt-delete").hidden = !chosen;
}

function use({ id, name, system, sampling: values }) {
  chosen = id;
  drawChoice();
  setSampling(values);
  $("system").value = system;
  $("prompt-name").value = name;
  place.choose(system);
}

async function attempt(work, words) {
  try {
    await work();
    await read();
    $("prompt-note").textContent = words;
  } catch (error) {
    $("prompt-note").textContent = reasonOf(error);
  }
}

function save() {
  const name = $("prompt-name").value.trim();
  if (!name) { $("prompt-note").textContent = "Give it a name first."; $("prompt-name").focus(); return; }
  attempt(async () => {
    const body = { name, system: $("system").value.trim(), sampling: sampling("effort") };
    chosen = (await json(send("POST", PROMPTS, body))).id;
  }, `Saved as ${name}. ${SHARED}`).then(drawChoice);
}

function remove() {
  const { id, name } = saved.find((one) => one.id === chosen);
  attempt(() => ask(`${PROMPTS}/${id}`, { method: "DELETE" }), `${name} was deleted; chats that began with it keep its text.`);
}

// For an empty page: a button for each prompt, and what that costs.
export function beginnings() {
  if (!saved.length) return [];
  const row = element("div", "prompts", ...saved.map((one) => {
    const made = button(one.name, () => { use(one); place.redraw(); $("text").focus(); });
    made.ariaPressed = one.id === chosen;
    return made;
  }));
  row.role = "group";
  row.ariaLabel = "Saved prompts";
  return [element("p", "quiet", "Begin with a saved prompt. " + SHARED), row];
}

export function left() { chosen = 0; drawChoice(); } // another chat is open

export function start(chat) { // { choose(system), redraw() }
  place = chat;
  on("prompt", "change", () => {
    const one = saved.find(({ id }) => id === Number($("prompt").value));
    $("prompt-note").textContent = one ? SHARED : "";
    if (one) use(one); else left();
  });
  on("prompt-save", "click", save);
  on("prompt-delete", "click", remove);
  on("prompt-name", "keydown", (event) => {
    if (event.key !== "Enter") return;
    event.preventDefault(); // it would close the dialog
    save();
  });
  on("settings-open", "click", () => {
    $("prompt-note").textContent = "";
    refresh().then(() => {
      chosen ||= saved.find(({ system }) => system && system === $("system").value)?.id ?? 0;
      drawChoice();
    });
  });
}
