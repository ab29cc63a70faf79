// Which of the server's models the chat uses, and whose engine is shown.

import { ask } from "./api.js";
import { $ } from "./show.js";

let chosen = ""; // empty: the server's first
let onChosen = () => {};

export const ofModel = (path) => `${path}?model=${encodeURIComponent(chosen)}`;

export function whenChosen(tell) { onChosen = tell; }

// The card of the chosen model, as the server describes it now.
export async function chosenModel() {
  const every = (await (await ask("/v1/models")).json()).data;
  const writers = every.filter((one) => one.capabilities?.includes("completion") ?? true);
  const cards = writers.length ? writers : every;
  const card = cards.find((one) => one.id === chosen) ?? cards[0];
  chosen = card.id;
  const choices = cards.map((one) => new Option(one.loaded ? one.id : `${one.id} (not loaded)`, one.id));
  const texts = (options) => Array.from(options, (one) => one.text).join("\n");
  if (texts(choices) !== texts($("models").options)) $("models").replaceChildren(...choices);
  $("models").value = chosen;
  $("models").hidden = cards.length === 1;
  $("model").hidden = cards.length > 1;
  return { ...card, max_model_len: card.max_model_len ?? card.context_length ?? 0 };
}

$("models").addEventListener("change", () => {
  chosen = $("models").value;
  onChosen();
});
