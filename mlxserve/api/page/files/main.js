// Ties the page together and follows the server, over its restarts.

import { Refused, useKey, whenKeyWanted } from "./api.js";
import { serve, start } from "./chat.js";
import { drawMap, follow } from "./engine.js";
import { chosenModel, whenChosen } from "./models.js";
import { $, say, wait } from "./show.js";

let following = new AbortController(); // of the engine of one model

async function followServer() {
  for (;;) {
    try {
      const card = await chosenModel();
      serve(card);
      say(card.loaded ? "Ready" : "Ready; the first message loads the model");
      if (card.loaded) {
        following = new AbortController();
        await follow(following.signal);
        say("The server ended the connection", true);
      }
    } catch (error) {
      if (error.name === "AbortError") continue; // another model was chosen
      if (error instanceof Refused && error.status === 403) {
        $("refused").textContent = "The engine is shown to admin keys only.";
        $("refused").hidden = false;
        await wait(30);
      } else if (error instanceof Refused) {
        say(error.message, true);
      } else {
        say("The server does not answer; trying again", true);
      }
    }
    await wait(1);
  }
}

function showEngine(isShown) {
  document.body.classList.toggle("with-engine", isShown);
  $("engine-toggle").setAttribute("aria-expanded", String(isShown));
  drawMap();
}

$("engine-toggle").addEventListener("click", () => showEngine(!document.body.classList.contains("with-engine")));
$("key").addEventListener("submit", (event) => {
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
showEngine(matchMedia("(min-width: 56rem)").matches);
start();
followServer();
