"""Ctrl-C ends a command within two seconds while a thread is in a call that nothing interrupts."""

import os
import signal
import time
from pathlib import Path

import pytest

from es_cookbook.plugins.gguf.export import write_gguf
from tests.gguf_models import make_gguf_model
from tests.programs import ROOT, Programs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("signals")]

LOADS = "transformers:AutoModelForCausalLM.from_pretrained"
SAMPLES = "es_cookbook.engines.torch.lane:choose_tokens"
NOT_BEGUN = "interrupted before the run began; nothing has changed: run the same command again"
BEGUN = "interrupted before the first generation ended; to go on: es-cookbook resume log_path={run}"
GIVEN = "optimizer.sigma=0.1 optimizer.learning_rate=0.1"


@pytest.mark.parametrize(
    ("call", "announced", "options", "says"),
    [
        (LOADS, "converting", "model_name={file}", NOT_BEGUN),
        (SAMPLES, "the centre answers", "model_name={model}", NOT_BEGUN),
        (SAMPLES, "before the first generation", f"model_name={{model}} size=none {GIVEN}", BEGUN),
    ],
)
def test_ctrl_c_waits_for_no_thread(
    call: str, announced: str, options: str, says: str, programs: Programs, tmp_path: Path
) -> None:
    cache, errors, model = tmp_path / "cache", tmp_path / "errors.txt", tmp_path / "model"
    make_gguf_model("llama", model)
    write_gguf(model, tmp_path / "model.gguf", "float16", str(model))
    rows, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.jsonl"
    rows.write_text('{"question": "1 + 1 =", "answer": "2"}\n' * 20)
    held_out.write_text('{"question": "1 + 2 =", "answer": "3"}\n')
    words = options.format(model=model, file=tmp_path / "model.gguf").split()
    pid = programs.start(
        [
            *(ROOT / "tests/long_calls.py", call, "train", f"data={rows}", "prompt={question}"),
            *(
                "reward=exact",
                "batch=4",
                f"test_data={held_out}",
                f"log_path={tmp_path / 'run'}",
                *words,
            ),
        ],
        [os.devnull, tmp_path / "output.txt", errors],
        environment={"ES_COOKBOOK_CACHE": str(cache)},
    )
    began = time.monotonic()
    while "it takes long" not in (errors.read_text() if errors.exists() else ""):
        assert time.monotonic() - began < 40, errors.read_text()
        time.sleep(0.02)
    assert announced in errors.read_text()
    time.sleep(0.2)
    os.kill(pid, signal.SIGINT)
    began = time.monotonic()
    assert programs.exit_code() == 130
    assert (
        time.monotonic() - began < 10
    )  # what it is called in takes longer; `benchmarks.moments` has the limit of 2 s
    run = tmp_path / "run"
    assert errors.read_text().splitlines()[-1] == says.format(run=run)
    assert run.exists() == (says == BEGUN), "what is named is there"
    named = {
        path for path in cache.glob("models/*") if not path.name.endswith((".partial", ".lock"))
    }
    assert not named, "nothing is left under a final name"
    assert not list(run.rglob("*.partial")) and not (run / "lock").exists()
