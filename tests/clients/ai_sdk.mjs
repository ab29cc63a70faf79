// Runs the AI SDK against the server at argv[2], through each of its providers, whole and as a stream.
// argv[3]: questions as JSON. Prints for each provider, way and question what came of it.
import { generateText, isStepCount, jsonSchema, streamText, tool } from "ai";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";

const [url, questions] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const providers = {
  compatible: createOpenAICompatible({ name: "mlxserve", baseURL, apiKey: "none" })("local"),
  anthropic: createAnthropic({ baseURL, apiKey: "none" })("local"),
  chat: openai.chat("local"),
  responses: openai.responses("local"),
};
const inputSchema = jsonSchema({
  type: "object",
  required: ["city"],
  properties: { city: { type: "string" } },
});
const tools = {
  weather: tool({
    description: "Tells the weather.",
    inputSchema,
    execute: async ({ city }) => `rain in ${city}`,
  }),
};

async function whole(options) {
  const { text, steps } = await generateText(options);
  return { text, steps: steps.length, calls: steps.flatMap((step) => step.toolCalls).length };
}

async function stream(options) {
  const errors = [];
  const result = streamText({ ...options, onError: ({ error }) => errors.push(String(error)) });
  let text = "";
  for await (const part of result.textStream) text += part;
  const steps = await result.steps;
  const calls = steps.flatMap((step) => step.toolCalls).length;
  return { text: await result.text, all: text, steps: steps.length, calls, errors };
}

const outcomes = [];
for (const [provider, model] of Object.entries(providers)) {
  for (const [way, run] of Object.entries({ whole, stream })) {
    for (const prompt of JSON.parse(questions)) {
      // More tokens than the default of Anthropic's provider, of which 4,400 digits take more.
      const options = { model, tools, prompt, stopWhen: isStepCount(3), maxRetries: 0, maxOutputTokens: 20_000 };
      outcomes.push({ provider, way, prompt, ...(await run(options)) });
    }
  }
}
console.log(JSON.stringify(outcomes));
