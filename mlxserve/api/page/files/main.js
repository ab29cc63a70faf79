// Ties the page together and follows the server, over its restarts.

import { Refused, reasonOf, useKey, whenKeyWanted } from "./api.js";
import * as attachments from "./attachments.js";
import { drawChat, reopen, serve, setSystem, start } from "./chat.js";
import * as compare from "./compare.js";
import { drawMap, follow } from "./engine.js";
import * as history from "./history.js";
import * as keys from "./keys.js";
import * as menu from "./menu.js";
import { chosenModel, names, whenChosen } from "./models.js";
import * as place from "./place.js";
import * as prompts from "./prompts.js";
import * as sampling from "./sampling.js";
import * as settings from "./settings.js";
import { $, note, on, say, wait } from "./show.js";
import * as theme from "./theme.js";
import * as tools from "./tools.js";

const ENGINE = "mlxserve-engine";
let following = new AbortController(); // of the engine of one model
let served = null; // the models beside the engine, which a first visit does not fetch

async function followServer() {
  let isListed = false; // whether the chats were asked for since the server answers
  for (;;) {
    following = new AbortController(); // before the question, so that a choice during it counts
    const { signal } = following;
    try {
      const card = await chosenModel();
      serve(card);
      compare.serve(names(), card.id);
      say(card.loaded ? "Ready" : "Ready; the first message loads the model");
      if (!isListed) {
        isListed = true;
        await reopen();
        history.refresh();
        prompts.refresh();
      }
      if (card.loaded) {
        await follow(card.id, signal);
        say("The server ended the connection", true);
      }
    } catch (error) {
      if (error.name === "AbortError") continue; // another model was chosen
      if (error instanceof Refused && error.status === 403) {
        note("refused", "The engine is shown to admin keys only.");
        await wait(30);
      } else {
        isListed = false;
        say(reasonOf(error), true);
      }
    }
    await wait(1);
  }
}

// On a narrow window a side covers the chat, so only one is shown.
function showSide(name, isShown) {
  const others = { engine: "chats", chats: "engine" };
  const isNarrow = !matchMedia("(min-width: 56rem)").matches;
  document.body.classList.toggle("with-" + name, isShown);
  $(name + "-toggle").ariaExpanded = isShown;
  if (isShown && isNarrow) showSide(others[name], false);
  if (isShown && name === "engine")
    served ??= import("./served.js").then(({ start }) => start(), () => { served = null; }); // fetched again when it is opened again
  drawMap();
}

function toggle(name) {
  const isShown = !document.body.classList.contains("with-" + name);
  showSide(name, isShown);
  if (name === "engine") localStorage.setItem(ENGINE, isShown ? "open" : "closed");
}

for (const name of ["engine", "chats"]) on(name + "-toggle", "click", () => toggle(name));
keys.start({
  engine: () => toggle("engine"),
  search() {
    showSide("chats", true);
    $("search").focus();
  },
});
on("key", "submit", (event) => {
  event.preventDefault();
  useKey($("key-text").value.trim());
  $("key").hidden = true;
});
whenChosen(() => following.abort());
whenKeyWanted((isWanted) => { $("key").hidden = !isWanted; });
for (const swatch of document.querySelectorAll("[data-colour]"))
  swatch.style.background = `var(--${swatch.dataset.colour})`;
addEventListener("resize", drawMap);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);
// Who comes to chat sees the chat: the engine is one click away, and stays where it was opened before.
showSide("engine", localStorage.getItem(ENGINE) === "open" && matchMedia("(min-width: 56rem)").matches);
showSide("chats", matchMedia("(min-width: 72rem)").matches);
attachments.start();
sampling.start();
compare.start(drawChat);
prompts.start({ choose: setSystem, redraw: drawChat });
settings.start();
theme.start(drawMap);
tools.start();
menu.start();
history.start();
place.start();
start();
followServer();
