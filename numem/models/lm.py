"""Language models: loading, and the verbs generate and chat."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from numem.errors import ContextLengthError, InputError, UnsupportedModelError
from numem.identity.chain import CHUNK_TOKENS, PAGE_TOKENS
from numem.identity.fingerprint import Identity
from numem.lineage.decisions import DecisionLog
from numem.models.architecture.descriptor import Descriptor
from numem.models.architecture.reading import read_descriptor
from numem.models.devices import CPU, current, device_class, device_names, gpu_refuses, resolve_device, use_here
from numem.models.forward import ModelWeights
from numem.models.hub.registry import resolve
from numem.models.numerics import policy_of
from numem.models.text.tokenizer import Tokenizer
from numem.models.transformer import Transformer
from numem.models.weights.adapters import Given
from numem.models.weights.checkpoint import Checkpoint
from numem.models.weights.loader import Weights
from numem.runtime.continuation import Continuation, Session
from numem.runtime.device.fleet import Fleet
from numem.runtime.engine import Engine, pages_for_lanes
from numem.runtime.front import Runtime
from numem.runtime.lanes.scheduler import Scheduler
from numem.runtime.paging.pages import DTYPES
from numem.runtime.paging.residency import Residency
from numem.runtime.request import Token
from numem.runtime.restore.arrivals import Arrivals
from numem.runtime.sampling import GREEDY, Sampler

if TYPE_CHECKING:
    import torch

    from numem.models.device_transformer import DeviceTransformer
    from numem.store.memory import Memory

# How sentence-transformers says that a directory makes embeddings; configurations do not always differ.
MODULES = "modules.json"


class LM:
    """A loaded language model; made by `load_lm`.

    Attributes:
        directory: where its files are.
        descriptor, tokenizer, decoder: its parts; a decoder on a GPU is a
            `numem.models.device_transformer.DeviceTransformer`.
        identity: identity of the attention state it makes.
        others: the same model on the other GPUs where several were named, for `fleet`; everything else is done here.
    """

    others: "tuple[LM, ...]" = ()

    def __init__(
        self,
        directory: Path,
        descriptor: Descriptor,
        tokenizer: Tokenizer,
        decoder: "Transformer | DeviceTransformer",
        identity: Identity,
    ) -> None:
        self.directory = directory
        self.descriptor = descriptor
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.identity = identity
        self._session: Session | None = None

    @property
    def max_position(self) -> int:
        return self.decoder.max_position

    def adopt_thread(self) -> None:
        """Let the calling thread launch on the model's GPU from now on; nothing on the CPU."""
        if not isinstance(self.decoder, Transformer):
            use_here(self.decoder.device)

    def session(self, *, pages: int | None = None, debug: bool = False, canary: bool = False) -> Session:
        """A new engine with pages of its own (default: one sequence of max_position tokens)."""
        vocab = min(self.tokenizer.vocab_size, self.decoder.vocab)
        return Session(Engine(self.decoder, pages=pages, debug=debug, canary=canary, vocab=vocab), self.identity)

    def runtime(
        self,
        *,
        lanes: int = 8,
        memory: "Memory | None" = None,
        tier: str | None = None,
        tokens: int | None = None,
        policy: str = "value",
        queue: int = 4096,
    ) -> Runtime:
        """A runtime that serves many requests at once, each with the output it would have alone.

        The pages of ended sequences are kept for prompts to come as long as nobody needs them.

        Args:
            lanes: sequences that run at a time.
            memory: durable plane to restore from and publish to; it is closed after the runtime.
            tier: tier to restore from (default: the nearest).
            tokens: pages are made for so many tokens of every lane (default: max_position).
            policy: which kept pages go first: "value" (the least expected cost of losing them), or a name of
                `numem.policy`.
            queue: requests that may be open at once.
        """
        pages = pages_for_lanes(lanes, self.max_position if tokens is None else tokens)

        @contextmanager
        def scheduler(on_token: Callable[[Token], None]) -> Iterator[Scheduler]:
            self.adopt_thread()
            session = self.session(pages=pages)
            log = None if memory is None else DecisionLog(memory, self.identity.scope)
            with Arrivals(session, memory, tier=tier, decisions=log) as arrivals:
                residency = Residency(
                    session.engine,
                    policy=policy,
                    decisions=log,
                    costs=arrivals.costs,
                    tier=tier,
                    scope=self.identity.scope,
                )
                made = Scheduler(
                    session,
                    lanes,
                    memory=memory,
                    tier=tier,
                    arrivals=arrivals,
                    residency=residency,
                    decisions=log,
                    detokenize=self.tokenizer.stream,
                    on_token=on_token,
                )
                with closing(made):
                    yield made

        return Runtime(scheduler, queue=queue)

    def fleet(
        self, *, lanes: int = 8, memory: "Memory | None" = None, tier: str | None = None, tokens: int | None = None
    ) -> Fleet:
        """A runtime of `lanes` lanes on each GPU that the model lies on, behind one front; arguments as of `runtime`."""
        each = self.max_position if tokens is None else tokens
        runtimes = [lm.runtime(lanes=lanes, memory=memory, tier=tier, tokens=tokens) for lm in (self, *self.others)]
        return Fleet(runtimes, lanes=lanes, tokens=lanes * each)

    def start(self, tokens: Sequence[int]) -> Continuation:
        """A continuation in the model's own session, which holds two sequences of max_position tokens."""
        if self._session is None:
            self._session = self.session(pages=2 * -(-self.max_position // PAGE_TOKENS) + 2)
        return self._session.start(tokens)

    def stream_ids(
        self, tokens: Sequence[int], max_new_tokens: int, *, sampler: Sampler = GREEDY, ignore_eos: bool = False
    ) -> Iterator[int]:
        """Yield generated token ids; an EOS token is the last one yielded.

        Raises:
            InputError, ContextLengthError: empty prompt, or prompt and output longer than max_position.
        """
        if max_new_tokens < 0:
            raise InputError(f"generate: max_new_tokens {max_new_tokens} is negative")
        if len(tokens) + max(0, max_new_tokens - 1) > self.max_position:
            raise ContextLengthError(
                f"generate: {len(tokens)} prompt tokens and {max_new_tokens} new ones exceed max_position "
                f"{self.max_position}; load the model with a larger max_position"
            )
        with self.start(tokens) as continuation:
            for token in continuation.stream(max_new_tokens, sampler):
                yield token
                if token in self.tokenizer.eos_ids and not ignore_eos:
                    return

    def generate_ids(
        self, tokens: Sequence[int], max_new_tokens: int, *, sampler: Sampler = GREEDY, ignore_eos: bool = False
    ) -> list[int]:
        """Generated token ids (the prompt is not repeated)."""
        return list(self.stream_ids(tokens, max_new_tokens, sampler=sampler, ignore_eos=ignore_eos))

    def generate_text(self, prompt: str, max_new_tokens: int = 64, *, sampler: Sampler = GREEDY) -> str:
        """Continuation of a plain text prompt."""
        return self._text(self.tokenizer.encode(prompt), max_new_tokens, sampler)

    def chat(self, messages: Sequence[dict[str, Any]], max_new_tokens: int = 256, *, sampler: Sampler = GREEDY) -> str:
        """Reply to a conversation of {"role", "content"} messages, through the model's chat template."""
        return self._text(self.tokenizer.chat(list(messages)), max_new_tokens, sampler)

    def _text(self, tokens: list[int], max_new_tokens: int, sampler: Sampler) -> str:
        out = self.generate_ids(tokens, max_new_tokens, sampler=sampler)
        if out and out[-1] in self.tokenizer.eos_ids:
            out.pop()
        return self.tokenizer.decode(out)


def load_lm(
    key_or_dir: str | Path,
    *,
    device: str = "cpu",
    dtype: str | None = None,
    quantise: str | None = None,
    adapters: Sequence[Given] = (),
    max_position: int | None = None,
    offline: bool = False,
    salt: bytes = b"",
) -> LM:
    """Load a model by registry key or from a Hugging Face directory of safetensors.

    Args:
        key_or_dir: for example "smollm2-135m-instruct", or a path.
        device: "cpu"; "cuda" or "cuda:N", an NVIDIA GPU (`pip install numem[cuda]`); "auto", the GPU with the most free
            memory where there is one that the model fits, else the CPU; several GPUs, "cuda:all" or "cuda:0,cuda:1", of
            which the first does what one model does and all of them serve `LM.fleet`. State of one kind of device is
            found by the same kind alone.
        dtype: "float32" or "bfloat16", of cache, weights that are not quantised and the rows that enter them; sums,
            norms and the residual stream are float32. Default: "float32" on the CPU, "bfloat16" on a GPU.
        quantise: None; "q8"; "q4" (symmetric), "q4a" (with a minimum) or "q4k" (super-blocks); or "native" for weights
            that were quantised before: per matrix the smallest format that holds it as it is.
        adapters: LoRA directories of PEFT, or (directory, scale), merged into the weights in this order.
        max_position: positions that may be evaluated (default: the smaller of 8,192 and the model's own).
        offline: never reach for the network.
        salt: a tenant's secret, empty for none; its state is found under no other salt.

    Raises:
        UnknownModelError, FetchError, CheckpointError, InputError.
        UnsupportedModelError: an architecture, setting or device that is not run; it names the device and the remedy.
        CapacityError: the model does not fit the GPU that is named.
    """
    device, *more = device_names(device)
    if more:
        first, *others = (
            load_lm(
                key_or_dir, device=name, dtype=dtype, quantise=quantise, adapters=adapters, max_position=max_position,
                offline=offline, salt=salt,
            )
            for name in (device, *more)
        )  # fmt: skip
        for other, name in zip(others, more, strict=True):
            other.identity.require_exact(first.identity, f"device {name}: state")
        first.others = tuple(others)
        return first
    directory = resolve(key_or_dir, offline=offline)
    checkpoint = Checkpoint(directory)
    descriptor = read_descriptor(checkpoint.config, checkpoint.names)
    if not (descriptor.causal and descriptor.has_head) or (directory / MODULES).is_file():
        raise UnsupportedModelError(
            f"{key_or_dir}: an embedding model, which writes no text; load it with numem.load_embedder", "kind"
        )
    tokenizer = Tokenizer(directory)
    limit = min(descriptor.position_limit, 8192) if max_position is None else max_position
    if not 0 < limit <= descriptor.max_pos:
        raise InputError(f"max_position {limit} lies outside [1, {descriptor.max_pos}], the model's own range")
    there = dtype or "bfloat16"
    place = resolve_device(
        device, needs=_needs(descriptor, there, quantise, limit), refused=gpu_refuses(descriptor, there)
    )
    dtype = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    if place.type == "cpu":
        weights = Weights(checkpoint, descriptor, dtype=dtype, quantise=quantise, adapters=adapters)
        decoder: Transformer | DeviceTransformer = Transformer(descriptor, weights, dtype=dtype, max_position=limit)
    else:
        with current(place):
            weights, decoder = _on_gpu(checkpoint, descriptor, place, dtype, quantise, adapters, limit)
    weights.release()
    return LM(directory, descriptor, tokenizer, decoder, identity_of(weights, descriptor, tokenizer, decoder, salt))


def _on_gpu(
    checkpoint: Checkpoint,
    descriptor: Descriptor,
    device: "torch.device",
    dtype: str,
    quantise: str | None,
    adapters: Sequence[Given],
    max_position: int,
) -> "tuple[Weights, DeviceTransformer]":
    """Weights and decoder on a device with kernels in Triton, which nothing else imports."""
    from numem.models.device_transformer import DeviceTransformer
    from numem.models.weights.device_maker import DeviceMaker

    descriptor.check_dtype(dtype)
    maker = DeviceMaker(device, DTYPES[dtype])
    weights = Weights(checkpoint, descriptor, dtype=dtype, quantise=quantise, adapters=adapters, maker=maker)
    made = ModelWeights.read(descriptor, weights, max_position)
    return weights, DeviceTransformer(descriptor, made, dtype=dtype, max_position=max_position, device=device)


def _needs(descriptor: Descriptor, dtype: str, quantise: str | None, max_position: int) -> int:
    """Bytes that a model takes on a GPU at least: its weights, and pages for one sequence."""
    size = 4 if dtype == "float32" else 2
    bits = 8 * size if quantise is None else 8.5 if quantise == "q8" else 4.5  # at least: tables may have more
    weights = sum(math.prod(shape) for shape in descriptor.shapes().values())
    row = 2 * descriptor.layers * descriptor.kv_heads * descriptor.head_dim * size
    return int(weights * bits / 8) + max_position * row


def identity_of(
    weights: Weights,
    descriptor: Descriptor,
    tokenizer: Tokenizer,
    decoder: "Transformer | DeviceTransformer",
    salt: bytes = b"",
) -> Identity:
    """Identity of a decoder's attention state.

    max_position is not part of it: it bounds what may be evaluated and changes no number.
    """
    semantic = {
        **weights.describe(),
        "architecture": descriptor.canonical(),
        "chunk_tokens": CHUNK_TOKENS,
        "kv": decoder.spec.describe(),
        "page_tokens": PAGE_TOKENS,
        "program": "numem/decoder/v1",
        "tokenizer": tokenizer.digest().hex(),
    }
    if isinstance(decoder, Transformer):
        policy = policy_of(descriptor, decoder.dtype, quantised=weights.formats)
        return Identity(semantic, policy, device_class(CPU), salt)
    from numem.models.device_numerics import device_policy

    with current(decoder.device):
        policy = device_policy(descriptor, decoder.dtype, decoder.device, quantised=weights.formats)
    return Identity(semantic, policy, device_class(decoder.device), salt)
