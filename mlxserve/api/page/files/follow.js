// Follows one chat, or without one the list of chats: the server writes the answers, and tells here what happens.
// A lost connection is opened again after the last event that arrived.

import { Refused, ask, events } from "./api.js";
import { wait } from "./show.js";

const AGAIN_SECONDS = 0.5; // between two tries
let following = new AbortController();

export function leave() {
  following.abort();
}

// Calls `hear(event, data)` for each event until `leave`, and `lost(error)` while the server does not answer.
// `id` is null for the list.
export async function follow(id, hear, lost) {
  following.abort();
  const { signal } = following = new AbortController();
  let last = "", grown;
  while (!signal.aborted) {
    try {
      const reply = await ask(`/api/v1/chats/${id === null ? "" : id + "/"}events`, { signal, headers: last ? { "last-event-id": last } : {} });
      for await (const { id: number, event, data } of events(reply)) {
        if (signal.aborted) return;
        last = number ?? last;
        if (event === "error") { last = ""; continue; } // it read too slowly
        if (event !== "more") grown = { event, data: JSON.parse(data) };
        else grown.data = longer(grown.data, JSON.parse(data));
        await hear(grown.event, grown.data);
      }
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof Refused && error.status < 429) { // it is gone, or of another owner
        if (id !== null && error.status === 404) { hear("deleted", { id }); return; }
        if (id === null) return;
      }
      lost(error);
    }
    await wait(AGAIN_SECONDS);
  }
}

// The event that grew a text, for what that text grows by next.
const longer = ({ id, patches }, text) =>
  patches ? { id, patches: [{ path: patches[0].path, keep: patches[0].keep, grow: text }] } : { id, text };

// The blocks after some patches of the server. What does not change is the same object as before.
export function patched(blocks, patches) {
  return patches.reduce((all, { path, ...patch }) => at(all, 0, path, patch), blocks);
}

function at(children, first, [number, ...path], patch) { // `first` child: an element's tag and attributes come before
  const copy = [...children];
  if (number !== undefined) {
    copy[first + number] = at(copy[first + number], 2, path, patch);
    return copy;
  }
  copy.length = first + patch.keep;
  if (patch.grow !== undefined) copy[copy.length - 1] += patch.grow;
  copy.push(...(patch.add ?? []));
  return copy;
}
