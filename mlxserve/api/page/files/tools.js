// Tools of this server (MCP): which there are, and what the user allows. Names, descriptions and
// results are text of strangers.

import { Refused, ask, json, send } from "./api.js";
import { $, button, counted, element, note, on, visible } from "./show.js";

const TOOLS = "/api/v1/tools";
const WORDS = { ask: "asks first", always: "always", never: "never" };
const STATES = { off: "off", starting: "starting …", ready: "", failed: "failed" };

let isForOthers = false; // tools run programs as the user of the server
let decide = () => {}; // of the call that is asked about

// The server has started them with the question; what failed is shown.
export async function refresh() {
  if (isForOthers) return;
  try {
    draw(await json(ask(TOOLS)));
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

function draw({ data: servers, file, problem }) {
  const failed = servers.filter((server) => server.is_on && server.state === "failed");
  note("tools-problem", [problem, ...failed.map((server) => server.problem)].map(visible).join(" ").trim());
  $("tools-note").textContent = problem || (servers.length ? ""
    : `Servers of tools (MCP) are named in ${file}, as {"mcpServers": {"time": {"command": "uvx", "args": `
      + `["mcp-server-time"]}}}. It is read again with the next question.`);
  $("tools-list").replaceChildren(...servers.map((server) => {
    const state = STATES[server.state] || counted(server.tools.length, "tool");
    const isOn = server.is_on && server.state !== "failed";
    const act = isOn ? "Switch off" : "Start";
    const head = element("div", "server", element("b", "", visible(server.name)), ` ${state} `,
      button(act, () => attempt("switch", { server: server.name, is_on: !isOn }), `${act} ${visible(server.name)}`));
    return element("li", "", head, element("p", "problem", visible(server.problem)),
      element("ul", "list", ...server.tools.map(row)));
  }));
}

function row(tool) {
  const choice = element("select");
  choice.ariaLabel = `May ${tool.tool} be called?`;
  choice.append(...Object.entries(WORDS).map(([value, words]) => new Option(words, value)));
  choice.value = tool.permission;
  choice.addEventListener("change", () => attempt("permission", { name: tool.name, permission: choice.value }));
  return element("li", "tool", choice, element("span", "", visible(tool.tool)),
    element("span", "quiet short", visible(tool.description)));
}

async function attempt(path, body) {
  try {
    draw(await json(send("POST", `${TOOLS}/${path}`, body)));
  } catch (error) {
    $("tools-note").textContent = error.message;
  }
}

export function start() {
  for (const [id, decision] of
    [["call-once", "once"], ["call-always", "always"], ["call-not-now", "not now"], ["call-never", "never"]])
    on(id, "click", () => decide(decision));
  on("call", "cancel", () => decide("not now")); // closed otherwise than by Esc, which stops
  on("tools-open", "click", async () => {
    $("settings").close();
    $("tools").showModal();
    $("tools-note").textContent = "Starting …";
    await attempt("start", {});
  });
}
