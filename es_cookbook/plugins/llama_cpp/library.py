"""llama.cpp's C interface, by ctypes: what the engine's process calls of it.

The package xllamacpp ships llama.cpp as one library, for Linux, macOS and Windows, and with it the
whole C interface, of which its Python modules expose the server alone. The layouts below are those
of the header `llama.h`. Structs are longer than in C, so a library whose structs have grown writes
into the space behind the known fields; `open_library` compares default values, which shows whether
fields have moved.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

PACKAGE = "xllamacpp"
Pointer: TypeAlias = ctypes.c_void_p
_Int, _UInt, _Float, _Bool = ctypes.c_int32, ctypes.c_uint32, ctypes.c_float, ctypes.c_bool
_SPARE = ("spare", ctypes.c_char * 256)
_PREFIX = "llama_"
FLASH_ATTENTION_IF_POSSIBLE = -1
_ERROR = 4
"""Level of a log message."""


def _fields(kind: type, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


class ModelParams(ctypes.Structure):
    """How a model is loaded."""

    _fields_ = (
        *_fields(Pointer, "devices tensor_buft_overrides"),
        *_fields(_Int, "n_gpu_layers split_mode load_mode lazy_mode main_gpu"),
        *_fields(Pointer, "tensor_split progress_callback progress_user_data kv_overrides"),
        *_fields(_Bool, "vocab_only check_tensors use_extra_bufts no_host no_alloc load_mtp"),
        _SPARE,
    )


class ContextParams(ctypes.Structure):
    """Sizes of a context, which holds keys and values of sequences."""

    _fields_ = (
        *_fields(_UInt, "n_ctx n_batch n_ubatch n_seq_max n_rs_seq"),
        *_fields(_UInt, "n_outputs_max n_outputs_max_per_seq"),
        *_fields(_Int, "n_threads n_threads_batch ctx_type rope_scaling_type pooling_type"),
        *_fields(_Int, "attention_type flash_attn_type"),
        *_fields(_Float, "rope_freq_base rope_freq_scale yarn_ext_factor yarn_attn_factor"),
        *_fields(_Float, "yarn_beta_fast yarn_beta_slow"),
        ("yarn_orig_ctx", _UInt),
        ("defrag_thold", _Float),
        *_fields(Pointer, "cb_eval cb_eval_user_data"),
        *_fields(_Int, "type_k type_v"),
        ("moe_cache_size", ctypes.c_size_t),
        *_fields(Pointer, "abort_callback abort_callback_data"),
        *_fields(_Bool, "embeddings offload_kqv no_perf op_offload swa_full kv_unified"),
        ("samplers", Pointer),
        ("n_samplers", ctypes.c_size_t),
        ("ctx_other", Pointer),
        _SPARE,
    )


class Batch(ctypes.Structure):
    """Tokens of one call, each with its position, its sequence, and whether it has an output."""

    _fields_ = (("n_tokens", _Int), *_fields(Pointer, "token embd pos n_seq_id seq_id logits"))


class InitParams(ctypes.Structure):
    """Memory of a graph."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", Pointer), ("no_alloc", _Bool))


LogCallback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, Pointer)
EvalCallback = ctypes.CFUNCTYPE(_Bool, Pointer, _Bool, Pointer)
_FLOATS = ctypes.POINTER(_Float)
_POINTERS = ctypes.POINTER(Pointer)
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "llama_log_set": (None, LogCallback, Pointer),
    "llama_backend_init": (None,),
    "llama_model_default_params": (ModelParams,),
    "llama_context_default_params": (ContextParams,),
    "llama_model_load_from_file": (Pointer, ctypes.c_char_p, ModelParams),
    "llama_model_get_vocab": (Pointer, Pointer),
    "llama_vocab_n_tokens": (_Int, Pointer),
    "llama_init_from_model": (Pointer, Pointer, ContextParams),
    "llama_free": (None, Pointer),
    "llama_decode": (_Int, Pointer, Batch),
    "llama_get_logits": (_FLOATS, Pointer),
    "llama_get_memory": (Pointer, Pointer),
    "llama_memory_clear": (None, Pointer, _Bool),
    "llama_memory_seq_rm": (_Bool, Pointer, _Int, _Int, _Int),
    "llama_memory_seq_cp": (None, Pointer, _Int, _Int, _Int, _Int),
    "llama_adapter_lora_init": (Pointer, Pointer, ctypes.c_char_p),
    "llama_set_adapters_lora": (_Int, Pointer, _POINTERS, ctypes.c_size_t, _FLOATS),
    "ggml_init": (Pointer, InitParams),
    "ggml_free": (None, Pointer),
    "ggml_tensor_overhead": (ctypes.c_size_t,),
    "ggml_new_tensor_2d": (Pointer, Pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64),
    "ggml_mul_mat": (Pointer, Pointer, Pointer, Pointer),
    "ggml_get_name": (ctypes.c_char_p, Pointer),
    "ggml_nbytes": (ctypes.c_size_t, Pointer),
    "ggml_backend_tensor_set": (None, Pointer, Pointer, ctypes.c_size_t, ctypes.c_size_t),
}


class Refused(Exception):
    """llama.cpp, or this module, refuses something; the text is for the user."""


class Library:
    """The library: its functions by their names, without `llama_`.

    Attributes:
        said: llama.cpp's last error message.
    """

    def __init__(self, loaded: ctypes.CDLL) -> None:
        self.said = ""
        self._loaded = loaded
        self._log = LogCallback(self._heard)
        try:
            self.log_set(self._log, None)
            defaults = self.context_default_params(), self.model_default_params()
        except AttributeError as error:
            raise Refused(f"{_version()} lacks a function: {error}") from error
        context, model = defaults
        found = (context.n_ctx, context.n_batch, context.n_ubatch, context.flash_attn_type)
        found += (context.yarn_beta_slow, context.type_v, context.offload_kqv, model.n_gpu_layers)
        found += (model.load_mode, model.use_extra_bufts, model.vocab_only)
        if found != (512, 2048, 512, -1, -1.0, 1, True, -1, -1, True, False):
            raise Refused(f"{_version()} has other structs than those known here")
        self.backend_init()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self.function(f"{_PREFIX}{name}")

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function of the library, by its whole name."""
        found = getattr(self._loaded, name)
        found.restype, *found.argtypes = _SIGNATURES[name]
        return found

    def _heard(self, level: int, text: bytes, _: object) -> None:
        if level == _ERROR and (line := text.decode(errors="replace").strip()):
            self.said = line.rpartition(": ")[2] if line.count(": ") == 1 else line


@functools.cache
def open_library() -> Library:
    """Load llama.cpp.

    Raises:
        Refused: It is not installed, cannot be loaded, or is of an unknown version.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else [*(spec.submodule_search_locations or [])]
    names = (f"{PACKAGE}*.so", f"{PACKAGE}*.pyd")
    files = [file for folder in folders for name in names for file in Path(folder).glob(name)]
    if not files:
        raise Refused(f"{PACKAGE} is not installed: pip install 'es-cookbook[llama-cpp]'")
    try:
        return Library(ctypes.CDLL(str(files[0])))
    except OSError as error:
        raise Refused(f"{_version()} cannot be loaded: {error}") from error


def _version() -> str:
    return f"{PACKAGE} {importlib.metadata.version(PACKAGE)}"
