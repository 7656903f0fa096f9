"""The commands of docs/llama_cpp.md, with llama.cpp's server in place of Ollama."""

import importlib.util
import re
import shlex
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from es_cookbook.checkpoints.model_files import CACHE
from es_cookbook.common.terminal import one_line
from es_cookbook.plugins.gguf.export import write_gguf
from es_cookbook.plugins.llama_cpp.library import PACKAGE
from tests.gguf_models import make_gguf_model
from tests.llama_server import served
from tests.said import typed

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec(PACKAGE) is None, reason=f"{PACKAGE} is not installed"
)
PAGE = Path(__file__).parents[3] / "docs/llama_cpp.md"
SMALL = {
    "num_generations": 1,
    "optimizer.population_size": 4,
    "optimizer.learning_rate": 0.6,
    "dataset.problems_per_generation": 2,
    "dataset.num_test": 0,
    "sampling.max_tokens": 12,
    "engine.threads": 1,
    "engine.max_batch_size": 1,  # Kernels may round differently in another batch.
}


@pytest.mark.slow
def test_the_server_answers_with_the_adapter_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install, chat, export, create, ask = (
        shlex.split(line)
        for block in re.findall(r"^```\w+\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    )
    assert install == ["pip", "install", "es-cookbook[llama-cpp]"]
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    model = make_gguf_model("llama", tmp_path / "model")
    write_gguf(model, tmp_path / "model.gguf", "float16", str(model))
    options = dict(word.split("=", 1) for word in chat[2:]) | SMALL
    for words in ([chat[1], *(f"{name}={value}" for name, value in options.items())], export[1:]):
        done = typed(*words)
        assert done.returncode == 0, done.stderr
    _, _, name, _, modelfile = create
    assert ask[:3] == ["ollama", "run", name]
    lines = dict(line.split(" ", 1) for line in Path(modelfile).read_text().splitlines())
    files = [str(Path(modelfile).parent / lines[each]) for each in ("FROM", "ADAPTER")]
    questions = [ask[3], "What is 3 + 4?", "hello world"]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        found = process.submit(served, *files, questions, SMALL["sampling.max_tokens"]).result(60)
    played, base = (
        typed("play", options["log_path"], f"genome={who}", stdin="\n".join(questions)).stdout
        for who in ("centre", "base")
    )
    # Characters that the limit cuts off are shown in another way.
    assert plain(played) == plain("".join(f"{one_line(answer)}\n" for answer in found))
    assert plain(played) != plain(base)


def plain(text: str) -> str:
    return text.encode("ascii", "ignore").decode()
