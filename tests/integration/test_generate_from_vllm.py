"""`es-cookbook generate` against vLLM's own OpenAI server, with the bundled model behind it."""

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import anyio.to_thread
import pytest

from es_cookbook.common.errors import ServerError
from es_cookbook.plugins.generate.generate import GenerateConfig, main
from es_cookbook.recipes.countdown.arithmetic import CountdownReward, grade_countdown
from es_cookbook.recipes.countdown.dataset import generate_problems, question
from es_cookbook.recipes.countdown.train_cli import BUNDLED_MODEL

pytestmark = [
    pytest.mark.xdist_group("vllm"),
    pytest.mark.usefixtures("warm_vllm"),
    pytest.mark.anyio,
]

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_HOST_IP": "127.0.0.1"}


@contextlib.contextmanager
def log_level_kept() -> Iterator[None]:
    """VLLM's server raises the level of the root logger, which other tests listen to."""
    level = logging.root.level
    try:
        yield
    finally:
        logging.root.setLevel(level)


@contextlib.asynccontextmanager
async def vllm_server(template: Path) -> AsyncIterator[str]:
    """The app of `vllm serve` and its engine, on a free port; gives its address up to /v1."""
    import uvicorn
    from vllm.entrypoints.launchers.api_server.app_state import init_app_state
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.entrypoints.launchers.app import build_app
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.executor.uniproc_executor import UniProcExecutor

    options = f"--model {BUNDLED_MODEL} --served-model-name bundled --chat-template {template} "
    more = "--enforce-eager --max-model-len 96 --kv-cache-memory-bytes 50000000 --dtype float32"
    args = make_arg_parser(FlexibleArgumentParser()).parse_args((options + more).split())
    args.distributed_executor_backend = UniProcExecutor  # One process less.
    with (
        log_level_kept(),
        socket.create_server(("127.0.0.1", 0)) as listening,
        mock.patch.dict(os.environ, CPU),
    ):
        async with build_async_engine_client(args) as engine:
            tasks = await engine.get_supported_tasks()
            app = build_app(args, tasks, engine.model_config)
            await init_app_state(engine, app.state, args, tasks)
            server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
            serving = asyncio.create_task(server.serve([listening]))
            try:
                yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
            finally:
                server.should_exit = True
                await serving


async def test_the_bundled_model_answers_and_its_rows_are_the_same_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Path("template.jinja").write_text(TEMPLATE)
    problems = list(islice(generate_problems(5, "test"), 16))
    rows = [
        {
            "nums": list(p.numbers),
            "target": p.target,
            "question": question(p.numbers, p.target, "compact"),
        }
        for p in problems
    ]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with vllm_server(Path("template.jinja")) as url:

        def generate(output: str, **options: Any) -> list[dict[str, Any]]:
            given = {"model": "bundled", "max_tokens": 32, "replicas": 2, **options}
            main(GenerateConfig(source="rows.jsonl", output=output, base_url=url, **given))
            return [json.loads(line) for line in Path(output).read_text().splitlines()]

        made = await anyio.to_thread.run_sync(lambda: generate("made.jsonl"))
        again = await anyio.to_thread.run_sync(lambda: generate("again.jsonl", concurrency=1))
        greedy = await anyio.to_thread.run_sync(
            lambda: generate("greedy.jsonl", replicas=1, temperature=0.0)
        )
        with pytest.raises(ServerError, match=r"refuses to answer: HTTP 404 Not Found: .*another"):
            await anyio.to_thread.run_sync(lambda: generate("other.jsonl", model="another"))
    assert made == again, "seeds are the questions' own"
    assert len(rows) <= len(made) <= 2 * len(rows)
    assert {row["question"] for row in made} == {row["question"] for row in rows}
    assert all(row["generated"]["finish_reason"] in ("stop", "length") for row in made)
    right = sum(
        grade_countdown(row["completion"], row["nums"], row["target"], CountdownReward()).metrics[
            "correct"
        ]
        for row in greedy
    )
    assert right >= 2, "it can do about every third"
