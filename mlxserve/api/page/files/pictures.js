// Images of a message: made small enough to be kept, and shown as thumbnails.

import { element, visible } from "./show.js";
import { isDocument } from "./tree.js";

const TYPES = ["image/png", "image/jpeg", "image/webp", "image/gif"];
const MAX_SIZE = 1 << 20; // bytes of what is kept
const MAX_SIDE = 2048; // pixels of what is kept, where it was made smaller
const QUALITIES = [0.9, 0.75, 0.5]; // of JPEG, until it fits

export const isPicture = (file) => TYPES.includes(file.type);

// { name, url }: the file itself, or a smaller one, upright and on white. Throws for what is no image.
export async function picture(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MAX_SIZE) return { name: file.name, url: await dataUrl(file) };
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(bitmap.width * scale));
  canvas.height = Math.max(1, Math.round(bitmap.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const urls = QUALITIES.map((quality) => canvas.toDataURL("image/jpeg", quality));
  return { name: file.name, url: urls.find((url) => url.length * 3 / 4 <= MAX_SIZE) ?? urls.at(-1) };
}

export function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => done(reader.result));
    reader.addEventListener("error", () => failed(reader.error));
    reader.readAsDataURL(file);
  });
}

export function thumbnail({ name, url }) {
  if (isDocument(url)) return element("span", "document", visible(name));
  const shown = element("img", "thumbnail");
  if (url.startsWith("data:image/")) shown.src = url;
  shown.alt = name || "Image";
  shown.title = name;
  return shown;
}
