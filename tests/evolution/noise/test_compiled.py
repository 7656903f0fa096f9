"""Compiled loops are kept on disk, and made again when what they are made of has changed."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def imported(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_loop_whose_version_is_another_is_compiled_again(tmp_path: Path) -> None:
    called, loop = tmp_path / "es_called.py", tmp_path / "es_loop.py"
    loop.write_text(
        "import numba\n"
        "from pathlib import Path\n"
        "from es_cookbook.evolution.noise.compiled import compiled\n"
        "source = Path(__file__).with_name('es_called.py').read_text()\n"
        "space = {}\n"
        "exec(source, space)\n"
        "number = numba.njit(space['number'])\n"
        "@compiled('int64()', version=str(hash(source)))\n"
        "def answer():\n"
        "    return number()\n"
    )
    called.write_text("def number():\n    return 1\n")
    assert imported(loop).answer() == 1
    assert imported(loop).answer() == 1
    assert len(list((tmp_path / "__pycache__").glob("es_loop.answer_*.nbi"))) == 1, "kept"
    called.write_text("def number():\n    return 2\n")
    assert imported(loop).answer() == 2


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "missing"])
def test_damaged_machine_code_is_compiled_again_and_kept(
    tmp_path: Path, suffix: str, damage: str
) -> None:
    loop = tmp_path / "es_loop.py"
    loop.write_text(
        "from es_cookbook.evolution.noise.compiled import compiled\n"
        "@compiled('int64()')\n"
        "def answer():\n"
        "    return 1\n"
    )
    assert imported(loop).answer() == 1
    ((path),) = (tmp_path / "__pycache__").glob(f"*.{suffix}")
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "flipped":
        middle = len(whole) // 2
        path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    else:
        path.write_bytes(whole[:-1] if damage == "cut" else b"")
    assert imported(loop).answer() == 1
    (kept,) = (tmp_path / "__pycache__").glob(f"*.{suffix}")
    # The names of what was compiled have numbers, and so no fixed length.
    assert len(kept.read_bytes()) == pytest.approx(len(whole), rel=0.1)


@pytest.mark.slow
def test_only_what_is_really_compiled_is_announced_and_once(tmp_path: Path) -> None:
    module = tmp_path / "es_two_loops.py"
    loops = [f"@compiled('int64()')\ndef {name}():\n    return 1\n" for name in ("one", "two")]
    head = "from es_cookbook.evolution.noise.compiled import compiled\n"
    module.write_text(head + "".join(loops))
    program = (
        "from es_cookbook.common.terminal import as_program\n"
        "with as_program():\n    import es_two_loops\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "PYTHONPATH": path}
    said = [
        subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        ).stderr
        for _ in range(2)
    ]
    sentence = "compiling the kernels for this processor, once: up to two minutes\n"
    assert said == [sentence, ""]
