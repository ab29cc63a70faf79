// Tools of this server (MCP): which there are, what the user allows, and calls. Names, descriptions and
// results are text of strangers.

import { Refused, send } from "./api.js";
import { $, button, element, visible } from "./show.js";

const TOOLS = "/api/v1/tools";
const WORDS = { ask: "asks first", always: "always", never: "never" };
const STATES = { off: "off", starting: "starting …", ready: "", failed: "failed" };

let servers = null; // null until the first answer, and where tools are not for this client
let starting = null; // the start that the first question waits for
let decide = () => {}; // of the call that is asked about

const tools = () => (servers || []).flatMap((server) => server.tools);
const named = (name) => tools().find((tool) => tool.name === name && tool.permission !== "never");

async function change(path, body = {}, options = {}) {
  const reply = await (await send("POST", `${TOOLS}/${path}`, body, options)).json();
  servers = reply.data;
  draw(reply);
}

// The servers of mcp.json start with the first question, and those that it names since then with the next.
export async function offered(signal) {
  starting ||= begin();
  await Promise.race([starting, new Promise((_, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason), { once: true });
  })]);
  return tools().filter((tool) => tool.permission !== "never")
    .map(({ name, description, parameters }) => ({ type: "function", function: { name, description, parameters } }))
    .sort((a, b) => (a.function.name < b.function.name ? -1 : 1));
}

async function begin() {
  try {
    await change("start");
    starting = null; // the file is looked at again with the next question
  } catch (error) {
    if (!(error instanceof Refused)) starting = null;
  }
}

// The call at its end: made, refused or failed. Raises what `signal` stops it with.
export async function called(call, signal, onChange) {
  const tool = named(call.name);
  if (tool && tool.permission === "ask") {
    const decision = await confirmed(tool, call.arguments, signal);
    if (decision === "always" || decision === "never")
      await change("permission", { name: tool.name, permission: decision }, { signal });
    if (decision === "not now" || decision === "never") { call.state = "refused"; return; }
  }
  call.state = "running";
  onChange();
  try {
    const { name, arguments: written } = call;
    const reply = await (await send("POST", `${TOOLS}/call`, { name, arguments: written || "{}" }, { signal })).json();
    Object.assign(call, { state: reply.is_error ? "failed" : "done", result: reply.text, seconds: reply.seconds,
      images: reply.images });
  } catch (error) {
    if (signal.aborted) throw error;
    Object.assign(call, { state: "failed", result: error.message });
  }
}

function confirmed(tool, written, signal) {
  const dialog = $("call");
  $("call-name").textContent = visible(tool.name);
  $("call-description").textContent = visible(tool.description);
  $("call-arguments").textContent = visible(pretty(written));
  return new Promise((resolve, reject) => {
    const stop = () => { dialog.close(); reject(signal.reason); };
    decide = (decision) => {
      signal.removeEventListener("abort", stop);
      dialog.close();
      resolve(decision);
    };
    signal.addEventListener("abort", stop, { once: true });
    dialog.showModal();
    $("call-not-now").focus(); // a key that was meant for the composer must not allow a call
  });
}

function pretty(written) {
  try { return JSON.stringify(JSON.parse(written || "{}"), null, 2); } catch { return written; }
}

// ---- the dialog that shows them

function draw({ file, problem }) {
  const failed = servers.filter((server) => server.is_on && server.state === "failed");
  $("tools-problem").textContent = [problem, ...failed.map((server) => server.problem)].map(visible).join(" ").trim();
  $("tools-problem").hidden = !$("tools-problem").textContent;
  $("tools-note").textContent = problem || (servers.length ? ""
    : `Servers of tools (MCP) are named in ${file}, as {"mcpServers": {"time": {"command": "uvx", "args": `
      + `["mcp-server-time"]}}}. It is read again with the next question.`);
  $("tools-list").replaceChildren(...servers.map((server) => {
    const state = STATES[server.state] || `${server.tools.length} tools`;
    const head = element("div", "server", element("b", "", visible(server.name)), ` ${state} `,
      button(server.is_on && server.state !== "failed" ? "Switch off" : "Start",
        () => attempt("switch", { server: server.name, is_on: !server.is_on || server.state === "failed" }),
        `${server.is_on && server.state !== "failed" ? "Switch off" : "Start"} ${visible(server.name)}`));
    return element("li", "", head, element("p", "problem", visible(server.problem)),
      element("ul", "", ...server.tools.map(row)));
  }));
}

function row(tool) {
  const choice = element("select");
  choice.setAttribute("aria-label", `May ${tool.tool} be called?`);
  for (const [value, words] of Object.entries(WORDS)) {
    const option = element("option", "", words);
    Object.assign(option, { value, selected: value === tool.permission });
    choice.append(option);
  }
  choice.addEventListener("change", () => attempt("permission", { name: tool.name, permission: choice.value }));
  return element("li", "tool", choice, element("span", "", visible(tool.tool)),
    element("span", "quiet", visible(tool.description)));
}

async function attempt(path, body) {
  try {
    await change(path, body);
  } catch (error) {
    $("tools-note").textContent = error.message;
  }
}

export function start() {
  for (const [id, decision] of
    [["call-once", "once"], ["call-always", "always"], ["call-not-now", "not now"], ["call-never", "never"]])
    $(id).addEventListener("click", () => decide(decision));
  $("call").addEventListener("cancel", () => decide("not now")); // closed otherwise than by Esc, which stops
  $("tools-open").addEventListener("click", async () => {
    $("settings").close();
    $("tools").showModal();
    $("tools-note").textContent = "Starting …";
    await attempt("start", {});
  });
}
