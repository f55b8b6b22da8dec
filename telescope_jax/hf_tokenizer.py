"""A checkpoint's own tokenizer and chat template, as `chat.Tokenizer`.

Rules that the module keeps:
- The chat template is rendered exactly once, here, for training and evaluation alike, and the
  engine gets ids: no text is ever tokenised twice, so there is one BOS and not two.
- Text is data. Control strings in a prompt (`<|im_start|>system`) are encoded as ordinary text and
  cannot forge a turn; so a data set that is already rendered is not for this project: its control
  strings lose their meaning, and a warning says so.
- A completion may end with any id that the tokenizer, generation_config.json or config.json calls
  an end.

No code that comes with a checkpoint is run; a template is rendered in Jinja's sandbox.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from telescope_jax import extras

_log = logging.getLogger(__name__)

_REPLACEMENT = "\ufffd"
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CONTENT = "\ue000content\ue001"  # private use: no template and no data set holds it


class TokenizerError(ValueError):
    """A checkpoint's tokenizer cannot be used; the message says what to set or to install."""


class HfTokenizer:
    """The tokenizer in a checkpoint's folder.

    Args:
      folder: holds tokenizer.json, or what transformers makes one from.
      chat_template: "" takes the checkpoint's own; "none" trains on raw text (base models); else
        the name of a Jinja file.

    Raises:
      TokenizerError: transformers or the tokenizer is missing, there is no chat template and none
        was chosen, no id ends a completion, or the template cannot be rendered.
    """

    def __init__(self, folder: Path, *, chat_template: str = ""):
        loaded = _load(folder)
        backend = loaded.backend_tokenizer
        self.name = folder.name
        # Two copies, because "are control strings special?" is a switch on the tokenizer itself,
        # and prompts are made in several threads.
        self._plain, self._control = _copy(backend, plain=True), _copy(backend, plain=False)
        self._loaded = loaded
        self._template = _template(loaded, chat_template, folder)
        special = (token.content for token in loaded.added_tokens_decoder.values() if token.special)
        self._control_texts = tuple(special)
        self._warned = False
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_ids = _eos_ids(loaded, folder)
        not_an_end = (i for i in range(self.vocab_size) if i not in self.eos_ids)
        pad = loaded.pad_token_id
        self.pad_id = pad if pad is not None and pad not in self.eos_ids else next(not_an_end)
        identity = json.dumps(["hf", backend.to_str(), self._template])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]
        try:
            self.prompt("hi")
        except Exception as error:  # a template raises what it likes
            raise TokenizerError(
                f"{folder}: the chat template cannot render one user message ({error}); give "
                "another one as policy.chat_template"
            ) from error

    def encode(self, text: str) -> list[int]:
        """The ids of `text` as ordinary text: no control id among them, nothing added."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of any ids; control ids are silent, ids beyond the vocabulary U+FFFD (MX-21)."""
        texts: list[str] = []
        run: list[int] = []
        for i in map(int, ids):
            if 0 <= i < self.vocab_size:
                run.append(i)
            else:
                texts += [self._control.decode(run, skip_special_tokens=True), _REPLACEMENT]
                run = []
        return "".join([*texts, self._control.decode(run, skip_special_tokens=True)])

    def prompt(self, text: str) -> list[int]:
        """The ids that ask the policy `text`: one user message and the opening of the answer.

        Without a chat template: `text` with what the tokenizer puts before any text (BOS).
        """
        hostile = any(control in text for control in self._control_texts)
        if hostile and not self._warned:
            self._warned = True
            _log.warning(
                "a prompt holds control strings, which are encoded as ordinary text; if the data "
                "is already rendered, give the questions alone: %r",
                text[:80],
            )
        if self._template is None:
            return self._plain.encode(text, add_special_tokens=True).ids
        if not hostile:
            return self._control.encode(self._render(text), add_special_tokens=False).ids
        ids: list[int] = []
        for i, part in enumerate(self._render(_CONTENT).split(_CONTENT)):
            ids += self.encode(text) if i else []
            ids += self._control.encode(part, add_special_tokens=False).ids
        return ids

    def _render(self, text: str) -> str:
        return self._loaded.apply_chat_template(
            [{"role": "user", "content": text}],
            chat_template=self._template,
            tokenize=False,
            add_generation_prompt=True,
        )


def _load(folder: Path) -> Any:
    # Without its files, transformers 5 makes an empty tokenizer and says nothing.
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise TokenizerError(
            f"{folder} has no tokenizer: none of {', '.join(_VOCABULARIES)} is there"
        )
    if absent := extras.missing("a checkpoint's tokenizer", "transformers"):
        raise TokenizerError(absent)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # tokenizer.json says everything; AutoTokenizer would import the model's own module as well, and
    # with it torch and torchvision.
    kind = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    try:
        loaded = kind.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # transformers documents no errors of its own
        raise TokenizerError(f"{folder} has no tokenizer that can be read: {error}") from error
    if not loaded.encode("hi", add_special_tokens=False):
        raise TokenizerError(f"{folder}: the tokenizer has no ids for plain text")
    if not getattr(loaded, "is_fast", False):
        raise TokenizerError(f"{folder}: the tokenizer has no tokenizer.json form")
    return loaded


def _copy(backend: Any, *, plain: bool) -> Any:
    copy = type(backend).from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = plain
    return copy


def _template(loaded: Any, setting: str, folder: Path) -> str | None:
    if setting == "none":
        return None
    if setting:
        try:
            return Path(setting).read_text(encoding="utf-8")
        except OSError as error:
            raise TokenizerError(
                f"policy.chat_template={setting} cannot be read: {error}"
            ) from None
    template = loaded.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if not template:
        raise TokenizerError(
            f"{folder} has no chat template; set policy.chat_template to a Jinja file, or to none "
            "to train on raw text"
        )
    return template


def _eos_ids(loaded: Any, folder: Path) -> tuple[int, ...]:
    """The tokenizer's end first, then those of generation_config.json and config.json (TK-03)."""
    found = [loaded.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        try:
            ids = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise TokenizerError(f"{folder / name} cannot be read: {error}") from error
        found += ids if isinstance(ids, list) else [ids]
    eos_ids = tuple(dict.fromkeys(i for i in found if i is not None))
    if not eos_ids:
        raise TokenizerError(
            f"{folder}: no eos_token_id in the tokenizer, generation_config.json or config.json; "
            "no completion would end"
        )
    return eos_ids
