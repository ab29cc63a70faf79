// Requests to this server, with the key that the page was given, and streams of events.

let key = sessionStorage.getItem("mlxserve-key") || "";
let onKeyWanted = () => {};

export class Refused extends Error {
  constructor(status, message) { super(message); this.status = status; }
}

export function useKey(text) {
  key = text;
  sessionStorage.setItem("mlxserve-key", key);
}

export function whenKeyWanted(tell) { onKeyWanted = tell; } // told true, and false once a key fits

export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = "Bearer " + key;
  if (options.body) headers["content-type"] = "application/json";
  const reply = await fetch(path, { ...options, headers, cache: "no-store" });
  if (reply.ok || reply.status === 304) { onKeyWanted(false); return reply; }
  if (reply.status === 401) onKeyWanted(true);
  let message = "HTTP " + reply.status;
  try { message = (await reply.json()).error.message; } catch { /* not JSON: the status has to do */ }
  throw new Refused(reply.status, message);
}

export const json = async (reply) => (await reply).json();

export const reasonOf = (error) => (error instanceof Refused ? error.message : "The server does not answer.");

export const send = (method, path, body, options = {}) =>
  ask(path, { ...options, method, body: JSON.stringify(body) });

export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      const fields = { event: "message", data: "" };
      for (const line of part.split("\n")) {
        const at = line.indexOf(":");
        if (at > 0) fields[line.slice(0, at)] = line.slice(at + (line[at + 1] === " " ? 2 : 1));
      }
      if (fields.data) yield fields;
    }
  }
}
