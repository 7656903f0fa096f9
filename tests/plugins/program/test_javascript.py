"""OpenAI's own client for JavaScript, asked from a program that is an Env."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.plugins.program.test_env import only, problem, run

pytestmark = [pytest.mark.anyio, pytest.mark.xdist_group("programs")]

PACKAGES = Path(__file__).parents[3] / "build" / "npm"
CLIENT = "openai@7.1.0"
AGENT = """
import OpenAI from "openai";
import { readFileSync } from "node:fs";

const row = JSON.parse(readFileSync(0, "utf8"));
const client = new OpenAI();
const messages = [{ role: "user", content: row.question }];
const model = "gpt-4o";
const parameters = { type: "object", properties: { a: { type: "number" } }, required: ["a"] };
const tools = [{ type: "function", function: { name: "half", parameters } }];

const chat = await client.chat.completions.create({ model, messages });
let streamed = "";
for await (const piece of await client.chat.completions.create({ model, messages, stream: true }))
  streamed += piece.choices[0]?.delta?.content ?? "";
const called = await client.chat.completions.create({ model, messages, tools });
const call = called.choices[0].message.tool_calls[0].function;
const text = await client.completions.create({ model, prompt: "Once" });
const response = await client.responses.create({ model, input: row.question });
let error;
try {
  await client.chat.completions.create({ model, messages, logit_bias: { 5: 1 } });
} catch (refused) {
  error = refused instanceof OpenAI.BadRequestError && refused.param;
}
const found = [
  chat.choices[0].message.content === "0:1 + 2",
  streamed === "0:1 + 2",
  call.name === "half" && JSON.parse(call.arguments).a === 4,
  text.choices[0].text === "So it was.",
  response.output_text === "0:1 + 2",
  error === "logit_bias",
];
console.log(JSON.stringify({ reward: found.filter(Boolean).length }));
"""


@pytest.fixture(scope="module")
def node() -> str:
    """The interpreter; the package lies beside the program then."""
    found, npm = shutil.which("node"), shutil.which("npm")
    if found is None or npm is None:
        pytest.skip("no node or no npm")
    if not (PACKAGES / "node_modules" / "openai").is_dir():
        install = [npm, "install", "--prefix", str(PACKAGES), "--no-audit", "--no-fund", CLIENT]
        done = subprocess.run(install, capture_output=True, text=True, timeout=120)
        if done.returncode:
            pytest.skip(f"npm cannot install {CLIENT}")
    return found


async def test_all_that_the_client_asks_is_answered_or_refused(tmp_path: Path, node: str) -> None:
    (tmp_path / "node_modules").symlink_to(PACKAGES / "node_modules")
    (tmp_path / "agent.mjs").write_text(AGENT)

    def say(genome: int, shown: str) -> str:
        if "half" in shown:
            return '<tool_call>\n{"name": "half", "arguments": {"a": 4}}\n</tool_call>'
        return f"{genome}:1 + 2" if "1 + 2" in shown else "So it was."

    made = problem(tmp_path, "", words=(node, str(tmp_path / "agent.mjs")))
    groups, _ = await run([made], say, max_failed_fraction=0.7)
    assert only(groups).reward == 6
    assert len(only(groups).transitions) == 5
