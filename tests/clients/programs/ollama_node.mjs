// Ollama's official client for Node.
import { Ollama } from "ollama";

const client = new Ollama({ host: process.env.OLLAMA_HOST, headers: { Authorization: `Bearer ${process.env.OLLAMA_API_KEY}` } });
const asked = { model: "demo", messages: [{ role: "user", content: "What is the capital of France?" }], options: { temperature: 0 } };
let streamed = "";
for await (const part of await client.chat({ ...asked, stream: true })) streamed += part.message.content;
const format = { type: "object", properties: { city: { type: "string", maxLength: 12 } }, required: ["city"] };
const typed = JSON.parse((await client.chat({ ...asked, format })).message.content);
const story = { model: "demo", prompt: "Tell me a long story.", format: { type: "array", items: { type: "string" }, minItems: 400 } };
const long = await client.generate({ ...story, stream: true });
let num = 0, ended = "whole";
try {
  for await (const _ of long) if (++num === 3) long.abort();
} catch (error) {
  ended = error.name;
}
const found = {
  whole: (await client.chat(asked)).message.content,
  streamed,
  typed: Object.keys(typed),
  ended: [num < 400, ended], // what has arrived by then is still given
  vectors: (await client.embed({ model: "demo", input: ["a", "b"] })).embeddings.map((vector) => vector.length),
  unloaded: (await client.generate({ model: "demo", prompt: "", keep_alive: 0 })).done_reason,
  models: (await client.list()).models.map(({ name }) => name),
  refused: await client.chat({ ...asked, model: "nobody" }).catch((error) => error.status_code),
};
console.log(JSON.stringify(found));
