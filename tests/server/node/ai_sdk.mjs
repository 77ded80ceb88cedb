// Vercel's AI SDK, as it comes from npm, shows the image IMAGE to the model `shapes` behind FRONT. CLIENTS is the folder
// with the packages.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { test } from "node:test";

const { CLIENTS, EXPECTED, FRONT, IMAGE } = process.env;
const from = createRequire(CLIENTS + "/package.json");
const { generateText, streamText } = from("ai");
const { createOpenAI } = from("@ai-sdk/openai");
const { createOpenAICompatible } = from("@ai-sdk/openai-compatible");

const server = { baseURL: FRONT + "/v1", apiKey: "any" };
const models = {
  "the provider of compatible servers": createOpenAICompatible({ name: "inflight", ...server })("shapes"),
  "chat completions": createOpenAI(server).chat("shapes"),
  responses: createOpenAI(server).responses("shapes"),
};
const text = { type: "text", text: "What is in the picture?" };
const image = { type: "image", image: readFileSync(IMAGE), mediaType: "image/png" };
const request = { messages: [{ role: "user", content: [image, text] }], maxOutputTokens: 60, maxRetries: 0 };

for (const [name, model] of Object.entries(models)) {
  test(`an image with ${name}`, async () => {
    assert.equal((await generateText({ model, ...request })).text, EXPECTED);
    const { textStream } = streamText({ model, ...request });
    const pieces = [];
    for await (const piece of textStream) pieces.push(piece);
    assert.equal(pieces.join(""), EXPECTED);
  });
}
