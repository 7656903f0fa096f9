"""The process that llama.cpp runs in; its arguments are the descriptors of a socket and a memory.

llama.cpp ends its process when something is wrong, so it has one that may end. It takes orders over
the socket; factors of adapters come, and logits go, through the shared memory. Each
order is a line of JSON, a name with arguments, and so is the reply, `{"error": ...}` if it was
refused.

An adapter is loaded once, from a file, and from there on its tensors are overwritten in place. No
function returns these, but they are operands of products in the graph, which a context shows when
it evaluates one (`cb_eval`).
"""

import ctypes
import json
import mmap
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from es_cookbook.plugins.llama_cpp.library import (
    FLASH_ATTENTION_IF_POSSIBLE,
    Batch,
    ContextParams,
    EvalCallback,
    InitParams,
    Pointer,
    Refused,
    open_library,
)

PASS_TOKENS = 256
"""Tokens of one forward pass; more are no faster on a CPU."""
NO_ROOM = 1
"""What `decode` returns if keys and values fill the context."""
PassToken: TypeAlias = tuple[int, int, int, bool]
"""A token of a forward pass, its position, its sequence, and whether its logits are wanted."""
_WORD = ctypes.sizeof(Pointer)
_BEHIND_SOURCES = 4
"""Words at a tensor's end that are not looked at."""


class Session:
    """One model, its adapter and its context.

    Args:
        memory: shared memory: the adapter's factors, and logits behind them.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._shared = np.frombuffer(memory, np.uint8)
        self._library = open_library()
        self._model = self._context = self._adapter = Pointer()
        self._tensors: list[tuple[int, int]] = []

    def open(self, file: str, *, threads: int, gpu_layers: int, repack: bool) -> dict[str, int]:
        """Map a model file."""
        params = self._library.model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = gpu_layers, repack
        self._model = self._library.model_load_from_file(file.encode(), params)
        self._check(self._model, "refuses the file")
        self._threads = threads
        vocabulary = self._library.model_get_vocab(self._model)
        self._vocabulary = self._library.vocab_n_tokens(vocabulary)
        return {"vocabulary": self._vocabulary}

    def load_adapter(self, file: str, tensors: Sequence[tuple[str, int]]) -> None:
        """Load an adapter, with the names and bytes of its tensors, to be overwritten."""
        self._adapter = self._library.adapter_lora_init(self._model, file.encode())
        self._check(self._adapter, "refuses adapters of this model")
        places = self._places_of_tensors()
        size_of = self._library.function("ggml_nbytes")
        for name, size in tensors:
            if name not in places or size_of(places[name]) != size:
                raise Refused(f"does not use the adapter's tensor {name}")
            self._tensors.append((places[name], size))

    def make_context(self, cells: int, rows: int) -> None:
        """Make a context of so many tokens together, for so many sequences."""
        if self._context:
            self._library.free(self._context)
        self._context = self._new_context(cells, rows)
        self._rows = rows

    def use_adapter(self, is_on: bool) -> None:
        """Take the factors in shared memory, or none; forget all sequences."""
        self._library.memory_clear(self._library.get_memory(self._context), False)
        if is_on:
            address, write = self._address, self._library.function("ggml_backend_tensor_set")
            for place, size in self._tensors:
                write(place, address, 0, size)
                address += size
        self._set_adapter(self._context, is_on)

    def decode(
        self, begun: Sequence[tuple[int, int, int]], tokens: Sequence[PassToken]
    ) -> dict[str, int]:
        """Decode tokens; the wanted logits go into shared memory, in order.

        Args:
            begun: (sequence, another one, number of tokens): sequences that begin anew, with the
                first tokens of another or of themselves.
            tokens: at most `PASS_TOKENS`.
        """
        memory = self._library.get_memory(self._context)
        for sequence, source, kept in begun:
            if source != sequence:
                self._library.memory_seq_rm(memory, sequence, -1, -1)
                self._library.memory_seq_cp(memory, source, sequence, 0, kept)
            else:
                self._library.memory_seq_rm(memory, sequence, kept, -1)
        status = self._run(self._context, tokens)
        if status == 0:
            size = sum(is_wanted for *_, is_wanted in tokens) * self._vocabulary * 4
            start = self._address + sum(size for _, size in self._tensors)
            ctypes.memmove(start, self._library.get_logits(self._context), size)
        elif status != NO_ROOM:
            raise Refused(f"cannot decode ({status}): {self._library.said}")
        return {"status": status}

    @property
    def _address(self) -> int:
        return self._shared.ctypes.data

    def _set_adapter(self, context: Pointer, is_on: bool) -> None:
        adapters, scales = (Pointer * 1)(self._adapter), (ctypes.c_float * 1)(1.0)
        if self._library.set_adapters_lora(context, adapters, int(is_on), scales):
            raise Refused(f"refuses adapters of this model: {self._library.said}")

    def _new_context(self, cells: int, rows: int, callback: Pointer | None = None) -> Pointer:
        params: ContextParams = self._library.context_default_params()
        params.n_ctx, params.n_seq_max, params.n_outputs_max = cells, rows, rows
        params.n_batch = params.n_ubatch = PASS_TOKENS
        params.n_threads = params.n_threads_batch = self._threads
        params.flash_attn_type = FLASH_ATTENTION_IF_POSSIBLE
        params.kv_unified = True  # Sequences share the tokens of a common prefix.
        params.cb_eval = callback
        context = self._library.init_from_model(self._model, params)
        self._check(context, f"has no memory for a context of {cells:,} tokens")
        return context

    def _run(self, context: Pointer, tokens: Sequence[PassToken]) -> int:
        ids, positions, sequences, is_wanted = zip(*tokens, strict=True)
        number, place = np.array(sequences, np.int32), np.arange(len(tokens))
        of_token = (number.ctypes.data + number.itemsize * place).astype(np.uintp)
        batch = Batch(len(tokens))
        arrays = {
            "token": np.array(ids, np.int32),
            "pos": np.array(positions, np.int32),
            "n_seq_id": np.ones(len(tokens), np.int32),
            "seq_id": of_token,
            "logits": np.array(is_wanted, np.int8),
        }
        for name, array in arrays.items():
            setattr(batch, name, array.ctypes.data)
        return self._library.decode(context, batch)

    def _places_of_tensors(self) -> Mapping[str, int]:
        """Return the adapter's tensors: operands of the products of one pass."""
        offset, places = self._offset_of_sources(), dict[str, int]()
        name_of = self._library.function("ggml_get_name")

        def see(tensor: int, is_asked: bool, _: object) -> bool:
            source = Pointer.from_address(tensor + offset).value
            if is_asked and source and (name := name_of(source)).endswith((b".lora_a", b".lora_b")):
                places[name.decode()] = source
            return False

        callback = EvalCallback(see)
        context = self._new_context(PASS_TOKENS, 1, ctypes.cast(callback, Pointer))
        self._set_adapter(context, True)
        self._run(context, [(0, 0, 0, True)])
        self._library.free(context)
        return places

    def _offset_of_sources(self) -> int:
        """Return where a tensor has the pointers to its operands, as found in a product of two."""
        new, product = map(self._library.function, ("ggml_new_tensor_2d", "ggml_mul_mat"))
        context = self._library.function("ggml_init")(InitParams(2**16, None, True))
        operands = new(context, 0, 4, 4), new(context, 0, 4, 4)
        result = product(context, *operands)
        num_words = self._library.function("ggml_tensor_overhead")() // _WORD - _BEHIND_SOURCES
        words = list((ctypes.c_size_t * num_words).from_address(result))
        self._library.function("ggml_free")(context)
        return next(_WORD * i for i in range(num_words) if tuple(words[i : i + 2]) == operands)

    def _check(self, made: object, what: str) -> None:
        if not made:
            said = self._library.said
            raise Refused(f"{what}: {said}" if said else what)


def main(descriptor: int, memory: int) -> None:
    with socket.socket(fileno=descriptor) as connection:
        orders = connection.makefile("rwb")
    shared = mmap.mmap(memory, 0)
    session: Session | None = None
    for line in orders:
        name, arguments, options = json.loads(line)
        try:
            session = session or Session(shared)
            reply: Any = getattr(session, name)(*arguments, **options) or {}
        except Refused as error:
            reply = {"error": str(error)}
        orders.write(json.dumps(reply).encode() + b"\n")
        orders.flush()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
