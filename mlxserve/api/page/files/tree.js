// A chat is a tree of messages: those with one parent are versions of each other, and `leaf` ends the
// branch that is shown. Nothing is overwritten by an edit or a new answer.

export const isDocument = (url) => url.startsWith("data:text/plain;"); // its text; else an image

export class Chat {
  constructor() {
    this.id = null; // the server's, once it has a question
    this.title = "";
    this.system = "";
    this.draft = "";
    this.messages = [];
    this.leaf = null;
    this.known = new Map(); // id -> message
  }

  // Takes a message as the server has it: a new one, or what has changed of one.
  take({ parent_id, ...sent }) {
    let message = this.known.get(sent.id);
    if (!message) {
      message = { parent: this.known.get(parent_id) ?? null };
      this.known.set(sent.id, message);
      this.messages.push(message);
    }
    return Object.assign(message, sent);
  }

  isWithin({ parent_id }) { // whether what comes before a message is here
    return parent_id === null || this.known.has(parent_id);
  }

  path(last = this.leaf) {
    const found = [];
    for (let one = last; one; one = one.parent) found.unshift(one);
    return found;
  }

  versions(message) {
    return this.messages.filter((one) => one.parent === message.parent);
  }

  get writing() { // the answer that the server writes
    return this.messages.findLast((one) => one.state === "writing") ?? null;
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
}
