// The view of the engine: speeds, the map of the pages, the requests.

import { ask, events, json } from "./api.js";
import { ownRequest } from "./chat.js";
import { $, count, counted, element, wait } from "./show.js";

const RANK = "fdcpsa"; // of several pages in one cell, the last in this order is shown
const LEAST_CELLS = 128;
const NUM_SPEEDS = 60;
// Hues of requests, far from each other and from those of shared (180) and named (265) pages.
const HUES = [215, 28, 335, 95, 50, 0, 300, 135];

const speeds = { prefill: [], generation: [] };
let pages = []; // a letter each
let windowPages = []; // the same of layers with a window, where those have pages of their own
let used = 0; // pages up to the last that was ever seen in use
const owners = new Map(); // request -> its page table
const colours = new Map(); // request -> the number of its colour

function colour(name) { // as the theme has it
  $("map").style.color = `var(--${name})`;
  return getComputedStyle($("map")).color;
}

// No two requests that live at the same time have one colour, as far as there are colours.
function colourOf(request) {
  if (!colours.has(request)) {
    const taken = new Set(colours.values());
    let number = 0;
    while (taken.has(number)) number++;
    colours.set(request, number);
  }
  const number = colours.get(request), round = Math.floor(number / HUES.length);
  return `hsl(${HUES[number % HUES.length] + 13 * round} 68% ${[52, 68, 38][round % 3]}%)`;
}

function expanded(runs) {
  return [...runs.matchAll(/([a-z])(\d+)/g)].flatMap(([, letter, length]) => Array(Number(length)).fill(letter));
}

function change(letters, changes) {
  for (const [first, runs] of changes)
    expanded(runs).forEach((letter, n) => { letters[first + n] = letter; });
}

function take(kind, data) {
  if (kind === "snapshot") {
    pages = expanded(data.pages);
    windowPages = expanded(data.window_pages || "");
    owners.clear();
    used = 0;
  } else {
    change(pages, data.pages);
    change(windowPages, data.window_pages || []);
  }
  used = Math.max(used, pages.findLastIndex((letter) => letter !== "f") + 1);
  for (const name of data.gone) { owners.delete(name); colours.delete(name); }
  for (const request of data.requests) {
    const table = (owners.get(request.id) || []).slice(0, request.from);
    for (const [first, length] of request.pages)
      for (let n = 0; n < length; n++) table.push(first + n);
    owners.set(request.id, table);
  }
}

function drawing(canvas, height) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth;
  canvas.width = Math.max(1, width * scale);
  canvas.height = Math.max(1, height * scale);
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return [pen, width];
}

// As many pages as were ever in use, and some free ones: of a large cache a chat would be a speck.
function numShown() {
  let shown = LEAST_CELLS;
  while (shown < used * 1.25) shown *= 2;
  return Math.min(shown, pages.length);
}

// The first `shown` of the pages as cells of at most `height` pixels together; the pages of a cell.
function drawCells(canvas, letters, shown, height, fill) {
  const width = canvas.clientWidth;
  let cell = 18;
  while (cell > 4 && Math.ceil(shown / Math.floor(width / cell)) * cell > height) cell--;
  const columns = Math.floor(width / cell), most = columns * Math.floor(height / cell);
  const each = Math.max(1, Math.ceil(shown / most));
  const cells = Math.ceil(shown / each);
  const [pen] = drawing(canvas, Math.ceil(cells / columns) * cell);
  for (let at = 0; at < cells; at++) {
    let best = at * each;
    for (let page = best; page < Math.min(shown, (at + 1) * each); page++)
      if (RANK.indexOf(letters[page]) > RANK.indexOf(letters[best])) best = page;
    pen.fillStyle = fill(letters[best], best);
    pen.fillRect((at % columns) * cell, Math.floor(at / columns) * cell, cell - 1, cell - 1);
  }
  return each;
}

const inUse = (letters) => {
  const held = letters.filter((letter) => "aps".includes(letter)).length;
  return `${count(held)} of ${count(letters.length)} in use`;
};

export function drawMap() {
  const canvas = $("map");
  if (!pages.length || !canvas.clientWidth) return;
  const shown = numShown();
  const holder = new Map();
  for (const [name, table] of owners) for (const page of table) holder.set(page, name);
  const named = {
    f: colour("free"), c: colour("cached"), d: colour("disk"), p: colour("pinned"), s: colour("shared"), a: colour("primary"),
  };
  const each = drawCells(canvas, pages, shown, 260, (letter, page) =>
    letter === "a" ? colourOf(holder.get(page) || "") : named[letter]);
  $("pages").textContent = inUse(pages);
  const notes = [];
  if (each > 1) notes.push(`a cell is ${each} pages`);
  if (shown < pages.length) notes.push(`${count(pages.length - shown)} more, never used yet, are not drawn`);
  $("map-scale").textContent = notes.join(" · ");
  $("windows").hidden = !windowPages.length;
  if (!windowPages.length) return;
  const ofCell = drawCells($("window-map"), windowPages, windowPages.length, 60, (letter) => named[letter]);
  $("window-pages").textContent = inUse(windowPages);
  $("window-scale").textContent = ofCell > 1 ? `a cell is ${ofCell} pages` : "";
}

function drawLine(canvas, values, top) {
  const [pen, width] = drawing(canvas, 22);
  pen.strokeStyle = colour("primary");
  pen.lineWidth = 1.5;
  pen.beginPath();
  values.forEach((value, n) => pen.lineTo((n / (NUM_SPEEDS - 1)) * width, 21 - (value / Math.max(1, top)) * 20));
  pen.stroke();
}

function drawRequests(requests) {
  const list = $("requests");
  list.textContent = requests.length ? "" : "none";
  const live = new Set(requests.map((one) => one.id));
  for (const name of colours.keys()) if (!live.has(name) && !owners.has(name)) colours.delete(name);
  for (const one of requests.slice(0, 20)) {
    const swatch = element("i", "swatch"), fill = element("i");
    swatch.style.background = fill.style.background = colourOf(one.id);
    const isRead = one.state === "decoding" || !one.num_to_compute;
    fill.style.width = `${isRead ? 100 : (100 * one.num_computed) / one.num_to_compute}%`;
    const whose = one.id === ownRequest ? "this chat" : one.id.slice(0, 8);
    list.append(element("div", "request", swatch,
      `${whose} · ${one.state} · ${count(one.prompt_tokens)} + ${counted(one.output_tokens, "token")} · ${counted(one.num_pages, "page")}`,
      element("div", "bar", fill)));
  }
  if (requests.length > 20) list.append(`and ${requests.length - 20} more`);
}

function drawStats(stats) {
  for (const name of ["prefill", "generation"]) {
    const values = speeds[name];
    values.push(stats.tokens_per_second[name]);
    if (values.length > NUM_SPEEDS) values.shift();
    const top = Math.max(...values), now = values.at(-1);
    $(name).textContent = now ? `${count(now)} tokens/s` : "idle";
    $(name + "-scale").textContent = top ? `scale: 0 to ${count(top)} tokens/s` : "";
    drawLine($(name + "-line"), values, top);
  }
  const { queries, hits } = stats.prefix_cache;
  $("hits").textContent = queries ? `${count((100 * hits) / queries)} %` : "–";
  $("memory").textContent = `${(stats.bytes.kv_cache / 2 ** 30).toFixed(2)} GiB ${stats.kv_cache_dtype}`;
}

async function followMap(query, signal) {
  for await (const { event, data } of events(await ask("/api/v1/kv/map" + query, { signal }))) {
    if (event === "error") return;
    take(event, JSON.parse(data));
    requestAnimationFrame(drawMap);
  }
}

async function followNumbers(query, signal, isOver) {
  while (!isOver()) {
    if (!document.hidden) {
      drawRequests((await json(ask("/api/v1/requests" + query, { signal }))).data);
      drawStats(await json(ask("/api/v1/kv/stats" + query, { signal })));
    }
    await wait(1);
  }
}

// The engine of this model, until the server ends, or refuses, or another model is chosen.
export async function follow(model, signal) {
  $("refused").hidden = true;
  let isOver = false;
  const query = "?model=" + encodeURIComponent(model);
  const numbers = followNumbers(query, signal, () => isOver);
  try {
    await Promise.race([followMap(query, signal), numbers]);
  } finally {
    isOver = true;
    numbers.catch(() => {}); // the other one has told it
  }
}
