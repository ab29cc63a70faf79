// The view of the engine: speeds, the map of the pages, the requests.

import { ask, events } from "./api.js";
import { ownRequest } from "./chat.js";
import { ofModel } from "./models.js";
import { $, count, element, wait } from "./show.js";

const RANK = "fdcpsa"; // of several pages in one cell, the last in this order is shown
const LEAST_CELLS = 128;
const NUM_SPEEDS = 60;
// Hues of requests, far from each other and from those of shared (180) and named (265) pages.
const HUES = [215, 28, 335, 95, 50, 0, 300, 135];

const speeds = { prefill: [], generation: [] };
let pages = []; // a letter each
let used = 0; // pages up to the last that was ever seen in use
const owners = new Map(); // request -> its page table
const colours = new Map(); // request -> the number of its colour

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

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
  const letters = [];
  for (const [, letter, length] of runs.matchAll(/([a-z])(\d+)/g))
    for (let n = 0; n < Number(length); n++) letters.push(letter);
  return letters;
}

function take(kind, data) {
  if (kind === "snapshot") { pages = expanded(data.pages); owners.clear(); used = 0; }
  else for (const [first, runs] of data.pages)
    expanded(runs).forEach((letter, n) => { pages[first + n] = letter; });
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

export function drawMap() {
  const canvas = $("map"), width = canvas.clientWidth;
  if (!pages.length || !width) return;
  const shown = numShown();
  let cell = 18;
  while (cell > 4 && Math.ceil(shown / Math.floor(width / cell)) * cell > 260) cell--;
  const columns = Math.floor(width / cell), most = columns * Math.floor(260 / cell);
  const each = Math.max(1, Math.ceil(shown / most));
  const cells = Math.ceil(shown / each);
  const [pen] = drawing(canvas, Math.ceil(cells / columns) * cell);
  const holder = new Map();
  for (const [name, table] of owners) for (const page of table) holder.set(page, name);
  const named = { f: colour("free"), c: colour("cached"), d: colour("disk"), p: colour("pinned"), s: colour("shared") };
  for (let at = 0; at < cells; at++) {
    let best = at * each;
    for (let page = best; page < Math.min(shown, (at + 1) * each); page++)
      if (RANK.indexOf(pages[page]) > RANK.indexOf(pages[best])) best = page;
    pen.fillStyle = pages[best] === "a" ? colourOf(holder.get(best) || "") : named[pages[best]];
    pen.fillRect((at % columns) * cell, Math.floor(at / columns) * cell, cell - 1, cell - 1);
  }
  const inUse = pages.filter((letter) => "aps".includes(letter)).length;
  $("pages").textContent = `${count(inUse)} of ${count(pages.length)} in use`;
  const notes = [];
  if (each > 1) notes.push(`a cell is ${each} pages`);
  if (shown < pages.length) notes.push(`${count(pages.length - shown)} more, never used yet, are not drawn`);
  $("map-scale").textContent = notes.join(" · ");
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
      `${whose} · ${one.state} · ${count(one.prompt_tokens)} + ${count(one.output_tokens)} tokens · ${count(one.num_pages)} pages`,
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

async function followMap(signal) {
  for await (const { event, data } of events(await ask(ofModel("/api/v1/kv/map"), { signal }))) {
    if (event === "error") return;
    take(event, JSON.parse(data));
    requestAnimationFrame(drawMap);
  }
}

async function followNumbers(isOver) {
  while (!isOver()) {
    if (!document.hidden) {
      drawRequests((await (await ask(ofModel("/api/v1/requests"))).json()).data);
      drawStats(await (await ask(ofModel("/api/v1/kv/stats"))).json());
    }
    await wait(1);
  }
}

// Until the server ends, or refuses, or another model is chosen.
export async function follow(signal) {
  $("refused").hidden = true;
  let isOver = false;
  const numbers = followNumbers(() => isOver);
  try {
    await Promise.race([followMap(signal), numbers]);
  } finally {
    isOver = true;
    numbers.catch(() => {}); // the other one has told it
  }
}
