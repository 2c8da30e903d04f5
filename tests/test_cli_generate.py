"""`numem generate` on a tiny random model: the memory saves work and changes no token."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from numem import LM, Memory
from numem.cli import app
from numem.errors import ContextLengthError, InputError
from numem.job.complete import complete
from numem.models.text.chat import ChatTemplate
from numem.runtime.sampling import Sampler
from tests.model_fixtures import edit_json, tiny_model

PROMPT = "in the then an "


def run(model: Path, memory: Path, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", str(model), *arguments, "--memory", str(memory)], input=stdin)


def output(result: Result) -> Any:
    assert result.exit_code == 0, result.stderr
    assert len(result.stdout.splitlines()) == 1
    return json.loads(result.stdout)


def test_a_second_run_restores_and_gives_the_same_tokens(tiny_dir: Path, tiny_lm: LM, tmp_path: Path) -> None:
    prompt = PROMPT * 60
    tokens = tiny_lm.tokenizer.encode(prompt)
    arguments = (prompt, "--max-new-tokens", "6", "--json")
    first = output(run(tiny_dir, tmp_path / "m", *arguments))
    assert first["prompt_tokens"] == first["computed_tokens"] == len(tokens) and first["restored_tokens"] == 0
    assert tuple(first["tokens"]) == tuple(tiny_lm.generate_ids(tokens, 6)) and first["stop"] in ("length", "eos")
    assert first["text"] == tiny_lm.tokenizer.decode(first["tokens"])
    again = output(run(tiny_dir, tmp_path / "m", *arguments))
    # Everything but the pending token is found, none of it computed again.
    assert (again["restored_tokens"], again["computed_tokens"]) == (len(tokens) - 1, 1)
    assert (again["tokens"], again["text"], again["boundary"]) == (first["tokens"], first["text"], first["boundary"])
    assert again["chunks_published"] == 0 and again["chunks_reused"] == first["chunks_published"]
    with Memory(tmp_path / "m") as memory:
        assert memory.get(bytes.fromhex(first["boundary"])) is not None
        assert memory.verify().ok


def test_text_streams_to_stdout_and_figures_to_stderr(tiny_dir: Path, tmp_path: Path) -> None:
    document = output(run(tiny_dir, tmp_path / "m", PROMPT, "--max-new-tokens", "5", "--json"))
    people = run(tiny_dir, tmp_path / "m", PROMPT, "--max-new-tokens", "5")
    assert people.exit_code == 0 and people.stdout == document["text"] + "\n"
    assert "restored" in people.stderr and document["boundary"][:12] in people.stderr


def test_the_chat_template_and_stdin(tiny_dir: Path, tiny_lm: LM, tmp_path: Path) -> None:
    plain = output(run(tiny_dir, tmp_path / "m", "-", "--json", "--max-new-tokens", "2", stdin=PROMPT))
    assert plain["prompt_tokens"] == len(tiny_lm.tokenizer.encode(PROMPT))
    chat = output(run(tiny_dir, tmp_path / "m", "-", "--chat", "--json", "--max-new-tokens", "2", stdin=PROMPT))
    assert chat["prompt_tokens"] == len(tiny_lm.tokenizer.chat([{"role": "user", "content": PROMPT}]))


def test_sampling_options_reach_the_sampler(tiny_dir: Path, tiny_lm: LM, tmp_path: Path) -> None:
    options = ("--temperature", "1.5", "--top-k", "40", "--top-p", "0.9", "--max-new-tokens", "8", "--json")
    documents = [output(run(tiny_dir, tmp_path / "m", PROMPT, *options, "--seed", seed)) for seed in ("1", "1", "2")]
    assert documents[0]["tokens"] == documents[1]["tokens"] != documents[2]["tokens"]
    sampler = Sampler(1.5, 40, 0.9, 1)
    tokens = tiny_lm.generate_ids(tiny_lm.tokenizer.encode(PROMPT), 8, sampler=sampler)
    assert documents[0]["tokens"] == tokens


def test_another_dtype_is_another_identity(tiny_dir: Path, tmp_path: Path) -> None:
    """lmcache#1856: no hit across dtypes."""
    output(run(tiny_dir, tmp_path / "m", PROMPT, "--max-new-tokens", "2", "--json"))
    other = output(run(tiny_dir, tmp_path / "m", PROMPT, "--max-new-tokens", "2", "--dtype", "bfloat16", "--json"))
    assert other["restored_tokens"] == 0


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("",), "prompt"),
        ((PROMPT * 3000,), "exceed the context"),
        ((PROMPT, "--max-new-tokens", "100000"), "exceed the context"),
        ((PROMPT, "--temperature", "-1"), "temperature"),
        ((PROMPT, "--top-p", "0"), "top_p"),
        ((PROMPT, "--dtype", "float99"), "float99"),
        ((PROMPT * 60, "--max-position", "16"), "exceed the context of 16"),
    ],
)
def test_bad_values_are_one_line_and_leave_no_trace(
    tiny_dir: Path, tmp_path: Path, arguments: tuple[str, ...], word: str
) -> None:
    for flags in ((), ("--json",)):
        result = run(tiny_dir, tmp_path / "m", *arguments, *flags)
        assert result.exit_code == 1, result.stderr
        (line,) = result.stderr.splitlines()
        assert line.startswith("error: ") and word in line
        assert (json.loads(result.stdout)["error"] if flags else result.stdout) == (line[7:] if flags else "")
    assert not (tmp_path / "m").exists()


def test_models_at_fault_are_one_line(tmp_path: Path) -> None:
    unknown = run(Path("smollm3-1b"), tmp_path / "m", "hi")
    assert unknown.exit_code == 1 and "unknown model" in unknown.stderr
    broken = tiny_model(tmp_path / "broken")
    edit_json(broken / "config.json", rope_parameters={"rope_type": "longrope", "rope_theta": 1e4})
    result = run(broken, tmp_path / "m", "hi")
    assert result.exit_code == 1 and len(result.stderr.splitlines()) == 1
    cut = tiny_model(tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    result = run(cut, tmp_path / "m", "hi")
    assert result.exit_code == 1 and "model.safetensors" in result.stderr and len(result.stderr.splitlines()) == 1
    assert not (tmp_path / "m").exists()


def test_a_chat_template_that_exhausts_memory_is_an_input_error() -> None:
    template = ChatTemplate("{{ messages[0].content * (10 ** 17) }}", "chat_template.jinja")
    with pytest.raises(InputError, match=r"^chat_template.jinja: the chat template needs more memory than there is$"):
        template.render([{"role": "user", "content": "x"}], add_generation_prompt=True, tokens={})


@pytest.mark.crash
def test_a_damaged_chunk_is_recomputed_and_said_so(tiny_dir: Path, tmp_path: Path) -> None:
    """vllm#49176, lmcache#2420: a chunk that cannot be trusted is computed anew, and the output stays the same."""
    arguments = (PROMPT * 60, "--max-new-tokens", "4")
    first = output(run(tiny_dir, tmp_path / "m", *arguments, "--json"))
    for sidecar in (tmp_path / "m" / "object").rglob("*.blob"):
        data = bytearray(sidecar.read_bytes())
        data[len(data) // 2] ^= 0x10
        sidecar.write_bytes(data)
    again = run(tiny_dir, tmp_path / "m", *arguments)
    assert again.exit_code == 0 and again.stdout == first["text"] + "\n"
    assert "warning: chunk [" in again.stderr and "recomputed" in again.stderr


def test_complete_as_a_library_call(tiny_lm: LM, memory: Memory) -> None:
    tokens = tiny_lm.tokenizer.encode(PROMPT)
    heard: list[str] = []
    done = complete(memory, tiny_lm, tokens, 5, on_text=heard.append)
    assert "".join(heard) == done.text and len(done.tokens) <= 5
    assert done.prompt_tokens == done.restored_tokens + done.computed_tokens
    with pytest.raises(InputError):
        complete(memory, tiny_lm, [], 5)
    with pytest.raises(InputError):
        complete(memory, tiny_lm, tokens, 0)
    with pytest.raises(ContextLengthError):
        complete(memory, tiny_lm, tokens, tiny_lm.max_position)
