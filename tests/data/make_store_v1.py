"""Write tests/data/store-v1: a small memory of format 1, kept so that every later numem can be tested to read it.

Run once, from the root of the repository: `python tests/data/make_store_v1.py`. It refuses to overwrite.
"""

import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "tests" / "data" / "store-v1"


def main() -> int:
    sys.path.insert(0, str(ROOT))
    from numem.identity.fingerprint import Identity, NumericPolicy
    from numem.store.memory import Memory
    from tests.store_fixtures import make_chain, make_node, payload, put

    if TARGET.exists():
        print(f"{TARGET} exists; a written store is never rewritten", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "store-v1"
        with Memory(home) as memory:
            memory.register(
                Identity({"made_by": "make_store_v1", "version": 1}, NumericPolicy("none", bytes(32)), "cpu")
            )
            chain = make_chain(2, nbytes=66_048, seed=11, name="v1")
            put(memory, chain)
            small = [payload(100 + 16 * n, n) for n in range(3)]
            leaf = make_node(small, parent=chain[-1][0].id, start=32, name="leaf")
            put(memory, [(leaf, small)])
            memory.promote([chain[0][0].id])
            memory.create_branch("main", chain[-1][0].id, actor="numem", reason="kept")
            memory.create_branch("fork", chain[-1][0].id, actor="numem", reason="try", source="main")
            memory.move_branch("fork", leaf.id, expected=chain[-1][0].id, actor="numem", reason="go on")
            memory.record("decision", leaf.id, {"choice": "restore", "cost_ms": 1.5})
            rival = [payload(66_048, 99)]
            memory.publish(make_node(rival, name="v1"), rival).published.result()
        shutil.rmtree(home / "locks")
        shutil.rmtree(home / "spool")
        shutil.copytree(home, TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
