// What OpenAI's client for Node does beside plain calls: helpers for streams, tools and types, aborting, retrying, files.
import { createReadStream, mkdtempSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import OpenAI, { toFile } from "openai";
import { zodFunction, zodResponseFormat, zodTextFormat } from "openai/helpers/zod";
import { ChatCompletionStream } from "openai/lib/ChatCompletionStream";
import { z } from "zod";

const client = new OpenAI({ maxRetries: 0 });
const model = "demo";
const says = (content) => ({ model, messages: [{ role: "user", content }], temperature: 0 });
const question = says("What is the capital of France?");
const endless = { ...says("Tell me a long story."), max_completion_tokens: 4000, min_tokens: 4000, ignore_eos: true };
const asked = { model, input: "What is the capital of France?", temperature: 0 };
const found = {};

async function all(list) {
  const each = [];
  for await (const one of list) each.push(one);
  return each;
}

// Streams, as events, as pieces of text, and handed on to somebody else.
const seen = new Set();
const helped = client.chat.completions.stream({ ...question, stream_options: { include_usage: true }, logprobs: true });
let pieces = "";
helped.on("content", (delta) => (pieces += delta));
for (const name of ["connect", "chunk", "message", "logprobs.content.done", "end"]) helped.on(name, () => seen.add(name));
const whole = await helped.finalContent();
found.helped = [whole, pieces, seen.size, (await helped.totalUsage()).total_tokens > 0];
const handed = client.chat.completions.stream(question).toReadableStream();
found.handed = await ChatCompletionStream.fromReadableStream(handed).finalContent();

// Tools that run by themselves.
const parameters = z.object({ city: z.string().max(12) });
const run = { name: "get_weather", description: "Get the weather in a city", parse: JSON.parse };
const weather = { ...run, parameters: z.toJSONSchema(parameters), function: ({ city }) => `It is sunny in ${city}.` };
found.ran = [];
for (const stream of [false, true]) {
  const tools = [{ type: "function", function: weather }];
  const runner = client.chat.completions.runTools({ ...says("What is the weather in Paris?"), tools, stream });
  const told = await runner.finalContent();
  found.ran.push([runner.messages.map(({ role }) => role).join(), told.length > 0]);
}

// Types.
const Place = z.object({ city: z.string().max(12), sky: z.enum(["sunny", "cloudy"]), note: z.string().max(8).nullable() });
const typed = { ...says("Where?"), response_format: zodResponseFormat(Place, "place") };
const called = await client.chat.completions.parse({
  ...says("What is the weather in Paris?"),
  tools: [zodFunction({ name: "get_weather", description: run.description, parameters })],
  tool_choice: "required",
});
const responded = { ...asked, text: { format: zodTextFormat(Place, "place") } };
found.typed = [
  (await client.chat.completions.parse(typed)).choices[0].message.parsed,
  (await client.chat.completions.stream(typed).finalChatCompletion()).choices[0].message.parsed,
  (await client.responses.parse(responded)).output_parsed,
  (await client.responses.stream(responded).finalResponse()).output_parsed,
].map((place) => Place.safeParse(place).success);
found.typed.push(parameters.safeParse(called.choices[0].message.tool_calls[0].function.parsed_arguments).success);
found.cut = await client.chat.completions.parse({ ...typed, max_completion_tokens: 3 }).catch((error) => error.constructor.name);

// A response in the background, whose stream is gone on with.
const events = await client.responses.create({ ...asked, background: true, stream: true });
let id, last;
for await (const event of events) {
  id ??= event.response.id;
  last = event.sequence_number;
  if (last === 2) break;
}
const again = client.responses.stream({ response_id: id, starting_after: last });
const numbers = (await all(again)).map((event) => event.sequence_number);
found.resumed = [numbers[0] === last + 1, (await again.finalResponse()).output_text];

// Aborted (what has arrived may still be told), given up, and refused until there is room.
found.aborted = [];
for (const stop of [(stream) => stream.controller.abort(), () => "leave"]) {
  const stream = await client.chat.completions.create({ ...endless, stream: true });
  let num = 0;
  for await (const _ of stream) if (++num === 3 && stop(stream) === "leave") break;
  found.aborted.push([num >= 3, stream.controller.signal.aborted]);
}
const given = client.chat.completions.stream(endless);
given.on("content", () => given.abort());
found.aborted.push(await given.done().catch((error) => error.constructor.name));
found.late = await client.chat.completions.create(endless, { timeout: 50 }).catch((error) => error.constructor.name);
const conversation = await client.conversations.create({ items: [{ role: "user", content: "I am Ann." }] });
const long = { type: "array", items: { type: "string" }, minItems: 1000 };
const format = { type: "json_schema", name: "long", strict: false, schema: { type: "object", properties: { long }, required: ["long"] } };
const held = await client.responses.create({ ...asked, conversation: conversation.id, stream: true, text: { format } });
const attempts = [];
const patient = client.withOptions({
  maxRetries: 9,
  fetch: async (url, init) => {
    const answer = await fetch(url, init);
    attempts.push(answer.status);
    held.controller.abort(); // the first one is refused while this is written
    return answer;
  },
});
const waited = await patient.responses.create({ ...asked, conversation: { id: conversation.id } });
found.retried = [waited.output_text, attempts[0], attempts.at(-1)];
const items = await all(client.conversations.items.list(conversation.id, { order: "asc", limit: 2 }));
found.conversed = items.map(({ role }) => role).join();

// Vectors, which the client asks for as base64, and files.
const vectors = [];
for (const encoding_format of [undefined, "float", "base64"]) {
  const { data } = await client.embeddings.create({ model, input: ["The fox"], encoding_format });
  const { embedding } = data[0];
  vectors.push(typeof embedding === "string" ? [...new Float32Array(new Uint8Array(Buffer.from(embedding, "base64")).buffer)] : embedding);
}
found.vectors = vectors.map((vector) => vector.length === 256 && vector.every((x, i) => Math.abs(x - vectors[0][i]) < 1e-6));
const path = join(mkdtempSync(join(tmpdir(), "client-")), "lines.jsonl");
const line = (n) => JSON.stringify({ custom_id: `${n}`, method: "POST", url: "/v1/chat/completions", body: question });
writeFileSync(path, [0, 1, 2].map(line).join("\n"));
const file = await client.files.create({ file: createReadStream(path), purpose: "batch" });
let batch = await client.batches.create({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" });
while (!["completed", "failed"].includes(batch.status)) {
  await new Promise((done) => setTimeout(done, 100));
  batch = await client.batches.retrieve(batch.id);
}
const lines = (await (await client.files.content(batch.output_file_id)).text()).trim().split("\n").map(JSON.parse);
found.batch = [batch.status, lines.map(({ response }) => response.body.choices[0].message.content)];
const upload = await client.uploads.create({ bytes: 6, filename: "u.txt", mime_type: "text/plain", purpose: "user_data" });
const parts = [];
for (const text of ["abc", "def"]) parts.push(await client.uploads.parts.create(upload.id, { data: await toFile(Buffer.from(text)) }));
const put = await client.uploads.complete(upload.id, { part_ids: parts.map((part) => part.id) });
found.uploaded = await (await client.files.content(put.file.id)).text();
const mine = { purpose: "user_data", limit: 1 };
await client.files.create({ file: new File(["more"], "more.txt"), purpose: "user_data" });
for await (const one of client.files.list(mine)) await client.files.delete(one.id); // each page is behind one that is gone
found.left = (await all(client.files.list(mine))).length;

console.log(JSON.stringify(found));
