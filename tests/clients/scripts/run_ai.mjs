// The Vercel AI SDK with its provider for OpenAI-compatible servers, or with the one that the first argument names.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";
import { forecast, run } from "./driver.mjs";

// The provider for OpenAI speaks the Responses API.
const provider = (baseURL, apiKey) => process.argv[2] === "openai"
  ? createOpenAI({ baseURL, apiKey })
  : createOpenAICompatible({ name: "everloop", baseURL, apiKey, includeUsage: true });

const options = (asked) => ({
  model: provider(asked.base_url, asked.key)(asked.model),
  maxRetries: 0,
  prompt: asked.prompt,
});

const answer = (result) => ({
  text: result.text,
  reasoning: result.reasoningText,
  finish: result.finishReason,
  calls: result.toolCalls.map((call) => ({ id: call.toolCallId, name: call.toolName, arguments: call.input })),
  tokens: result.usage.totalTokens,
});

// A stream's errors come as a part of it.
async function streamed(wanted) {
  let failed;
  const result = streamText({ ...wanted, onError: ({ error }) => { failed = error; } });
  const pieces = [];
  for await (const piece of result.textStream) pieces.push(piece);
  if (failed) throw failed;
  const names = ["text", "reasoningText", "finishReason", "toolCalls", "usage", "steps"];
  const values = await Promise.all(names.map((name) => result[name]));
  return { pieces, ...Object.fromEntries(names.map((name, at) => [name, values[at]])) };
}

async function stream(asked) {
  const result = await streamed(options(asked));
  return { ...answer(result), pieces: result.pieces };
}

async function tools(asked) {
  const offered = tool({
    description: forecast.description, inputSchema: jsonSchema(forecast.parameters), execute: async () => asked.result,
  });
  const wanted = { ...options(asked), tools: { forecast: offered }, stopWhen: stepCountIs(3) };
  const result = asked.streamed ? await streamed(wanted) : await generateText(wanted);
  const first = answer(result.steps[0]);
  return { ...first, finish: first.finish.replace("-", "_"), text: result.text };
}

async function image(asked) {
  const content = [{ type: "text", text: asked.prompt }, { type: "image", image: asked.image }];
  const { prompt, ...wanted } = options(asked);
  return answer(await generateText({ ...wanted, messages: [{ role: "user", content }] }));
}

async function cancel(asked) {
  const stop = new AbortController();
  const result = streamText({ ...options(asked), abortSignal: stop.signal });
  for await (const first of result.textStream) {
    stop.abort();
    return { first };
  }
}

run({
  stream, tools, image, cancel,
  chat: async (asked) => answer(await generateText(options(asked))),
  refused: async (asked) => answer(await generateText({
    ...options(asked),
    ...(process.argv[2] === "openai" ? { temperature: 3 } : { providerOptions: { everloop: { n: 2 } } }),
  })),
});
