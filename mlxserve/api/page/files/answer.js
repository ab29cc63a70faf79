// Asks the model for one answer and fills the message with it as it arrives: in rounds, as long as it calls
// tools that the user allows.

import { Refused, events, send } from "./api.js";
import { called, offered } from "./tools.js";
import { roundMessages } from "./tree.js";

const MAX_ROUNDS = 25;
const CUT = "were read: the rest does not fit the context"; // of a warning about a document
const MAX_CALLS = 16; // in one round

// Raises nothing: how it ended is the message's state. `onChange` is called after each piece.
export async function fill(message, body, signal, onChange, onRequest) {
  message.state = "writing";
  let state = "done";
  try {
    for (let number = 0; ; number++) {
      const tools = await offered(signal);
      const heard = await hear(message, body, tools, signal, onChange, onRequest);
      state = heard.state;
      if (!tools.length || !heard.calls.length || state !== "done") break;
      if (number === MAX_ROUNDS)
        throw new Error(`The model called tools ${MAX_ROUNDS} times without answering, so it was stopped.`);
      const round = { text: message.text, thinking: message.thinking, calls: heard.calls.slice(0, MAX_CALLS) };
      message.rounds.push(round);
      Object.assign(message, { text: "", thinking: "" });
      for (const call of round.calls) {
        onChange();
        await called(call, signal, onChange);
      }
      onChange();
      body = { ...body, messages: [...body.messages, ...roundMessages(round, true)] };
    }
  } catch (error) {
    state = signal.aborted ? "stopped" : "failed";
    message.error = state === "failed" ? error.message : "";
  }
  for (const { calls } of message.rounds)
    for (const call of calls) if (call.state === "asked" || call.state === "running") call.state = "stopped";
  message.state = state;
}

// One request: the text is added to the message. Returns how it ended, and the calls. Raises what fails.
async function hear(message, body, tools, signal, onChange, onRequest) {
  const begun = performance.now();
  let first = 0, last = 0, isWhole = false, state = "done";
  const calls = [];
  try {
    const reply = await asked({ ...body, stream: true, stop_on_repetition: true,
      stream_options: { include_usage: true } }, tools, signal);
    onRequest(reply.headers.get("x-request-id"));
    message.cuts = (reply.headers.get("x-mlxserve-warning") ?? "").split("; ").filter((one) => one.includes(CUT)).join(". ");
    for await (const { data } of events(reply)) {
      if (data === "[DONE]") { isWhole = true; break; }
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.usage) note(message.stats, chunk.usage);
      for (const choice of chunk.choices) {
        last = performance.now();
        first ||= last;
        message.text += choice.delta.content || "";
        message.thinking += choice.delta.reasoning_content || "";
        for (const part of choice.delta.tool_calls || []) take(calls, part);
        if (choice.finish_reason === "length") state = "cut";
        if (choice.stop_reason === "repetition") state = "repeated";
      }
      onChange();
    }
    if (!isWhole) throw new Error("The connection ended before the answer did.");
  } finally {
    if (first) {
      message.stats.first_token_seconds = (first - begun) / 1000;
      message.stats.decode_seconds = (last - first) / 1000;
    }
  }
  return { state, calls };
}

// A model that cannot call tools answers without them.
async function asked(body, tools, signal) {
  const ask = (content) => send("POST", "/v1/chat/completions", content, { signal });
  if (!tools.length) return ask(body);
  try {
    return await ask({ ...body, tools });
  } catch (error) {
    if (!(error instanceof Refused) || error.status !== 400 || !/tool/i.test(error.message)) throw error;
    return ask(body);
  }
}

function take(calls, { index, id, function: part }) {
  calls[index] ||= { id: id || `call_${index}`, name: "", arguments: "", state: "asked", result: "", seconds: null };
  calls[index].name += part?.name || "";
  calls[index].arguments += part?.arguments || "";
}

function note(stats, usage) {
  stats.prompt_tokens = usage.prompt_tokens;
  stats.completion_tokens = usage.completion_tokens;
  stats.cached_tokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
  stats.accepted_tokens = usage.speculation?.accepted_tokens ?? null;
}
