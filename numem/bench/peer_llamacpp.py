"""llama.cpp behind JSON lines; run as a script by `numem.bench.peers`, with nothing of numem imported.

{"command": "load", "path": FILE, "context": N}   a GGUF file
{"command": "quantise", "path": FILE, "to": FILE} the same model in Q8_0
{"command": "run", "ids": [...], "new": N}        ms of the prompt, and of N greedy tokens after it
"""

import ctypes
import json
import sys
import time
from typing import Any


class _Model:
    """A model with its context, on the library's own functions: nothing of its Python layer is timed."""

    def __init__(self, library: Any, path: str, context: int, threads: int) -> None:
        self.library = library
        self.model = library.llama_model_load_from_file(path.encode(), library.llama_model_default_params())
        if not self.model:
            raise ValueError(f"{path} cannot be loaded")
        parameters = library.llama_context_default_params()
        parameters.n_ctx, parameters.n_batch, parameters.n_ubatch = context, 512, 512
        parameters.n_threads = parameters.n_threads_batch = threads
        self.context = library.llama_init_from_model(self.model, parameters)
        self.vocab = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))

    def decode(self, ids: list[int]) -> None:
        for at in range(0, len(ids), 512):
            part = ids[at : at + 512]
            tokens = (ctypes.c_int32 * len(part))(*part)  # the batch only points at it
            code = self.library.llama_decode(self.context, self.library.llama_batch_get_one(tokens, len(part)))
            if code:
                raise ValueError(f"llama_decode returned {code}")

    def largest(self) -> int:
        import numpy as np

        logits = np.ctypeslib.as_array(self.library.llama_get_logits_ith(self.context, -1), (self.vocab,))
        return int(logits.argmax())

    def run(self, ids: list[int], new: int) -> dict[str, Any]:
        self.library.llama_memory_clear(self.library.llama_get_memory(self.context), True)
        began = time.perf_counter()
        self.decode(ids)
        token = self.largest()
        prefilled = time.perf_counter()
        out = [token]
        for _ in range(new):
            self.decode([token])
            token = self.largest()
            out.append(token)
        return {
            "prefill_ms": (prefilled - began) * 1e3,
            "decode_ms": (time.perf_counter() - prefilled) * 1e3,
            "ids": out,
        }


def main() -> None:
    threads, model = 1, None
    silence: Any = None  # the library calls it later: it must stay alive
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            import llama_cpp

            command = request["command"]
            if command == "version":
                threads = request["threads"]
                silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
                llama_cpp.llama_log_set(silence, ctypes.c_void_p(0))
                llama_cpp.llama_backend_init()
                answer = {"version": f"llama-cpp-python {llama_cpp.__version__}"}
            elif command == "quantise":
                parameters = llama_cpp.llama_model_quantize_default_params()
                parameters.allow_requantize, parameters.nthread = True, threads
                parameters.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0
                code = llama_cpp.llama_model_quantize(
                    request["path"].encode(), request["to"].encode(), ctypes.byref(parameters)
                )
                if code:
                    raise ValueError(f"llama_model_quantize returned {code}")
            elif command == "load":
                model = _Model(llama_cpp, request["path"], request["context"], threads)
            elif command == "run" and model is not None:
                answer = model.run(request["ids"], request["new"])
            else:
                raise ValueError(f"unknown command {command!r}")
        except ImportError as error:
            answer = {"missing": str(error)}
        except (ValueError, OSError, AttributeError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
