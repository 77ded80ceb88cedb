// OpenAI's own client for Node, as it comes from npm, against the server at FRONT. CLIENTS is the folder with the package.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { test } from "node:test";

const { CLIENTS, FRONT, LOCKED_FRONT, NARROW_FRONT } = process.env;
const OpenAI = createRequire(CLIENTS + "/package.json")("openai");

const PROMPT = "Once upon a time, there was a brave fox named Finn.";
const USER = { role: "user", content: "Tell me a story about a fox." };
const ENDLESS = { model: "stories", prompt: PROMPT, max_tokens: 100_000, ignore_eos: true };
const CITY = { type: "object", properties: { city: { enum: ["Oslo", "Rome"] } }, required: ["city"], additionalProperties: false };

const clientOf = (front, options) => new OpenAI({ baseURL: front + "/v1", apiKey: "sk-one", maxRetries: 0, ...options });
const client = clientOf(FRONT);

async function all(stream) {
  const parts = [];
  for await (const part of stream) parts.push(part);
  return parts;
}

test("models are listed", async () => {
  const models = await all(client.models.list());
  assert.deepEqual(models.map((model) => model.id), ["chat", "qwen3", "stories"]);
  assert.equal((await client.models.retrieve("stories")).object, "model");
});

test("completions", async () => {
  const fields = { model: "stories", prompt: PROMPT, max_tokens: 30, logprobs: 1 };
  const whole = await client.completions.create(fields);
  const chunks = await all(await client.completions.create({ ...fields, stream: true, stream_options: { include_usage: true } }));
  const last = chunks.pop();
  assert.equal(chunks.map((chunk) => chunk.choices[0].text).join(""), whole.choices[0].text);
  assert.equal(last.usage.total_tokens, whole.usage.total_tokens);
  assert.equal(whole.choices[0].logprobs.token_logprobs.length, 30);
  const drawn = { ...fields, n: 2, seed: 7, temperature: 1.5 };
  const [first, second] = (await client.completions.create(drawn)).choices;
  assert.notEqual(first.text, second.text);
  assert.deepEqual((await client.completions.create(drawn)).choices, [first, second]);
  const stop = whole.choices[0].text.slice(10, 14);
  assert.equal((await client.completions.create({ ...fields, stop })).choices[0].text, whole.choices[0].text.slice(0, 10));
});

test("chat", async () => {
  const fields = { model: "stories", messages: [USER], max_completion_tokens: 20 };
  const whole = await client.chat.completions.create(fields);
  const stream = client.chat.completions.stream(fields);
  assert.equal(await stream.finalContent(), whole.choices[0].message.content);
});

test("answers conform to a schema", async () => {
  const response_format = { type: "json_schema", json_schema: { name: "city", schema: CITY, strict: true } };
  const answer = await client.chat.completions.parse({ model: "chat", messages: [USER], response_format });
  assert.ok(["Oslo", "Rome"].includes(JSON.parse(answer.choices[0].message.content).city));
});

test("functions are called, and their results sent back", async () => {
  const asked = [];
  const weather = (where) => asked.push(where.city) && "sunny";
  const runner = client.chat.completions.runTools({
    model: "chat",
    messages: [USER],
    tools: [{ type: "function", function: { name: "weather", parameters: CITY, parse: JSON.parse, function: weather } }],
    tool_choice: { type: "function", function: { name: "weather" } },
    parallel_tool_calls: false,
  });
  await runner.done();
  assert.equal(asked.length, 1);
  assert.ok(["Oslo", "Rome"].includes(asked[0]));
  const answer = await client.chat.completions.create({ model: "chat", messages: runner.messages, max_tokens: 8 });
  assert.ok(answer.choices[0].message.content);
});

test("responses", async () => {
  const fields = { model: "stories", input: USER.content };
  const whole = await client.responses.create(fields);
  const final = await client.responses.stream(fields).finalResponse();
  assert.ok(whole.output_text.length > 200);
  assert.equal(final.output_text, whole.output_text);
});

test("embeddings", async () => {
  // Without a format the client asks for base64, and decodes it.
  const [decoded, numbers] = await Promise.all(
    [{}, { encoding_format: "float" }].map((format) => client.embeddings.create({ model: "qwen3", input: "The fox", ...format })),
  );
  assert.deepEqual(decoded.data[0].embedding, Array.from(Float32Array.from(numbers.data[0].embedding)));
});

test("errors are classes of the package", async () => {
  await assert.rejects(client.completions.create({ model: "tales", prompt: "a" }), (error) => {
    return error instanceof OpenAI.NotFoundError && error.code === "model_not_found";
  });
  await assert.rejects(client.completions.create({ model: "stories", prompt: "a", suffix: "b" }), (error) => {
    return error instanceof OpenAI.BadRequestError && error.param === "suffix";
  });
  await assert.rejects(clientOf(LOCKED_FRONT).models.list(), OpenAI.AuthenticationError);
});

test("a busy server is asked again", async () => {
  const stream = await clientOf(NARROW_FRONT).completions.create({ ...ENDLESS, stream: true });
  await stream[Symbol.asyncIterator]().next();
  const fields = { model: "stories", prompt: PROMPT, max_tokens: 3 };
  await assert.rejects(clientOf(NARROW_FRONT).completions.create(fields), OpenAI.RateLimitError);
  const patient = clientOf(NARROW_FRONT, {
    maxRetries: 20,
    fetch: async (...request) => {
      const response = await fetch(...request);
      if (response.status === 429) stream.controller.abort();
      return response;
    },
  });
  assert.equal((await patient.completions.create(fields)).usage.completion_tokens, 3);
});

test("a client that waits no longer ends its request", async () => {
  await assert.rejects(client.completions.create(ENDLESS, { timeout: 20 }), OpenAI.APIConnectionTimeoutError);
});
