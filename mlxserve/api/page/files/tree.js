// A chat is a tree of messages: those with one parent are versions of each other, and `leaf` ends the
// branch that is shown. Nothing is overwritten by an edit or a new answer.

const UNMADE = { refused: "The user did not allow this call.", done: "(no output)", failed: "(no output)" };

// What the model gets of a round in which it called tools.
export function roundMessages({ text, thinking, calls }, hasThinking = false) {
  const tool_calls = calls.map((call) => ({ id: call.id, type: "function",
    function: { name: call.name, arguments: call.arguments || "{}" } }));
  const said = { role: "assistant", content: text, tool_calls };
  if (hasThinking && thinking) said.reasoning_content = thinking;
  return [said, ...calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: resultOf(call) }))];
}

// With images for models that see.
function resultOf({ state, result, images = [] }) {
  const text = result || UNMADE[state] || "The user stopped this call.";
  const shown = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return shown.length ? [{ type: "text", text }, ...shown] : text;
}

export const isDocument = (url) => url.startsWith("data:text/plain;"); // its text; else an image

export class Chat {
  constructor() {
    this.id = null; // the server's, once it is saved
    this.title = "";
    this.system = "";
    this.leftOut = null; // the start that the model gets no more, and its summary
    this.isGone = false; // it was deleted
    this.writes = Promise.resolve();
    this.messages = [];
    this.leaf = null;
  }

  add(parent, role, text = "", images = []) {
    const message = { id: null, parent, role, text, images, thinking: "", state: "done", error: "", model: "", stats: {},
      rounds: [] };
    this.messages.push(message);
    this.leaf = message;
    return message;
  }

  path(last = this.leaf) {
    const found = [];
    for (let one = last; one; one = one.parent) found.unshift(one);
    return found;
  }

  versions(message) {
    return this.messages.filter((one) => one.parent === message.parent);
  }

  showBranch(message) { // down to its newest descendant
    let last = message;
    for (;;) {
      const child = this.messages.findLast((one) => one.parent === last);
      if (!child) break;
      last = child;
    }
    this.leaf = last;
  }

  // What the model gets: alternating roles, as some chat templates require.
  wire(last) {
    const path = this.path(last);
    const gone = this.leftOut ? path.findIndex((one) => one.id === this.leftOut.last_id) + 1 : 0;
    const summary = gone && this.leftOut.summary ? "Summary of the conversation so far:\n" + this.leftOut.summary : "";
    const system = [this.system, summary].filter(Boolean).join("\n\n");
    const sent = system ? [{ role: "system", content: system }] : [];
    for (const { role, text, images, rounds } of path.slice(gone)) {
      sent.push(...rounds.flatMap((one) => roundMessages(one)));
      if (!text && !images.length) continue;
      const content = images.length ? [...images.map(shown), ...parts(text)] : text;
      const before = sent.at(-1);
      if (before?.role === role) before.content = joined(before.content, content);
      else sent.push({ role, content });
    }
    return sent;
  }
}

const shown = ({ name, url }) => (isDocument(url)
  ? { type: "file", file: { filename: name, file_data: url } } : { type: "image_url", image_url: { url } });
const parts = (content) => (typeof content !== "string" ? content : content ? [{ type: "text", text: content }] : []);
const joined = (earlier, later) => (typeof earlier === "string" && typeof later === "string"
  ? earlier + "\n\n" + later : [...parts(earlier), ...parts(later)]);
