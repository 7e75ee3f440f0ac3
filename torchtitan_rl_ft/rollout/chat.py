"""Chat templates of Hugging Face model directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """Renders prompts as the model's tokenizer would; plain text when it has no template."""

    def __init__(self, template: str | None, special: dict[str, Any] | None = None) -> None:
        """Raises ValueError when the template is not valid Jinja."""
        self._special = special or {}
        self._template = None
        if template is not None:
            env = ImmutableSandboxedEnvironment(
                trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
            )
            env.globals["raise_exception"] = _refuse  # type: ignore[assignment]
            try:
                self._template = env.from_string(template)
            except TemplateError as e:
                raise ValueError(f"the chat template is not valid: {e}") from e

    @classmethod
    def of(cls, model_path: Path) -> ChatTemplate:
        """From `chat_template.jinja`, else from `tokenizer_config.json`. Raises ValueError."""
        config: dict[str, Any] = {}
        if (file := model_path / "tokenizer_config.json").is_file():
            config = json.loads(file.read_bytes())
        template = config.get("chat_template")
        if (file := model_path / "chat_template.jinja").is_file():
            template = file.read_text()
        if isinstance(template, list):  # several named ones
            template = {t["name"]: t["template"] for t in template}.get("default")
        special = {k: config[k] for k in ("bos_token", "eos_token") if k in config}
        special = {k: v["content"] if isinstance(v, dict) else v for k, v in special.items()}
        return cls(template, special)

    def user_turn(self, text: str) -> str:
        """One question, ready for the model's answer."""
        if self._template is None:
            return text
        return self._template.render(
            messages=[{"role": "user", "content": text}],
            add_generation_prompt=True,
            **self._special,
        )


def _refuse(message: str) -> None:
    raise TemplateError(message)
