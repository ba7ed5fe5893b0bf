// Vercel's AI SDK, by each of its ways to this server.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false;
const where = { baseURL: process.env.OPENAI_BASE_URL, apiKey: process.env.OPENAI_API_KEY };
const openai = createOpenAI(where);
const compatible = createOpenAICompatible({ ...where, name: "penstock", includeUsage: true, supportsStructuredOutputs: true });
const models = {
  responses: openai.responses("demo"),
  chat: openai.chat("demo"),
  compatible: compatible("demo"),
  messages: createAnthropic(where)("demo"),
};
const inputSchema = z.object({ city: z.string() });
const weather = tool({ description: "Get the weather in a city", inputSchema, execute: ({ city }) => `It is sunny in ${city}.` });
const schema = z.object({ city: z.string().max(12), sky: z.enum(["sunny", "cloudy"]) });
const long = z.object({ words: z.array(z.string().min(3)).min(400) });
const found = {};

async function last(stream) {
  let each;
  for await (each of stream);
  return each;
}

for (const [name, model] of Object.entries(models)) {
  const common = { model, maxRetries: 0, maxOutputTokens: 200, temperature: 0 };
  const asked = { ...common, prompt: "What is the capital of France?" };
  const called = { ...common, prompt: "What is the weather in Paris?", tools: { get_weather: weather }, stopWhen: stepCountIs(3) };
  const whole = await generateText(asked);
  const streamed = streamText(asked);
  const steps = [(await generateText(called)).steps, await streamText(called).steps];
  const aborting = new AbortController();
  const cut = streamText({ ...asked, maxOutputTokens: 3000, output: Output.object({ schema: long }), abortSignal: aborting.signal });
  let ended = "finish";
  for await (const part of cut.fullStream) {
    if (part.type === "text-delta") aborting.abort();
    if (part.type === "abort") ended = "abort";
  }
  found[name] = {
    texts: [whole.text, await streamed.text],
    usage: (await streamed.usage).totalTokens === whole.usage.totalTokens && whole.usage.totalTokens > 0,
    called: steps.map(([first, second]) => [first.toolCalls[0].input.city, second.text.length > 0]),
    typed: [
      (await generateObject({ ...common, schema, prompt: "Where?" })).object,
      await last(streamObject({ ...common, schema, prompt: "Where?" }).partialObjectStream),
    ].map((place) => schema.safeParse(place).success),
    ended,
  };
}
const { embeddings } = await embedMany({ model: compatible.textEmbeddingModel("demo"), values: ["a", "b", "c"] });
found.vectors = embeddings.map((vector) => vector.length);
found.refused = await generateText({ model: openai("nobody"), prompt: "x", maxRetries: 0 }).catch((error) => error.statusCode);
console.log(JSON.stringify(found));
