"""The main job as assets: a table of prompts in, completions out, every shared prefix prefilled once.

Belongs here: which stage an asset is, and its place in the graph. What the stages do: `numem.job.stages`, imported
inside the bodies because it loads torch. What a person reads on the events: `dagster_project.assets.events`.

Dagster concept: https://docs.dagster.io/guides/build/assets
"""

from collections.abc import Callable, Mapping
from typing import Any

import dagster as dg
from pydantic import Field

from dagster_project.assets import events
from dagster_project.assets.batches import PROMPT_BATCHES
from dagster_project.assets.provenance import code_version, exact_parents
from dagster_project.resources.memory import MemoryResource
from dagster_project.resources.model import ModelResource
from dagster_project.resources.runtime import RuntimeResource
from numem.errors import InputError
from numem.job.batch import load_batch, make_batch, save_batch
from numem.job.prompts import read_prompts
from numem.job.versions import chunks_version

Context = dg.AssetExecutionContext
Result = dg.MaterializeResult[Any]


def inference_asset(kind: str, *parents: dg.AssetsDefinition) -> Callable[[Callable[..., Result]], dg.AssetsDefinition]:
    """`dg.asset` with what all assets of the job have in common."""
    return dg.asset(
        partitions_def=PROMPT_BATCHES,
        group_name="inference",
        owners=["team:numem"],
        kinds={kind},
        code_version=code_version(),
        deps=parents,
    )


class PromptsConfig(dg.Config):
    """Where a batch comes from, and what its event shows."""

    path: str = Field(default="", description="JSONL or Parquet table; empty: the batch is in the memory already.")
    previews: bool = Field(
        default=False, description="Show the ends of the prompts on the event, which never goes away."
    )


class DecodeConfig(dg.Config):
    """What the event of the outputs shows."""

    previews: bool = Field(
        default=False, description="Show the beginnings of the outputs on the event, which never goes away."
    )


def materialised(context: Context, version: str, metadata: Mapping[str, Any]) -> Result:
    """The event of an asset: content identity as data version, exact parents, what a person reads."""
    return dg.MaterializeResult(
        data_version=dg.DataVersion(version), tags=exact_parents(context), metadata={**metadata, "run": context.run_id}
    )


@inference_asset("json")
def prompts(context: Context, config: PromptsConfig, memory: MemoryResource, model: ModelResource) -> Result:
    """A batch of prompts: token ids, and the prefixes that two or more of them share.

    The partition key is the batch's id, a digest over the model's identity and the prompts.
    """
    if config.path:
        made = make_batch(model.load(), read_prompts(config.path), model=model.key)
        if made.id != context.partition_key:
            raise InputError(
                f"{config.path}: is batch {made.id} under model {model.key!r}, not {context.partition_key}; start it with "
                "`numem run`, or add that partition and materialise it"
            )
        save_batch(memory.get(), made)
    batch = load_batch(memory.get(), context.partition_key)
    texts = events.ends_of_prompts(model.load(), batch) if config.previews else None
    return materialised(context, batch.id, events.of_prompts(batch, config.path, texts))


@inference_asset("torch", prompts)
def prefill(context: Context, memory: MemoryResource, model: ModelResource, runtime: RuntimeResource) -> Result:
    """Attention state of every prefix, computed once; new chunks stand staged in the memory's spool."""
    from numem.job import stages

    batch = load_batch(memory.get(), context.partition_key)
    report = stages.prefill(memory.get(), model.load(), batch, context.run_id, runtime.progress)
    return materialised(context, chunks_version(memory.get(), batch), events.of_prefill(report))


@inference_asset("lance", prefill)
def published_chunks(context: Context, memory: MemoryResource) -> Result:
    """The batch's chunks, durable in the home tier; each payload stands there once."""
    from numem.job.durable import publish

    batch = load_batch(memory.get(), context.partition_key)
    report = publish(memory.get(), batch, context.run_id)
    return materialised(
        context, chunks_version(memory.get(), batch), events.of_publication(memory.get(), batch, report)
    )


@inference_asset("lance", published_chunks)
def promoted_replicas(context: Context, memory: MemoryResource, runtime: RuntimeResource) -> Result:
    """Copies of the batch's chunks in the decoding node's tier, verified before they became visible."""
    from numem.job.durable import promote

    batch = load_batch(memory.get(), context.partition_key)
    report = promote(memory.get(), batch, context.run_id, runtime.tier)
    return materialised(context, chunks_version(memory.get(), batch, runtime.tier), events.of_promotion(report))


@inference_asset("torch", promoted_replicas)
def restored_prefixes(
    context: Context, memory: MemoryResource, model: ModelResource, runtime: RuntimeResource
) -> Result:
    """Every prefix read back into empty pages: the decision, its bytes and times, and a digest of the rows."""
    from numem.job import stages

    batch = load_batch(memory.get(), context.partition_key)
    report = stages.restore(memory.get(), model.load(), batch, context.run_id, runtime.tier, runtime.progress)
    return materialised(context, report.version, events.of_restore(report))


@inference_asset("torch", restored_prefixes)
def decoded_continuations(
    context: Context, config: DecodeConfig, memory: MemoryResource, model: ModelResource, runtime: RuntimeResource
) -> Result:
    """Completions of all prompts from restored prefixes, and the proof that restoring changed no bit.

    A prompt that an earlier run finished under the same settings is not decoded again unless the run asks for it.
    """
    from numem.job.run import decode_and_prove
    from numem.job.summary import summarise

    batch, run = load_batch(memory.get(), context.partition_key), context.run_id
    report = decode_and_prove(memory.get(), model.load(), batch, run, runtime.decoding(), progress=runtime.progress)
    texts = events.beginnings_of_outputs(report.outputs) if config.previews else None
    return materialised(
        context, report.outputs_digest, events.of_outputs(summarise(memory.get(), batch, run), report, texts)
    )


INFERENCE = [prompts, prefill, published_chunks, promoted_replicas, restored_prefixes, decoded_continuations]
