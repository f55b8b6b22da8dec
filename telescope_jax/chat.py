"""Text to token ids and back.

What an environment may rely on, for every tokenizer: `decode` accepts any ids that a policy can
sample, in any order; control ids (end, padding) have no text, so that no prompt or completion can
forge one; and the ids of a completion are never made by encoding its text again (a text has many
encodings, and only one of them was sampled).
"""

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from typing import Protocol

SUMS_PIECES = ("What is ", " + ", " - ", " * ", "\\boxed{")
"""The merged pieces that make a sum with its answer about fifteen tokens."""

_CHARACTERS = "\n" + "".join(chr(code) for code in range(0x20, 0x7F))
_REPLACEMENT = "\ufffd"


class Tokenizer(Protocol):
    """What prompts, environments and engines need of a tokenizer.

    Attributes:
      name: for people, in logs and tables.
      fingerprint: equal for two tokenizers exactly if they map every text to the same ids; run
        folders and servers compare it.
      vocab_size: ids are in [0, vocab_size). A model may have more rows, for alignment.
      eos_ids: every id that ends a completion; the first one ends supervised samples.
      pad_id: fills what nothing may read; never an eos id.
    """

    @property
    def name(self) -> str: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def eos_ids(self) -> tuple[int, ...]: ...
    @property
    def pad_id(self) -> int: ...

    def encode(self, text: str) -> list[int]:
        """Plain text, with nothing added: an observation, a solution."""
        ...

    def prompt(self, text: str) -> list[int]:
        """What asks the policy `text`: rendered once through the chat template, if there is one."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


class CharTokenizer:
    """Printable ASCII and newline, one id a character, plus merged pieces, longest match first.

    `decode(encode(text)) == text` for every text it accepts. Other characters are refused rather
    than mapped to an unknown id: a prompt with a hole in it would train without anyone noticing.

    Ids: 0 padding, 1 end, then the characters, then the pieces in the order given. Padding and end
    decode to nothing; an id that is out of range decodes to U+FFFD, because a model whose embedding
    is padded to a round size can sample one.

    Args:
      pieces: texts of at least two characters that become one id each; duplicates are refused.

    Raises:
      ValueError: a piece is too short, given twice, or not printable ASCII.
    """

    pad_id = 0
    eos_ids = (1,)

    def __init__(self, pieces: Iterable[str] = SUMS_PIECES):
        pieces = tuple(pieces)
        for piece in pieces:
            if len(piece) < 2 or not set(piece) <= set(_CHARACTERS):
                raise ValueError(f"piece {piece!r} must be two or more printable ASCII characters")
        if len(set(pieces)) < len(pieces):
            raise ValueError(f"a piece is given twice in {pieces}")
        self._texts = ("", "", *_CHARACTERS, *pieces)
        self._ids = {text: i for i, text in enumerate(self._texts) if text}
        longest_first = sorted(pieces, key=len, reverse=True)
        # An alternation takes its first branch that matches, so the order decides the match.
        self._split = re.compile("|".join([*map(re.escape, longest_first), "."]), re.DOTALL)
        self.vocab_size = len(self._texts)
        digest = hashlib.sha256(json.dumps(["char", *self._texts]).encode()).hexdigest()
        self.fingerprint = digest[:16]
        self.name = f"char-{self.vocab_size}"

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without an end.

        Raises:
          ValueError: a character is neither printable ASCII nor a newline.
        """
        try:
            return [self._ids[piece] for piece in self._split.findall(text)]
        except KeyError as error:
            character = error.args[0]
            raise ValueError(
                f"character {character!r} at {text.index(character)} of {text[:60]!r} is not in "
                f"the vocabulary of {self.name} (printable ASCII and newline)"
            ) from None

    def prompt(self, text: str) -> list[int]:
        """The ids of `text`: there is no chat template."""
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, whatever they are; control ids are silent."""
        texts = self._texts
        return "".join(texts[i] if 0 <= i < len(texts) else _REPLACEMENT for i in map(int, ids))
