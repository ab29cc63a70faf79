// Text files that are sent with a message, as the terminal sends them: a name and a block of code.

import { $, button, element, visible } from "./show.js";

const MAX_SIZE = 256 * 1024;
let attached = []; // { name, text }

export async function attach(files) {
  const problems = [];
  for (const file of files) {
    try {
      if (file.size > MAX_SIZE) throw new Error("is larger than 256 KiB");
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError();
      attached.push({ name: file.name, text });
    } catch (error) {
      problems.push(`${file.name} ${error instanceof TypeError ? "is not a UTF-8 text file" : error.message}.`);
    }
  }
  drawAttached(problems);
}

function drawAttached(problems = []) {
  $("attached").hidden = !attached.length && !problems.length;
  $("attached").replaceChildren(
    ...attached.map((one) => element("li", "", visible(one.name) + " ",
      button("Remove", () => { attached = attached.filter((other) => other !== one); drawAttached(); }, "Remove " + one.name))),
    ...problems.map((problem) => element("li", "problem", visible(problem))));
}

// The text with the files below it, which are then attached no more.
export function withFiles(text) {
  const blocks = attached.map(({ name, text: content }) => {
    const longest = Math.max(0, ...[...content.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(Math.max(3, longest + 1));
    const suffix = name.includes(".") ? name.slice(name.lastIndexOf(".") + 1) : "";
    return `${name}:\n${fence}${suffix}\n${content.trimEnd()}\n${fence}`;
  });
  attached = [];
  drawAttached();
  return [text, ...blocks].filter(Boolean).join("\n\n");
}

export function start() {
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", async () => {
    await attach($("files").files);
    $("files").value = "";
  });
  $("chat").addEventListener("dragover", (event) => event.preventDefault());
  $("chat").addEventListener("drop", (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
}
