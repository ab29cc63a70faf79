// Offers a real model on an empty page: its size, its download, and the choice of it once it is here.

import { Refused, ask, json, reasonOf, send } from "./api.js";
import { choose, chooseForAll } from "./models.js";
import { button, element, visible, wait } from "./show.js";

const DOWNLOADS = "/api/v1/downloads";
const LOOK_SECONDS = 0.5;
const shown = element("div", "offer"); // the same element in every empty chat
let offered = null; // { model, size, … } that suits this machine
let asking = null;
let isDone = false;
let before = null; // { at, done } of the last look, for the speed

const quiet = (words) => element("p", "quiet", words);
const gigabytes = (bytes) => (bytes / 1e9).toFixed(bytes < 1e8 ? 2 : 1);
const nameOf = ({ model, short_name }) => visible(short_name || model);

// What there is to say while this model is chosen.
export function downloaded(name) {
  if (!isDone || name !== offered.model) return [];
  drawChosen();
  return [shown];
}

// The element, which fills itself.
export function offer() {
  asking ||= begin();
  if (isDone) drawHere();
  return shown;
}

function drawChosen() {
  draw(element("p", "", `${nameOf(offered)} is here: your next message loads it. It is what chat, run and serve `
    + "use from now on; `mlxserve use` changes that."));
}

function drawHere() { // another model was chosen since
  draw(quiet("For real work take the model that was downloaded:"),
    main(`Use ${nameOf(offered)}`, () => chooseForAll(offered.model)));
}

async function begin() {
  draw(quiet("Looking for a model that suits this machine …"));
  try {
    const found = await json(ask(DOWNLOADS));
    offered = found.recommended;
    if (!offered) { drawCommand(); return; }
    const under = found.data.find((one) => one.model === offered.model);
    if (under) await follow(under); else drawOffer();
  } catch (error) {
    drawCommand();
    if (!(error instanceof Refused)) asking = null; // asked again when the server answers again
  }
}

function draw(...parts) { shown.replaceChildren(...parts); }

function drawCommand() { // where it cannot be done from here
  draw(quiet("For real work start the server with a real one, such as Qwen3.5 4B (2.4 GB, downloaded once):"),
    element("pre", "command", "mlxserve serve qwen3.5:4b"));
}

function drawOffer() {
  const size = offered.size ? ` (${gigabytes(offered.size)} GB)` : "";
  draw(quiet(`For real work take a real one. This one suits the memory of this machine`
      + `${offered.good_for ? `, for ${offered.good_for}` : ""}:`),
    main(offered.is_here ? `Use ${nameOf(offered)}, which is here` : `Download ${nameOf(offered)}${size}`, start));
}

function main(words, onClick) {
  const made = button(words, onClick);
  made.classList.add("main");
  return made;
}

async function start() {
  before = null;
  await attempt("", "Starting …");
}

const pause = () => attempt("/pause", "Pausing …");

async function attempt(path, words) {
  draw(quiet(words));
  try {
    await follow(await json(send("POST", DOWNLOADS + path, { model: offered.model })));
  } catch (error) {
    drawFailure(error.message);
  }
}

let following = 0;

async function follow(card) { // until it ends, or another look begins
  const number = ++following;
  for (;;) {
    if (number !== following) return;
    drawCard(card);
    if (card.state !== "running") return;
    await wait(LOOK_SECONDS);
    if (number !== following) return;
    try {
      const { data } = await json(ask(DOWNLOADS));
      const found = data.find((one) => one.model === offered.model);
      if (!found) { drawOffer(); return; } // the server was started again
      card = found;
    } catch (error) {
      drawFailure(reasonOf(error));
      return;
    }
  }
}

function drawCard(card) {
  if (card.state === "failed") { drawFailure(card.problem); return; }
  if (card.state === "done") {
    isDone = true;
    drawChosen();
    choose(offered.model);
    return;
  }
  const bar = element("progress");
  bar.ariaLabel = `Download of ${nameOf(offered)}`;
  if (card.total) Object.assign(bar, { max: card.total, value: card.done });
  const sizes = card.total ? `${gigabytes(card.done)} of ${gigabytes(card.total)} GB` : "Asking the hub …";
  const isPaused = card.state === "paused";
  draw(element("p", "", `${isPaused ? "Paused" : "Downloading"} ${nameOf(offered)}: ${sizes}${isPaused ? "" : speed(card)}`),
    bar, isPaused ? main("Resume", start) : button("Pause", pause));
}

function speed({ done }) {
  const last = before, now = performance.now();
  if (!last || done < last.done) { before = { at: now, done }; return ""; }
  const seconds = (now - last.at) / 1000;
  return done > last.done && seconds > 1 ? ` · ${((done - last.done) / 1e6 / seconds).toFixed(1)} MB/s` : "";
}

function drawFailure(problem) {
  draw(element("p", "problem", visible(problem)), main("Try again", start));
}
