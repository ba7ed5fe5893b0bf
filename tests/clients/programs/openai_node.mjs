// OpenAI's official client for Node.
import OpenAI from "openai";

const client = new OpenAI({ maxRetries: 0 });
const call = { model: "demo", messages: [{ role: "user", content: "What is the capital of France?" }], temperature: 0 };
const whole = await client.chat.completions.create(call);
let streamed = "";
for await (const chunk of await client.chat.completions.create({ ...call, stream: true })) {
  streamed += chunk.choices[0]?.delta?.content ?? "";
}
let response = "";
const events = await client.responses.create({ model: "demo", input: "What is the capital of France?", temperature: 0, stream: true });
for await (const event of events) {
  if (event.type === "response.output_text.delta") response += event.delta;
}
const weather = {
  name: "get_weather",
  description: "Get the weather in a city",
  strict: true,
  parameters: { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"], additionalProperties: false },
};
const asked = { ...call, tools: [{ type: "function", function: weather }], tool_choice: "required", parallel_tool_calls: false };
const { message } = (await client.chat.completions.stream(asked).finalChatCompletion()).choices[0];
const { function: called } = message.tool_calls[0];
const vectors = await client.embeddings.create({ model: "demo", input: "The fox" });
let refused = "";
try {
  await client.chat.completions.create({ ...call, model: "nobody" });
} catch (error) {
  refused = error.constructor.name;
}
const found = {
  whole: whole.choices[0].message.content,
  streamed,
  response,
  called: [called.name, ...Object.keys(JSON.parse(called.arguments))],
  usage: whole.usage.total_tokens > 0,
  vector: vectors.data[0].embedding.length,
  refused: [refused],
};
console.log(JSON.stringify(found));
