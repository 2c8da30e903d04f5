"""sentence-transformers behind JSON lines; run as a script by `numem.bench.peers`, with nothing of numem imported.

{"command": "load", "path": DIRECTORY}                 a model directory
{"command": "run", "texts": [...], "to": FILE}         ms of embedding the texts; FILE gets the rows, float32
"""

import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def main() -> None:
    model: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            import sentence_transformers
            import torch

            command = request["command"]
            if command == "version":
                torch.set_num_threads(request["threads"])
                answer = {"version": f"sentence-transformers {sentence_transformers.__version__}"}
            elif command == "load":
                model = sentence_transformers.SentenceTransformer(request["path"], device="cpu")
            elif command == "run" and model is not None:
                began = time.perf_counter()
                rows = model.encode(request["texts"], convert_to_numpy=True, show_progress_bar=False)
                answer = {"ms": (time.perf_counter() - began) * 1e3}
                rows.astype("<f4").tofile(request["to"])
            else:
                raise ValueError(f"unknown command {command!r}")
        except ImportError as error:
            answer = {"missing": str(error)}
        except (ValueError, OSError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
