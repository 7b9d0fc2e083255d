// The OpenAI SDK for Node.js, and Void's way of reading its stream.
import OpenAI from "openai";
import { forecast, run } from "./driver.mjs";

const client = (asked) => new OpenAI({ baseURL: asked.base_url, apiKey: asked.key, maxRetries: 0 });
const said = (content) => [{ role: "user", content }];
const tools = [{ type: "function", function: forecast }];
const usage = { stream: true, stream_options: { include_usage: true } };

function answer(completion) {
  const { message, finish_reason: finish } = completion.choices[0];
  const calls = (message.tool_calls ?? []).map(({ id, function: called }) => ({
    id, name: called.name, arguments: JSON.parse(called.arguments),
  }));
  return { text: message.content, finish, calls, tokens: completion.usage.total_tokens };
}

async function create(asked, messages, more = {}) {
  const body = { model: asked.model, messages, ...more };
  const completions = client(asked).chat.completions;
  return asked.streamed ? completions.stream({ ...body, ...usage }).finalChatCompletion() : completions.create(body);
}

async function stream(asked) {
  const pieces = [];
  let [finish, tokens] = [null, 0];
  const body = { model: asked.model, messages: said(asked.prompt), ...usage };
  for await (const chunk of await client(asked).chat.completions.create(body)) {
    for (const choice of chunk.choices) {
      if (choice.delta.content) pieces.push(choice.delta.content);
      finish = choice.finish_reason ?? finish;
    }
    tokens = chunk.usage?.total_tokens ?? tokens;
  }
  return { pieces, finish, tokens };
}

async function withTools(asked) {
  const messages = said(asked.prompt);
  const first = await create(asked, messages, { tools });
  const { message } = first.choices[0];
  const results = message.tool_calls.map(({ id }) => ({ role: "tool", tool_call_id: id, content: asked.result }));
  const last = await create(asked, [...messages, message, ...results], { tools });
  return { ...answer(first), text: answer(last).text };
}

async function cancel(asked) {
  const body = { model: asked.model, messages: said(asked.prompt), stream: true };
  const chunks = await client(asked).chat.completions.create(body);
  for await (const chunk of chunks) {
    const first = chunk.choices[0]?.delta.content;
    if (first) {
      chunks.controller.abort();
      return { first };
    }
  }
}

async function models(asked) {
  const found = [];
  for await (const model of client(asked).models.list()) found.push(model.id);
  return { models: found, first: (await client(asked).models.retrieve(found[0])).id };
}

// Void reads the call at index 0 only, puts names and ids together over all deltas, looks at no finish_reason and takes
// an answer without text, reasoning or call for a failure.
async function asVoid(asked) {
  let [text, name, id, written] = ["", "", "", ""];
  const body = { model: asked.model, messages: said(asked.prompt), stream: true, ...(asked.tools ? { tools } : {}) };
  for await (const chunk of await client(asked).chat.completions.create(body)) {
    text += chunk.choices[0]?.delta?.content ?? "";
    for (const call of chunk.choices[0]?.delta?.tool_calls ?? []) {
      if (call.index !== 0) continue;
      name += call.function?.name ?? "";
      written += call.function?.arguments ?? "";
      id += call.id ?? "";
    }
  }
  if (!text && !name) throw new Error("the answer was empty");
  return { text, name, id, arguments: written ? JSON.parse(written) : null };
}

run({
  stream, cancel, models, void: asVoid, tools: withTools,
  chat: async (asked) => answer(await create(asked, said(asked.prompt))),
  image: async (asked) => answer(await create(asked, said([
    { type: "text", text: asked.prompt }, { type: "image_url", image_url: { url: asked.image } },
  ]))),
  refused: async (asked) => answer(await create(asked, said(asked.prompt), { n: 2 })),
});
