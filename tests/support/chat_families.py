"""Tiny checkpoints as families publish their chat models: role markers, template, end tokens beside the weights.

The templates are what the families' own ones write for plain conversations (system, user, assistant); tools and
documents are left out. Vocabularies are toys with the family's markers in them. Source of the markers: the model cards.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from slipstream.nn.models.baichuan import BAICHUAN2_VOCABULARY
from tiny_checkpoints import TinyCheckpoint, make_checkpoint
from tokenizers import AddedToken, Tokenizer, processors
from toy_tokenizers import byte_level, sentencepiece
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

MAX_POSITIONS = 512
GREEDY = {"max_tokens": 16, "temperature": 0.0, "repetition_penalty": 1.5}  # random weights repeat themselves without
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie heißt du? 你好 "},
    {"role": "assistant", "content": "I am a fox."},
    {"role": "user", "content": "The quick brown\nfox"},
]
PROMPT = "The quick brown fox"
# the same in the checkpoint's own words, for requests that say nothing
GENERATION_CONFIG = {"do_sample": True, "max_new_tokens": 16, "top_k": 1, "repetition_penalty": 1.5}

_EACH = "{% for m in messages %}"
_END = "{% endfor %}"
_ASKED = "{% if add_generation_prompt %}"
_DONE = "{% endif %}"
_SYSTEM_FIRST = (  # Gemma, Llama 2 and Mixtral have no role for it: it stands before the first user's words
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% set talk = messages[1:] if system else messages %}"
)
CHATML = (
    f"{_EACH}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}<|im_end|>\n{_END}{_ASKED}<|im_start|>assistant\n{_DONE}"
)
KIMI = (
    f"{_EACH}<|im_{{{{ m.role }}}}|>{{{{ m.role }}}}<|im_middle|>{{{{ m.content }}}}<|im_end|>{_END}"
    f"{_ASKED}<|im_assistant|>assistant<|im_middle|>{_DONE}"
)
LLAMA3 = (
    "{{ bos_token }}" + _EACH + "<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}<|eot_id|>"
    f"{_END}{_ASKED}<|start_header_id|>assistant<|end_header_id|>\n\n{_DONE}"
)
LLAMA2 = _SYSTEM_FIRST + (
    "{% for m in talk %}{% if m.role == 'user' %}{{ bos_token }}[INST] "
    "{% if loop.first and system %}<<SYS>>\n{{ system }}\n<</SYS>>\n\n{% endif %}"
    "{{ m.content | trim }} [/INST]{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = _SYSTEM_FIRST + (
    "{{ bos_token }}{% for m in talk %}{% if m.role == 'user' %}[INST] "
    "{% if loop.last and system %}{{ system }}\n\n{% endif %}{{ m.content }}[/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL_SMALL = "{{ bos_token }}" + (
    _EACH + "{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}" + _END
)
DEEPSEEK = "{{ bos_token }}" + (
    _EACH + "{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<｜Assistant｜>{{ m.content }}<｜end▁of▁sentence｜>{% else %}{{ m.content }}{% endif %}" + _END
) + f"{_ASKED}<｜Assistant｜><think>\n{_DONE}"  # fmt: skip
QWEN3 = CHATML.removesuffix(_DONE) + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}" + _DONE
)
MINIMAX = (
    _EACH + "{% if m.role == 'system' %}]~!b[]~b]system\n"
    "{% else %}]~b]{{ 'ai' if m.role == 'assistant' else m.role }}\n{% endif %}{{ m.content }}[e~[\n" + _END
) + f"{_ASKED}]~b]ai\n<think>\n{_DONE}"  # fmt: skip
HARMONY = (
    "<|start|>system<|message|>Reasoning: {{ reasoning_effort or 'medium' }}<|end|>" + _EACH
    + "<|start|>{{ 'developer' if m.role == 'system' else m.role }}"
    "{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>" + _END
    + f"{_ASKED}<|start|>assistant{_DONE}"
)  # fmt: skip
GLM4 = "[gMASK]<sop>" + _EACH + "<|{{ m.role }}|>\n{{ m.content }}" + _END + f"{_ASKED}<|assistant|>{_DONE}"
GLM45 = GLM4.replace("[gMASK]<sop>", "[gMASK]<sop>\n")
CHATGLM3 = "[gMASK]sop" + _EACH + "<|{{ m.role }}|>\n {{ m.content }}" + _END + f"{_ASKED}<|assistant|>{_DONE}"
CHATGLM2 = _SYSTEM_FIRST + (
    "{% for m in talk %}{% if m.role == 'user' %}[Round {{ loop.index // 2 + 1 }}]\n\n问：{{ m.content }}\n\n答："
    "{% else %}{{ m.content }}\n\n{% endif %}{% endfor %}"
)
GEMMA = _SYSTEM_FIRST + (
    "{{ bos_token }}{% for m in talk %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{% if loop.first and system %}{{ system }}\n\n{% endif %}{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    f"{_ASKED}<start_of_turn>model\n{_DONE}"
)
PHI3 = _EACH + "<|{{ m.role }}|>\n{{ m.content }}<|end|>\n" + _END + f"{_ASKED}<|assistant|>\n{_DONE}"
PHI4 = (
    _EACH + "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>" + _END
    + f"{_ASKED}<|im_start|>assistant<|im_sep|>{_DONE}"
)  # fmt: skip
GRANITE = (
    _EACH + "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n" + _END
    + f"{_ASKED}<|start_of_role|>assistant<|end_of_role|>{_DONE}"
)  # fmt: skip
OLMO2 = "{{ bos_token }}" + (
    _EACH + "<|{{ m.role }}|>\n{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}\n" + _END
) + f"{_ASKED}<|assistant|>\n{_DONE}"  # fmt: skip
BAICHUAN = (
    _EACH + "{% if m.role == 'user' %}<reserved_106>{% elif m.role == 'assistant' %}<reserved_107>{% endif %}"
    "{{ m.content }}" + _END + f"{_ASKED}<reserved_107>{_DONE}"
)  # fmt: skip


DOTS = (
    _EACH + "{% if m.role == 'system' %}<|system|>{{ m.content }}<|endofsystem|>{% elif m.role == 'user' %}"
    "<|userprompt|>{{ m.content }}<|endofuserprompt|>{% else %}<|response|>{{ m.content }}<|endofresponse|>{% endif %}"
    + _END + f"{_ASKED}<|response|>{_DONE}"
)  # fmt: skip
ERNIE = "{{ bos_token }}" + (
    _EACH + "{% if m.role == 'user' %}User: {{ m.content }}\n{% elif m.role == 'assistant' %}"
    "Assistant: {{ m.content }}<|end_of_sentence|>{% else %}{{ m.content }}\n{% endif %}" + _END
) + f"{_ASKED}Assistant: {_DONE}"  # fmt: skip
EXAONE = _EACH + "[|{{ m.role }}|]\n{{ m.content }}[|endofturn|]\n" + _END + f"{_ASKED}[|assistant|]\n<think>\n{_DONE}"
K_EXAONE = EXAONE.replace("[|", "<|").replace("|]", "|>")
HUNYUAN = (
    "{{ bos_token }}" + _EACH + "{% if m.role == 'system' %}{{ m.content }}<|extra_4|>"
    "{% elif m.role == 'user' %}<|extra_0|>{{ m.content }}{% else %}{{ m.content }}<|eos|>{% endif %}" + _END
)
SOLAR = _EACH + "<|begin|>{{ m.role }}<|content|>{{ m.content }}<|end|>" + _END + f"{_ASKED}<|begin|>assistant{_DONE}"
SEED = (
    _EACH + "{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}" + _END
    + f"{_ASKED}{{{{ bos_token }}}}assistant\n{_DONE}"
)  # fmt: skip


@dataclass(frozen=True)
class ChatFamily:
    """variant: of the weights. markers: special tokens of the vocabulary. ends: tokens that end an answer, in
    generation_config.json. front: what the tokenizer puts before a text that is no chat."""

    variant: str
    template: str
    markers: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str = "<s>"
    front: tuple[str, ...] = ()
    is_sentencepiece: bool = False
    vocab_size: int = 0  # of the vocabulary at least
    changes: Mapping[str, object] = field(default_factory=dict)  # of the config


def _chatml(variant: str, template: str = CHATML) -> ChatFamily:
    markers = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
    return ChatFamily(variant, template, markers, ("<|im_end|>", "<|endoftext|>"), bos="")


_LLAMA3_MARKERS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
_DEEPSEEK_MARKERS = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<think>")
_GLM_ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_MARKERS = ("<|endoftext|>", "[gMASK]", "<sop>", *_GLM_ROLES)
_GLM_ENDS = ("<|endoftext|>", "<|user|>", "<|observation|>")
_GEMMA_MARKERS = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_BAICHUAN_MARKERS = ("<reserved_106>", "<reserved_107>")
_ERNIE_MARKERS = ("<|begin_of_sentence|>", "<|end_of_sentence|>")
_EXAONE_MARKERS = ("[BOS]", "[|system|]", "[|user|]", "[|assistant|]", "[|endofturn|]", "<think>", "</think>")
_HUNYUAN_MARKERS = ("<|startoftext|>", "<|extra_0|>", "<|extra_4|>", "<|eos|>")
_GRANITE_MARKERS = ("<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>")
_KIMI_MARKERS = ("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>")
_BOS_R1 = "<｜begin▁of▁sentence｜>"

FAMILIES: dict[str, ChatFamily] = {
    "llama-3": ChatFamily(
        "llama3-gqa-rope", LLAMA3, _LLAMA3_MARKERS, ("<|end_of_text|>", "<|eot_id|>"),
        bos="<|begin_of_text|>", front=("<|begin_of_text|>",),
    ),
    "llama-2": ChatFamily("llama2-mha", LLAMA2, (), ("</s>",), front=("<s>",), is_sentencepiece=True),
    "smollm2": _chatml("llama-tied"),
    "smollm3": _chatml("smollm3"),
    "internlm3": _chatml("internlm3"),
    "hyperclova-x": _chatml("hyperclovax"),
    "mimo": _chatml("mimo"),
    "cwm": ChatFamily("cwm", LLAMA3, _LLAMA3_MARKERS, ("<|end_of_text|>", "<|eot_id|>"), bos="<|begin_of_text|>"),
    "r1-distill-llama": ChatFamily(
        "llama3-gqa-rope", DEEPSEEK, _DEEPSEEK_MARKERS, ("<｜end▁of▁sentence｜>",), bos=_BOS_R1, front=(_BOS_R1,)
    ),
    "r1-distill-qwen": ChatFamily(
        "qwen2", DEEPSEEK, _DEEPSEEK_MARKERS, ("<｜end▁of▁sentence｜>",), bos=_BOS_R1, front=(_BOS_R1,)
    ),
    "qwen2.5": _chatml("qwen2-tied-windows"),
    "qwen3": _chatml("qwen3", QWEN3),
    "qwen1.5-moe": _chatml("qwen2-moe"),
    "qwen3-moe": _chatml("qwen3-moe", QWEN3),
    "mistral-7b": ChatFamily("mistral-window", MISTRAL, ("[INST]", "[/INST]"), ("</s>",), front=("<s>",),
                             is_sentencepiece=True),
    "mistral-small-3.1": ChatFamily(
        "mistral-seeing", MISTRAL_SMALL, ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("</s>",),
        front=("<s>",),
    ),
    "ministral-3": ChatFamily(
        "ministral3", MISTRAL_SMALL, ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), ("</s>",),
        front=("<s>",),
    ),
    "mixtral": ChatFamily("mixtral", LLAMA2, (), ("</s>",), front=("<s>",), is_sentencepiece=True),
    "minimax-m2": ChatFamily("minimax-m2", MINIMAX, ("]~!b[", "]~b]", "[e~[", "<think>"), ("[e~[",), bos=""),
    "gpt-oss": ChatFamily(
        "gpt-oss", HARMONY,
        ("<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"),
        ("<|return|>", "<|call|>"), bos="<|startoftext|>",
    ),
    "glm-4-9b": ChatFamily("glm", GLM4, _GLM_MARKERS, _GLM_ENDS, bos="", front=("[gMASK]", "<sop>")),
    "glm-4-0414": ChatFamily("glm4", GLM4, _GLM_MARKERS, _GLM_ENDS, bos=""),
    "chatglm3": ChatFamily(
        "chatglm", CHATGLM3, ("[gMASK]", "sop", *_GLM_ROLES), ("</s>", "<|user|>", "<|observation|>"), bos="",
        front=("[gMASK]", "sop"), is_sentencepiece=True,
    ),
    "chatglm2": ChatFamily("chatglm", CHATGLM2, ("[gMASK]", "sop"), ("</s>",), bos="", front=("[gMASK]", "sop"),
                           is_sentencepiece=True),
    "glm-4.5": ChatFamily("glm4-moe", GLM45, _GLM_MARKERS, _GLM_ENDS, bos=""),
    "glm-4.7-flash": ChatFamily("glm4-moe-lite", GLM45, _GLM_MARKERS, _GLM_ENDS, bos=""),
    **{
        name: ChatFamily(
            variant, DEEPSEEK, _DEEPSEEK_MARKERS, ("<｜end▁of▁sentence｜>",), bos=_BOS_R1, front=(_BOS_R1,)
        )
        for name, variant in (("deepseek-v2-lite", "deepseek-v2-lite"), ("deepseek-r1", "deepseek-v3"))
    },
    "kimi-k2.5": ChatFamily("kimi-seeing", KIMI, _KIMI_MARKERS, ("<|im_end|>", "[EOS]"), bos="[BOS]"),
    "gemma-7b": ChatFamily("gemma", GEMMA, _GEMMA_MARKERS, ("<eos>", "<end_of_turn>"), bos="<bos>", front=("<bos>",)),
    "gemma-2": ChatFamily("gemma2", GEMMA, _GEMMA_MARKERS, ("<eos>", "<end_of_turn>"), bos="<bos>", front=("<bos>",)),
    "gemma-3-1b": ChatFamily("gemma3", GEMMA, _GEMMA_MARKERS, ("<eos>", "<end_of_turn>"), bos="<bos>",
                             front=("<bos>",)),
    "gemma-3": ChatFamily("gemma3-seeing", GEMMA, _GEMMA_MARKERS, ("<eos>", "<end_of_turn>"), bos="<bos>",
                          front=("<bos>",)),
    "phi-4": ChatFamily("phi3", PHI4, ("<|im_start|>", "<|im_sep|>", "<|im_end|>"), ("<|im_end|>",), bos=""),
    "phi-3": ChatFamily(
        "phi3-longrope", PHI3, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|endoftext|>"),
        ("<|end|>", "<|endoftext|>"), front=("<s>",), is_sentencepiece=True,
    ),
    "granite-3": ChatFamily("granite", GRANITE, _GRANITE_MARKERS, ("<|end_of_text|>",), bos="",
                            changes={"tie_word_embeddings": False}),
    **{
        name: ChatFamily(variant, GRANITE, _GRANITE_MARKERS, ("<|end_of_text|>",), bos="")
        for name, variant in (
            ("granite-3-moe", "granite-moe"), ("granite-moe-shared", "granite-moe-shared"),
            ("granite-4-micro", "granite-hybrid"),
        )
    },
    "olmo-2": ChatFamily("olmo2", OLMO2, ("<|endoftext|>",), ("<|endoftext|>",), bos="<|endoftext|>"),
    "olmo-3": _chatml("olmo3"),
    "olmoe": ChatFamily("olmoe", OLMO2, ("<|endoftext|>",), ("<|endoftext|>",), bos="<|endoftext|>"),
    **{
        name: ChatFamily(variant, ERNIE, _ERNIE_MARKERS, ("</s>",), bos="<|begin_of_sentence|>", is_sentencepiece=True)
        for name, variant in (("ernie-4.5", "ernie4_5"), ("ernie-4.5-moe", "ernie4_5-moe"))
    },
    "dots.llm1": ChatFamily(
        "dots1", DOTS,
        ("<|system|>", "<|endofsystem|>", "<|userprompt|>", "<|endofuserprompt|>", "<|response|>", "<|endofresponse|>"),
        ("<|endofresponse|>",), bos="",
    ),
    "exaone-4": ChatFamily("exaone4", EXAONE, _EXAONE_MARKERS, ("[|endofturn|]",), bos="[BOS]"),
    "k-exaone": ChatFamily(
        "exaone-moe", K_EXAONE, ("<|system|>", "<|user|>", "<|assistant|>", "<|endofturn|>", "<think>", "</think>"),
        ("<|endofturn|>",), bos="",
    ),
    **{
        name: ChatFamily(variant, HUNYUAN, _HUNYUAN_MARKERS, ("<|eos|>",), bos="<|startoftext|>")
        for name, variant in (("hunyuan", "hunyuan"), ("hunyuan-a13b", "hunyuan-moe"))
    },
    "solar-open": ChatFamily(
        "solar-open", SOLAR, ("<|begin|>", "<|end|>", "<|content|>", "<|flush|>"), ("<|flush|>",), bos=""
    ),
    "seed-oss": ChatFamily("seed-oss", SEED, ("<seed:bos>", "<seed:eos>"), ("<seed:eos>",), bos="<seed:bos>"),
    "baichuan2-7b": ChatFamily("baichuan2-head", BAICHUAN, _BAICHUAN_MARKERS, ("</s>",), is_sentencepiece=True,
                               vocab_size=BAICHUAN2_VOCABULARY),
    "baichuan-13b": ChatFamily("baichuan-alibi", BAICHUAN, _BAICHUAN_MARKERS, ("</s>",), is_sentencepiece=True),
}  # fmt: skip


@dataclass(frozen=True)
class Expected:
    """What Hugging Face makes of a prompt: text, and whether an end token ended it."""

    text: str
    is_ended: bool


@dataclass(frozen=True)
class ServedFamily:
    """A checkpoint folder, and Hugging Face's greedy answers: to MESSAGES through the template, and to PROMPT.

    settings: of requests that must get these answers, beside GREEDY or the checkpoint's own defaults. They keep byte
    tokens out: in a run of them that is no character, Hugging Face replaces also what a stream has sent already.
    """

    path: Path
    settings: dict[str, object]
    chat: Expected
    completion: Expected


def make_family(name: str, path: Path) -> ServedFamily:
    """Write a family's checkpoint folder. A token of its answer to MESSAGES is one of its end tokens, so that the list
    in generation_config.json decides where an answer ends."""
    family = FAMILIES[name]
    backend = _vocabulary(family)
    ends = [backend.token_to_id(token) for token in family.ends]
    sizes = {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": MAX_POSITIONS, "eos_token_id": ends[0]}
    checkpoint = make_checkpoint(family.variant, path, **sizes, **family.changes)
    tokenizer = _save_tokenizer(family, backend, path)
    greedy = Greedy(
        checkpoint, ends, [token_id for piece, token_id in backend.get_vocab().items() if piece[:3] == "<0x"]
    )
    chat = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    prompts = tokenizer(chat, add_special_tokens=False).input_ids, tokenizer(PROMPT).input_ids
    kinds = list(dict.fromkeys(greedy.generate(prompts[0])))
    ends.append(kinds[len(kinds) // 2])
    (path / "generation_config.json").write_text(json.dumps({**GENERATION_CONFIG, "eos_token_id": ends}))
    settings = {"logit_bias": dict.fromkeys(map(str, greedy.excluded), -100.0)} if greedy.excluded else {}
    return ServedFamily(path, settings, *(_expected(tokenizer, prompt, greedy) for prompt in prompts))


@dataclass(frozen=True)
class Greedy:
    """Hugging Face's answers. excluded: tokens never generated."""

    checkpoint: TinyCheckpoint
    ends: list[int]
    excluded: list[int]

    def generate(self, prompt: list[int]) -> list[int]:
        inputs = torch.tensor([prompt])
        output = self.checkpoint.model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=GREEDY["max_tokens"],
            repetition_penalty=GREEDY["repetition_penalty"], eos_token_id=self.ends, pad_token_id=0,
            suppress_tokens=self.excluded or None, use_cache=False,
        )  # fmt: skip
        return output[0, len(prompt) :].tolist()


def _vocabulary(family: ChatFamily) -> Tokenizer:
    toy = sentencepiece() if family.is_sentencepiece else byte_level()
    state = json.loads(toy.to_str())
    vocabulary = state["model"]["vocab"]
    if num_more := max(0, family.vocab_size - len(family.markers) - toy.get_vocab_size()):
        start = toy.get_vocab_size()
        vocabulary.update({f"▁{start + index}": start + index for index in range(num_more)})
    backend = Tokenizer.from_str(json.dumps(state))
    backend.add_special_tokens([AddedToken(marker, normalized=False) for marker in family.markers])
    special = [(token, backend.token_to_id(token)) for token in family.front]
    pattern = " ".join((*family.front, "$A"))
    backend.post_processor = processors.TemplateProcessing(single=pattern, special_tokens=special)
    return backend


def _save_tokenizer(family: ChatFamily, backend: Tokenizer, path: Path) -> PreTrainedTokenizerBase:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos or None,
        eos_token=family.ends[0],
        clean_up_tokenization_spaces=False,
        chat_template=family.template,
    )
    tokenizer.save_pretrained(path)
    return tokenizer


def _expected(tokenizer: PreTrainedTokenizerBase, prompt: list[int], greedy: Greedy) -> Expected:
    """The text that follows the prompt's: alone, an answer would lose its first space."""
    answer = greedy.generate(prompt)
    is_ended = answer[-1] in greedy.ends
    whole = [*prompt, *answer[: len(answer) - is_ended]]
    before, text = (tokenizer.decode(token_ids, skip_special_tokens=True) for token_ids in (prompt, whole))
    return Expected(text.removeprefix(before), is_ended)
