// Files as data: URLs, and images small enough to be kept. Fetched with the first file that is attached.

import { element } from "./show.js";

const MAX_SIZE = 1 << 20; // bytes of what is kept
const MAX_SIDE = 2048; // pixels of what is kept, where it was made smaller
const QUALITIES = [0.9, 0.75, 0.5]; // of JPEG, until it fits

// { name, url }: the file itself, or a smaller one, upright and on white. Throws for what is no image.
export async function picture(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size <= MAX_SIZE) return { name: file.name, url: await dataUrl(file) };
  const canvas = element("canvas");
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
    Object.assign(reader, { onload: () => done(reader.result), onerror: () => failed(reader.error) });
    reader.readAsDataURL(file);
  });
}
