// Files that are sent with a message, as the terminal sends them: a text as a name and a block of code, an
// image as itself, and a document as the text that the server reads in it.

import { json, send } from "./api.js";
import { thumbnail } from "./message.js";
import { $, button, element, on, visible } from "./show.js";
import { isDocument } from "./tree.js";

const MAX_SIZE = 256 * 1024;
const MAX_DOCUMENT = 32 << 20;
const DOCUMENTS = /\.(pdf|docx|html?)$/i;
const PICTURES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_IMAGES = 16; // of one message
let attached = []; // { name, text } or { name, url }
let blind = ""; // the model, if it is known to read text only

export function serve({ id, capabilities }) {
  blind = capabilities && !capabilities.includes("vision") ? id : "";
  $("attach").ariaLabel = blind ? "Attach documents" : "Attach documents or images";
}

export async function attach(files) {
  const problems = [];
  for (const file of files) {
    try {
      if (PICTURES.includes(file.type)) {
        attached.push(await readPicture(file));
        continue;
      }
      const text = await shortText(file);
      if (text === null) {
        $("attached").hidden = false;
        $("attached").append(element("li", "quiet", `Reading ${visible(file.name)}…`));
      }
      attached.push(text === null ? await readDocument(file) : { name: file.name, text });
    } catch (error) {
      problems.push(`${file.name} ${error.message.replace(/^data: |\.$/g, "")}.`);
    }
  }
  drawAttached(problems);
}

// The text of a short file in UTF-8; null for what the server has to read.
async function shortText(file) {
  if (file.size > MAX_SIZE || DOCUMENTS.test(file.name)) return null;
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

async function readDocument(file) {
  if (file.size > MAX_DOCUMENT) throw new Error("is larger than 32 MiB");
  requireRoom("files");
  const { dataUrl } = await import("./pictures.js");
  const data = (await dataUrl(file)).split(",")[1] ?? "";
  const { url } = await json(send("POST", "/api/v1/documents", { name: file.name.slice(-200), data }));
  return { name: file.name, url };
}

function requireRoom(kind) {
  if (images().length >= MAX_IMAGES) throw new Error(`is more than ${MAX_IMAGES} ${kind}`);
}

async function readPicture(file) {
  if (blind) throw new Error(`is an image, and ${blind} reads text only`);
  requireRoom("images");
  const { picture } = await import("./pictures.js");
  try {
    return await picture(file);
  } catch {
    throw new Error("is damaged or no image");
  }
}

// The images of a message that was not sent.
export function hold(images) {
  attached.push(...images.filter(({ url }) => !attached.some((one) => one.url === url)));
  drawAttached();
}

// Those of a message that is edited, instead of what was attached.
export function replace(images) {
  attached = [];
  hold(images);
}

export const images = () => attached.filter((one) => one.url);

function drawAttached(problems = []) {
  $("attached").hidden = !attached.length && !problems.length;
  $("attached").replaceChildren(
    ...attached.map((one) => element("li", "", ...(one.url ? [thumbnail(one), " "] : []), one.url && isDocument(one.url) ? "" : visible(one.name) + " ",
      button("Remove", () => { attached = attached.filter((other) => other !== one); drawAttached(); $("attach").focus(); }, "Remove " + one.name))),
    ...problems.map((problem) => element("li", "problem", visible(problem))));
}

// The text with the files below it, and the images; they are then attached no more.
export function withFiles(text) {
  const pictures = images();
  const blocks = attached.filter((one) => !one.url).map(({ name, text: content }) => {
    const longest = Math.max(0, ...[...content.matchAll(/`+/g)].map(([run]) => run.length));
    const fence = "`".repeat(Math.max(3, longest + 1));
    const suffix = name.includes(".") ? name.slice(name.lastIndexOf(".") + 1) : "";
    return `${name}:\n${fence}${suffix}\n${content.trimEnd()}\n${fence}`;
  });
  replace([]);
  return { text: [text, ...blocks].filter(Boolean).join("\n\n"), images: pictures };
}

export function start() {
  on("attach", "click", () => $("files").click());
  on("files", "change", async () => {
    await attach($("files").files);
    $("files").value = "";
  });
  on("text", "paste", (event) => {
    if (!event.clipboardData.files.length) return;
    event.preventDefault();
    attach(event.clipboardData.files);
  });
  on("chat", "dragover", (event) => event.preventDefault());
  on("chat", "drop", (event) => {
    event.preventDefault();
    attach(event.dataTransfer.files);
  });
}
