// Runs a client's actions: one JSON command a line on standard input, one JSON result a line on standard output.
import { createInterface } from "node:readline";

export const forecast = {
  name: "forecast",
  description: "Tell the weather of tomorrow.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

export async function run(actions) {
  for await (const line of createInterface({ input: process.stdin })) {
    const asked = JSON.parse(line);
    let result;
    try {
      result = await actions[asked.do](asked);
    } catch (error) {
      const { message, status, statusCode } = error;
      result = { raised: [error.constructor.name], message, status: status ?? statusCode };
    }
    process.stdout.write(JSON.stringify(result) + "\n");
  }
}
