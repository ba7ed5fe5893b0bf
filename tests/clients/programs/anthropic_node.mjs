// Anthropic's official client for Node.
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { zodOutputFormat } from "@anthropic-ai/sdk/helpers/zod";
import { z } from "zod";

const client = new Anthropic({ maxRetries: 0 });
const says = (content) => ({ model: "demo", max_tokens: 100, temperature: 0, messages: [{ role: "user", content }] });
const question = says("What is the capital of France?");
const whole = await client.messages.create(question);
const stream = client.messages.stream(question);
let pieces = "";
stream.on("text", (delta) => (pieces += delta));
const streamed = await stream.finalText();
const inputSchema = z.object({ city: z.string() });
const run = ({ city }) => `It is sunny in ${city}.`;
const tools = [betaZodTool({ name: "get_weather", description: "Get the weather in a city", inputSchema, run })];
const kinds = [];
for await (const turn of client.beta.messages.toolRunner({ ...says("What is the weather in Paris?"), tools, stream: true })) {
  kinds.push((await turn.finalMessage()).content.map(({ type }) => type).join());
}
const Place = z.object({ city: z.string().max(12) });
const typed = await client.messages.parse({ ...says("Where?"), output_config: { format: zodOutputFormat(Place) } });
const given = client.messages.stream({ ...says("Tell me a long story."), max_tokens: 4000 });
given.on("text", () => given.abort());
const aborted = given.done().catch((error) => error.constructor.name); // from now on, or Node would end
const found = {
  whole: whole.content[0].text,
  streamed,
  pieces: pieces === streamed,
  usage: (await stream.finalMessage()).usage.output_tokens === whole.usage.output_tokens,
  counted: (await client.messages.countTokens({ model: "demo", messages: question.messages })).input_tokens === whole.usage.input_tokens,
  kinds,
  typed: Place.safeParse(typed.parsed_output).success,
  aborted: await aborted,
  refused: await client.messages.create({ ...question, model: "nobody" }).catch((error) => [error.constructor.name, error.type]),
};
console.log(JSON.stringify(found));
