// A chat is a tree of messages: those with one parent are versions of each other, and `leaf` ends the
// branch that is shown. Nothing is overwritten by an edit or a new answer.

export class Chat {
  constructor() {
    this.system = "";
    this.messages = [];
    this.leaf = null;
  }

  add(parent, role, text = "") {
    const message = { parent, role, text, thinking: "", state: "done", error: "", model: "", stats: {} };
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
    const sent = this.system ? [{ role: "system", content: this.system }] : [];
    for (const { role, text } of this.path(last)) {
      if (!text) continue;
      const before = sent.at(-1);
      if (before?.role === role) before.content += "\n\n" + text;
      else sent.push({ role, content: text });
    }
    return sent;
  }
}
