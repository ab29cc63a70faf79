// Tools of this server (MCP): which there are, and what the user allows. Names, descriptions and
// results are text of strangers.

import { Refused, ask, send } from "./api.js";
import { $, button, counted, element, visible } from "./show.js";

const TOOLS = "/api/v1/tools";
const WORDS = { ask: "asks first", always: "always", never: "never" };
const STATES = { off: "off", starting: "starting …", ready: "", failed: "failed" };

let servers = null; // null until the first answer, and where tools are not for this client
let isForOthers = false; // tools run programs as the user of the server
let decide = () => {}; // of the call that is asked about

async function change(path, body = {}, options = {}) {
  const reply = await (await send("POST", `${TOOLS}/${path}`, body, options)).json();
  servers = reply.data;
  draw(reply);
}

// The server has started them with the question; what failed is shown.
export async function refresh() {
  if (isForOthers) return;
  try {
    const reply = await (await ask(TOOLS)).json();
    servers = reply.data;
    draw(reply);
  } catch (error) {
    isForOthers = error instanceof Refused;
  }
}

// Asks whether the model may call a tool; `tell` gets the decision, here or from another page that follows.
export function confirm({ name, description, arguments: written }, tell) {
  const dialog = $("call");
  $("call-name").textContent = visible(name);
  $("call-description").textContent = visible(description);
  $("call-arguments").textContent = visible(pretty(written));
  decide = (decision) => { close(); tell(decision); };
  if (!dialog.open) dialog.showModal();
  $("call-not-now").focus(); // a key that was meant for the composer must not allow a call
}

export function close() {
  decide = () => {};
  $("call").close();
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
    const state = STATES[server.state] || counted(server.tools.length, "tool");
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
