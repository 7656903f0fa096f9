// A worker in JavaScript with OpenAI's package: rows come in as lines, answers go out as lines.
//     npm install openai
//     es-cookbook train program="node recipes/agent.mjs" dataset.rows_at_once=64 data=sums.jsonl reward=number batch=16 \
//         sampling.max_tokens=16 model_name=MODEL
// A row has a `question`, for example {"question": "What is 52 + 18? Answer briefly.", "answer": 70}.
import OpenAI from "openai";
import { createInterface } from "node:readline";

async function work({ id, row, base_url, api_key }) {
  const client = new OpenAI({ baseURL: base_url, apiKey: api_key });
  const messages = [{ role: "user", content: row.question }];
  const { choices } = await client.chat.completions.create({ model: "any", messages });
  console.log(JSON.stringify({ id, answer: choices[0].message.content }));
}

for await (const line of createInterface({ input: process.stdin })) work(JSON.parse(line));
