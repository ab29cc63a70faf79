// Files that are sent with a message, as the terminal sends them: a text as a name and a block of code, an
// image as itself.

import { isPicture, picture, thumbnail } from "./pictures.js";
import { $, button, element, visible } from "./show.js";

const MAX_SIZE = 256 * 1024;
const MAX_IMAGES = 16; // of one message
let attached = []; // { name, text } or { name, url }
let blind = ""; // the model, if it is known to read text only

export function serve({ id, capabilities }) {
  blind = capabilities && !capabilities.includes("vision") ? id : "";
  $("attach").setAttribute("aria-label", blind ? "Attach text files" : "Attach text files or images");
}

export async function attach(files) {
  const problems = [];
  for (const file of files) {
    try {
      if (isPicture(file)) {
        attached.push(await readPicture(file));
        continue;
      }
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

async function readPicture(file) {
  if (blind) throw new Error(`is an image, and ${blind} reads text only`);
  if (attached.filter((one) => one.url).length >= MAX_IMAGES) throw new Error(`is more than ${MAX_IMAGES} images`);
  try {
    return await picture(file);
  } catch {
    throw new Error("is damaged or no image");
  }
}

// The images of a message that is edited, or was not sent.
export function hold(images) {
  attached.push(...images.filter(({ url }) => !attached.some((one) => one.url === url)));
  drawAttached();
}

export function clear() {
  attached = [];
  drawAttached();
}

function drawAttached(problems = []) {
  $("attached").hidden = !attached.length && !problems.length;
  $("attached").replaceChildren(
    ...attached.map((one) => element("li", "", ...(one.url ? [thumbnail(one), " "] : []), visible(one.name) + " ",
      button("Remove", () => { attached = attached.filter((other) => other !== one); drawAttached(); $("attach").focus(); }, "Remove " + one.name))),
    ...problems.map((problem) => element("li", "problem", visible(problem))));
}

// The text with the files below it, and the images; they are then attached no more.
export function withFiles(text) {
  const images = attached.filter((one) => one.url);
  const blocks = attached.filter((one) => !one.url).map(({ name, text: content }) => {
    const longest = Math.max(0, ...[...content.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(Math.max(3, longest + 1));
    const suffix = name.includes(".") ? name.slice(name.lastIndexOf(".") + 1) : "";
    return `${name}:\n${fence}${suffix}\n${content.trimEnd()}\n${fence}`;
  });
  clear();
  return { text: [text, ...blocks].filter(Boolean).join("\n\n"), images };
}

export function start() {
  $("attach").addEventListener("click", () => $("files").click());
  $("files").addEventListener("change", async () => {
    await attach($("files").files);
    $("files").value = "";
  });
  $("text").addEventListener("paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
  $("chat").addEventListener("dragover", (event) => event.preventDefault());
  $("chat").addEventListener("drop", (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
}
