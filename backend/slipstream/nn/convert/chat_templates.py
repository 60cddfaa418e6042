"""Chat templates of models whose published folders have theirs in code: Baichuan, ChatGLM2, ChatGLM3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer

# Source: generation_utils.py of Baichuan2-13B-Chat: token ids of the two roles, system text first, nothing else
BAICHUAN = (
    "{{% for m in messages %}}{{% if m.role == 'user' %}}{user}{{% elif m.role == 'assistant' %}}{assistant}"
    "{{% endif %}}{{{{ m.content }}}}{{% endfor %}}{{% if add_generation_prompt %}}{assistant}{{% endif %}}"
)
# Source: build_chat_input of chatglm3-6b's tokenization_chatglm.py
CHATGLM3 = (
    "[gMASK]sop{% for m in messages %}<|{{ m.role }}|>\n {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Source: build_prompt of chatglm2-6b's tokenization_chatglm.py
CHATGLM2 = (
    "[gMASK]sop{% for m in messages %}{% if m.role == 'user' %}[Round {{ loop.index0 // 2 + 1 }}]\n\n"
    "问：{{ m.content }}\n\n答：{% elif m.role == 'assistant' %}{{ m.content }}\n\n{% else %}"
    "{{ raise_exception('ChatGLM2 has the roles user and assistant alone') }}{% endif %}{% endfor %}"
)


def chat_template(config: Mapping[str, Any], generation: Mapping[str, Any], tokenizer: Tokenizer) -> str | None:
    """The template of a folder that has none; None for base models and models that are not known here."""
    architectures = " ".join(map(str, config.get("architectures") or ()))
    if "ChatGLM" in architectures:
        if tokenizer.token_to_id("<sop>") is not None:
            return None  # GLM-4's folders have one
        return CHATGLM3 if tokenizer.token_to_id("<|user|>") is not None else CHATGLM2
    if "aichuan" in architectures or "BaiChuan" in architectures:
        ids = [generation.get(f"{role}_token_id", -1) for role in ("user", "assistant")]
        known = [
            token_id for token_id in ids if isinstance(token_id, int) and 0 <= token_id < tokenizer.get_vocab_size()
        ]
        if len(known) == 2:
            user, assistant = (tokenizer.id_to_token(token_id) for token_id in known)
            return BAICHUAN.format(user=user, assistant=assistant)
    return None
