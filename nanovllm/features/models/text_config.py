"""TextConfig: a model for images and text, of which only the text is computed.

Its config.json has the fields of the text model in text_config. The tensors of the text model have
the usual names with a prefix.
"""

from pathlib import Path
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.features.models.moe.moe_config import unstacked
from nanovllm.models.model_config import ModelConfig

TIE = "tie_word_embeddings"
# Tensors for images and for speculative decoding. The names may begin with "model.".
NOT_TEXT = tuple(
    prefix + name
    for prefix in ("", "model.")
    for name in ("mtp.", "visual.", "vision_tower.", "multi_modal_projector.")
)


class TextConfig(ModelConfig):
    """A ModelConfig for checkpoints with other tensors than those of the text model."""

    def check_options(self, config: EngineConfig) -> None:
        super().check_options(config)
        limit = self.rope.original_max_position_embeddings
        if self.rope.llama_4_scaling_beta and (config.max_model_len or 0) > limit:
            raise ValueError(
                f"max_model_len={config.max_model_len} is more than the {limit} original positions "
                "of the model, and llama_4_scaling_beta, a factor of later queries, is not "
                f"supported; use at most {limit}"
            )

    def select_tensors(self, files: dict[Path, Any]) -> dict[Path, Any]:
        """Return the files without the tensors for images and for speculative decoding (MTP)."""
        return {path: unstacked(file, text_names(file)) for path, file in files.items()}


def with_text_config(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a config.json. Fields of its text_config, if any, take precedence."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    own: dict[str, Any] = {
        name: raw[name] for name in ("architectures", "model_type") if name in raw
    }
    if TIE in raw and text.get(TIE) is not True:
        own[TIE] = raw[TIE]  # true if one of the two is true
    return raw | {name: value for name, value in text.items() if value is not None} | own


def text_names(file: Any) -> dict[str, str]:
    """Return the tensors of the text model in a file: their usual names -> their names there."""
    # transformers 5.3 to 5.5 wrote "language_model." two or three times.
    names = {name.replace("language_model.", ""): name for name in file.keys()}  # noqa: SIM118
    return {name: stored for name, stored in names.items() if not name.startswith(NOT_TEXT)}
