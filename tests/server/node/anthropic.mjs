// Anthropic's own client for Node, as it comes from npm, against the server at FRONT. CLIENTS is the folder with the
// package. REPLY is what a guide makes the model write: a thought, a text, and calls.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";

const { CLIENTS, FRONT, LOCKED_FRONT, REPLY } = process.env;
const Anthropic = createRequire(CLIENTS + "/package.json")("@anthropic-ai/sdk");

const USER = { role: "user", content: "Tell me a story about a fox." };
const FIELDS = { model: "stories", messages: [USER], max_tokens: 1000 };
const CITY = { type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"], additionalProperties: false };

const clientOf = (front, options) => new Anthropic({ baseURL: front, apiKey: "sk-one", maxRetries: 0, ...options });
const client = clientOf(FRONT);

// The blocks as the next request has them.
const parts = (message) => message.content.map(({ parsed, parsed_output, ...block }) => block);

test("models are listed", async () => {
  const models = [];
  for await (const model of client.models.list()) models.push(model.id);
  assert.deepEqual(models, ["chat", "stories"]);
  assert.equal((await client.models.retrieve("stories")).type, "model");
});

test("messages", async () => {
  const whole = await client.messages.create(FIELDS);
  assert.equal(whole.stop_reason, "end_turn");
  const stream = client.messages.stream(FIELDS);
  assert.equal(await stream.finalText(), whole.content[0].text);
  const { input_tokens } = await client.messages.countTokens({ model: "stories", messages: [USER] });
  assert.equal(input_tokens, whole.usage.input_tokens + whole.usage.cache_read_input_tokens);
});

test("thoughts and tools go back and forth", async () => {
  const fields = { ...FIELDS, model: "chat", tools: [{ name: "weather", input_schema: CITY }] };
  const forced = { ...fields, guided_choice: [JSON.parse(REPLY)] };
  const message = await client.messages.create(forced);
  assert.deepEqual(parts(await client.messages.stream(forced).finalMessage()), parts(message));
  assert.deepEqual(message.content.map((block) => block.type), ["thinking", "text", "tool_use", "tool_use"]);
  assert.deepEqual(message.content[2].input, { city: "Oslo" });
  const calls = message.content.filter((block) => block.type === "tool_use");
  const results = calls.map((call) => ({ type: "tool_result", tool_use_id: call.id, content: "Rain." }));
  const messages = [USER, { role: "assistant", content: message.content }, { role: "user", content: results }];
  const answer = await client.messages.create({ ...fields, messages, max_tokens: 8 });
  assert.equal(answer.usage.output_tokens, 8);
});

test("errors are classes of the package", async () => {
  await assert.rejects(client.messages.create({ ...FIELDS, model: "tales" }), Anthropic.NotFoundError);
  await assert.rejects(client.messages.create({ ...FIELDS, tempo: 1 }), (error) => {
    return error instanceof Anthropic.BadRequestError && error.message.includes("tempo: Extra inputs are not permitted");
  });
  await assert.rejects(clientOf(LOCKED_FRONT).messages.create(FIELDS), Anthropic.AuthenticationError);
  assert.ok((await clientOf(LOCKED_FRONT, { apiKey: "sk-two" }).messages.create({ ...FIELDS, max_tokens: 1 })).id);
});

test("a client that leaves ends its request", async () => {
  const stream = await client.messages.create({ ...FIELDS, max_tokens: 100_000, ignore_eos: true, stream: true });
  for await (const event of stream) {
    if (event.type === "content_block_delta") break;
  }
});
