"""Compiles grammars with xgrammar for one tokenizer. Only in the grammar processes; the engine never calls xgrammar.

A compilation cannot be interrupted, its time and memory depend on the text, and it may crash its process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import xgrammar
from transformers import PreTrainedTokenizerFast

from slipstream.core.sampling_params import Guide
from slipstream.engine.structural_tags import bounded_tag, schema_grammar
from slipstream.tokenizer.tokenizer import TextTokenizer


class GrammarError(Exception):
    """The text is no valid grammar; str() is the reason."""


class GrammarCompiler:
    """vocab_size: rows of the model's head, which may exceed the tokenizer's."""

    def __init__(self, tokenizer_path: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        fast = PreTrainedTokenizerFast(tokenizer_object=TextTokenizer.load(tokenizer_path).backend)
        self._info = xgrammar.TokenizerInfo.from_huggingface(
            fast, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids) or None
        )

    def compile(self, guide: Guide) -> xgrammar.CompiledGrammar:
        """Raises GrammarError."""
        compiler = xgrammar.GrammarCompiler(self._info, max_threads=1, cache_enabled=False)
        compile_text: dict[str, Callable[[str], xgrammar.CompiledGrammar]] = {
            "json": lambda text: compiler.compile_builtin_json_grammar(),
            "json_schema": lambda text: compiler.compile_grammar(schema_grammar(text)),
            "regex": compiler.compile_regex,
            "ebnf_grammar": compiler.compile_grammar,
            "structural_tag": lambda text: compiler.compile_structural_tag(bounded_tag(text)),
        }
        try:
            if guide.type != "json" and not guide.text.strip():
                raise ValueError("the text is empty")
            return compile_text[guide.type](guide.text)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError) as error:
            # raised by xgrammar for invalid texts: it asserts the form of structural tags
            raise GrammarError(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """The first line of xgrammar's message without its time stamp and source position."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", lines[0])[:300] if lines else type(error).__name__
