// The OpenAI SDK for Node.js, over the Responses API.
import OpenAI from "openai";

import { forecast, run } from "./driver.mjs";

const TOOL = { type: "function", ...forecast, strict: false };
const responses = (asked) => new OpenAI({ baseURL: asked.base_url, apiKey: asked.key, maxRetries: 0 }).responses;

function answer(response) {
  const calls = response.output.filter((item) => item.type === "function_call");
  return {
    text: response.output_text,
    finish: calls.length ? "tool_calls" : { completed: "stop" }[response.status],
    calls: calls.map((call) => ({ id: call.call_id, name: call.name, arguments: JSON.parse(call.arguments) })),
    tokens: response.usage.total_tokens,
  };
}

async function streamed(asked, wanted) {
  const pieces = [];
  const events = responses(asked).stream({ model: asked.model, ...wanted });
  events.on("response.output_text.delta", (event) => pieces.push(event.delta));
  return [await events.finalResponse(), pieces];
}

run({
  chat: async (asked) => answer(await responses(asked).create({ model: asked.model, input: asked.prompt })),
  stream: async (asked) => {
    const [response, pieces] = await streamed(asked, { input: asked.prompt });
    return { ...answer(response), pieces };
  },
  tools: async (asked) => {
    const create = async (wanted) =>
      asked.streamed ? (await streamed(asked, wanted))[0] : responses(asked).create({ model: asked.model, ...wanted });
    const first = await create({ input: asked.prompt, tools: [TOOL] });
    const calls = first.output.filter((item) => item.type === "function_call");
    const results = calls.map((call) => ({
      type: "function_call_output",
      call_id: call.call_id,
      output: asked.result,
    }));
    const input = [{ role: "user", content: asked.prompt }, ...first.output, ...results];
    const second = await create({ input, tools: [TOOL] });
    return { ...answer(first), text: second.output_text };
  },
  image: async (asked) => {
    const content = [
      { type: "input_text", text: asked.prompt },
      { type: "input_image", image_url: asked.image, detail: "auto" },
    ];
    return answer(await responses(asked).create({ model: asked.model, input: [{ role: "user", content }] }));
  },
  refused: async (asked) =>
    answer(await responses(asked).create({ model: asked.model, input: asked.prompt, conversation: "conv_1" })),
  cancel: async (asked) => {
    const events = await responses(asked).create({ model: asked.model, input: asked.prompt, stream: true });
    for await (const event of events) {
      if (event.type === "response.output_text.delta") {
        events.controller.abort();
        return { first: event.delta };
      }
    }
  },
});
