// Asks the model for one answer and fills the message with it as it arrives.

import { events, send } from "./api.js";

// Raises nothing: how it ended is the message's state. `onChange` is called after each piece.
export async function fill(message, body, signal, onChange, onRequest) {
  const begun = performance.now();
  let first = 0, last = 0, isWhole = false;
  message.state = "writing";
  let state = "done";
  try {
    const reply = await send("POST", "/v1/chat/completions",
      { ...body, stream: true, stop_on_repetition: true, stream_options: { include_usage: true } }, { signal });
    onRequest(reply.headers.get("x-request-id"));
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
        if (choice.finish_reason === "length") state = "cut";
        if (choice.stop_reason === "repetition") state = "repeated";
      }
      onChange();
    }
    if (!isWhole) throw new Error("The connection ended before the answer did.");
  } catch (error) {
    state = signal.aborted ? "stopped" : "failed";
    message.error = state === "failed" ? error.message : "";
  }
  if (first) {
    message.stats.first_token_seconds = (first - begun) / 1000;
    message.stats.decode_seconds = (last - first) / 1000;
  }
  message.state = state;
}

function note(stats, usage) {
  stats.prompt_tokens = usage.prompt_tokens;
  stats.completion_tokens = usage.completion_tokens;
  stats.cached_tokens = usage.prompt_tokens_details?.cached_tokens ?? 0;
}
