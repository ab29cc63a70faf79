// Which of the server's models the chat uses, and whose engine is shown.

import { ask, json, send } from "./api.js";
import { $, offer, on, tell } from "./show.js";

let chosen = ""; // empty: the server's first
let onChosen = () => {};

export function whenChosen(tell) { onChosen = tell; }

// The card of the chosen model, as the server describes it now.
export async function chosenModel() {
  const every = (await json(ask("/v1/models"))).data;
  const writers = every.filter((one) => one.capabilities?.includes("completion") ?? true);
  const cards = writers.length ? writers : every;
  const card = cards.find((one) => one.id === chosen) ?? cards[0];
  chosen = card.id;
  offer("models", cards.map((one) => new Option(one.loaded ? one.id : `${one.id} (not loaded)`, one.id)));
  $("models").value = chosen;
  $("models").hidden = cards.length === 1;
  $("model").hidden = cards.length > 1;
  return { ...card, max_model_len: card.max_model_len ?? card.context_length ?? 0 };
}

export const names = () => Array.from($("models").options, ({ value }) => value);

export function choose(name) {
  if (name === chosen) return;
  chosen = name;
  onChosen();
}

export async function chooseForAll(name) { // here, and where commands are given no model
  choose(name);
  try {
    await send("POST", "/api/v1/models/use", { model: chosen });
    tell(`${chosen} is what chat, run and serve use from now on; \`mlxserve use\` changes that.`);
  } catch { /* the choice holds for this page, as that of a key that may not choose for others */ }
}

on("models", "change", () => chooseForAll($("models").value));
