"""The models that clients may name: Triton's models with their chat template, length and tool format.

Event loop thread, one per worker; files are read on other threads. Fetched from Triton when a name is used and again
after REFRESH_S, because models are loaded and unloaded while the gateway runs. A model whose configuration or files
have changed by then is described anew; requests under way keep the `Model` with which they began.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream.core.checkpoint_length import checkpoint_length
from slipstream.core.config import CacheConfig, ServingConfig
from slipstream.core.control import LIST_LORA
from slipstream.core.errors import ConfigError, internal_error
from slipstream.core.generation_config import read_generation_config
from slipstream.core.numerals import read_whole
from slipstream.server.chat_template import TOOL_TEMPLATE, ChatTemplate, load_template
from slipstream.server.control import tell
from slipstream.server.errors import ApiError, model_not_found
from slipstream.server.model_tokenizer import ModelTokenizer
from slipstream.server.options import GatewayOptions
from slipstream.server.reasoning import select_reasoning
from slipstream.server.tools.select import ToolFormat, select_format
from slipstream.server.triton import TritonLink

logger = logging.getLogger(__name__)
REFRESH_S = 10.0
ADAPTERS_TIMEOUT_S = 5.0  # a model that hangs must not keep the names of others waiting
RESTART_S = 60.0  # a restarting engine appears as an unloaded model on servers before 26.03
_LENGTHS = ("max_model_len", "max_seq_len")
_INPUTS, _OUTPUTS = {"text_input", "sampling_parameters", "stream"}, {"text_output", "finish_reason"}  # none without
_VERDICTS = {"safety", "blocked"}  # outputs of a model whose answers a safety model may withhold
_SPECULATION = "speculative_method"
_DEFAULT_MAX_TOKENS = "default_max_tokens"
_BLOCK_SIZES = ("block_size", "tokens_per_block")
_CHECKPOINTS = ("model", "gpt_model_path", "engine_dir")
_TOKENIZERS = ("tokenizer", "tokenizer_dir")
_FILES = (  # all that is read of a folder
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    TOOL_TEMPLATE,
)


@dataclass
class Model:
    """name: for clients. triton_name: in Triton. max_model_len: 0 if unknown. max_new_tokens: of the checkpoint's
    generation_config.json for requests that name no `max_tokens`; 0 if it has none or config.pbtxt comes before it.

    template: None if there is none; no_template: the reason, for chat requests.
    """

    name: str
    triton_name: str
    created: int
    max_model_len: int = 0
    max_new_tokens: int = 0
    template: ChatTemplate | None = None
    no_template: str = ""
    tool_format: ToolFormat | None = None
    reasoning_format: str = ""  # of reasoning.py
    tokenizer: ModelTokenizer = field(default_factory=lambda: ModelTokenizer(None))
    settings: dict[str, str] = field(default_factory=dict)
    inputs: frozenset[str] = frozenset()  # both as declared: Triton refuses a request that names any other
    outputs: frozenset[str] = frozenset()
    adapter: str = ""  # a LoRA adapter of the Triton model, which this name stands for
    source: tuple[object, ...] = ()  # its configuration and the states of its files: equal if nothing has changed

    @property
    def speculative_methods(self) -> list[str]:
        """The methods that the model has loaded, the default first."""
        methods = self.settings.get(_SPECULATION, "")
        return [] if methods in ("", "none") else [method.strip() for method in methods.split(",")]

    @property
    def default_max_tokens(self) -> int:
        """Tokens of a request that names no `max_tokens`."""
        named = _number_in(self.settings, _DEFAULT_MAX_TOKENS)
        return named or self.max_new_tokens or ServingConfig().default_max_tokens

    @property
    def block_size(self) -> int:
        """Tokens of a block of its KV cache."""
        return next(filter(None, (_number_in(self.settings, name) for name in _BLOCK_SIZES)), CacheConfig().block_size)

    @property
    def may_sleep(self) -> bool:
        return self.settings.get("enable_sleep_mode", "").lower() in ("true", "1")

    @property
    def takes_adapters(self) -> bool:
        return self.settings.get("enable_lora", "").lower() in ("true", "1")

    @property
    def has_speculation(self) -> bool:
        return bool(self.speculative_methods)

    def card(self) -> dict[str, Any]:
        """The model's entry of /v1/models."""
        card = {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "slipstream",
            "task": "generate",
        }
        has = {"has_chat_template": self.template is not None, "speculative_methods": self.speculative_methods}
        has["has_safety"] = not self.outputs.isdisjoint(_VERDICTS)
        if self.adapter:
            has["parent"] = self.triton_name
        return {**card, "max_model_len": self.max_model_len or None, "triton_name": self.triton_name, **has}


class Catalog:
    def __init__(self, options: GatewayOptions, link: TritonLink) -> None:
        self._options, self._link = options, link
        self._models: dict[str, Model] = {}
        self._states: dict[str, str] = {}
        self._last_ready: dict[str, float] = {}  # by Triton's name
        self._refreshed = -REFRESH_S
        self._refreshing: asyncio.Task[None] | None = None

    async def all(self) -> list[Model]:
        """Every model that is ready and generates text, aliases included."""
        await self._refresh(force=True)
        return list(self._models.values())

    async def generating(self) -> set[str]:
        """Triton's names of the models that generate text, with those that were ready and are being restarted."""
        await self._refresh(force=not self._models)
        gone = [name for name, last in self._last_ready.items() if last < self._refreshed]
        away = {name for name in gone if name in self._states or self._has_just_gone(name)}
        return away | {model.triton_name for model in self._models.values()}

    async def find(self, name: str) -> Model:
        """Raises ApiError: 404 for an unknown name, 503 for a model that is being loaded or restarted."""
        await self._refresh(force=name not in self._models)
        model = self._models.get(name)
        if model is not None:
            return model
        target = self._options.aliases.get(name, name)
        state = self._states.get(target, "")
        if not state and self._has_just_gone(target):
            state = "it was unloaded a moment ago, perhaps to be restarted"
        if state:
            message = f"The model {name!r} is not ready: {state}"
            raise ApiError(503, message, code="unavailable", retry_after_s=1)
        if target in self._options.embedding_models:
            raise model_not_found(name, list(self._models), "gives embeddings and no text; models that write are")
        raise model_not_found(name, list(self._models))

    def _has_just_gone(self, target: str) -> bool:
        """target: none that is ready."""
        return time.monotonic() - self._last_ready.get(target, -RESTART_S) < RESTART_S

    async def _refresh(self, force: bool) -> None:
        now = time.monotonic()
        if now - self._refreshed < (0.2 if force else REFRESH_S):
            return
        if self._refreshing is None or self._refreshing.done():  # shared by all waiting requests
            self._refreshing = asyncio.create_task(self._ask())
        await asyncio.shield(self._refreshing)

    async def _ask(self) -> None:
        by_target = {model.triton_name: model for model in self._models.values() if not model.adapter}
        entries = await self._link.index()
        names = list(dict.fromkeys(entry.name for entry in entries if entry.state == "READY"))
        described = await asyncio.gather(*(self._describe(name, by_target.get(name)) for name in names))
        ready = {name: model for name, model in zip(names, described) if model is not None}
        states = {
            entry.name: f"{entry.state.lower()} {entry.reason}".strip()
            for entry in entries
            if entry.state not in ("", "READY") and entry.reason != "unloaded"
        }
        taking = [model for model in ready.values() if model.takes_adapters]
        adapters = dict(
            zip((model.triton_name for model in taking), await asyncio.gather(*map(self._adapters, taking)))
        )
        self._states, self._refreshed = states, time.monotonic()
        self._last_ready |= dict.fromkeys(ready, self._refreshed)
        models = {name: self._named(name, model) for name, model in ready.items()}
        for alias, target in self._options.aliases.items():
            if target in ready:
                models[alias] = self._named(alias, ready[target])
        for target, names in adapters.items():
            for name in names:
                models.setdefault(name, Model(**{**vars(ready[target]), "name": name, "adapter": name}))
        self._models = models

    async def _adapters(self, model: Model) -> list[str]:
        """Those that a model has loaded; while it does not say so, those of last time."""
        try:
            told = await asyncio.wait_for(tell(self._link, model.triton_name, LIST_LORA), ADAPTERS_TIMEOUT_S)
        except (ApiError, TimeoutError, asyncio.TimeoutError):
            known = [one for one in self._models.values() if one.adapter and one.triton_name == model.triton_name]
            return [one.name for one in known]
        names: list[str] = told["adapters"]
        return names

    def forget(self) -> None:
        """Ask Triton again before the next answer."""
        self._refreshed = -REFRESH_S

    def _named(self, name: str, model: Model) -> Model:
        known = self._models.get(name)
        if known is None or known.adapter or (known.triton_name, known.source) != (model.triton_name, model.source):
            return Model(**{**vars(model), "name": name})
        return known

    async def _describe(self, name: str, known: Model | None) -> Model | None:
        """`known` if nothing of it has changed; None for a model that does not take Slipstream's tensors."""
        try:
            config = await self._link.config(name)
        except ApiError as error:
            if known is not None or error.status_code < 503:  # `known`: it may be ending in this moment
                return known
            raise
        inputs, outputs = (frozenset(entry.name for entry in entries) for entries in (config.input, config.output))
        if not (inputs >= _INPUTS and outputs >= _OUTPUTS):
            return None
        model = Model(name, name, int(time.time()), settings=_settings(config), inputs=inputs, outputs=outputs)
        model.source = (config.SerializeToString(deterministic=True),)
        behind = await self._settings_behind(model.settings)
        return await asyncio.to_thread(self._read, model, behind, known)

    async def _settings_behind(self, settings: dict[str, str]) -> dict[str, str]:
        """For a model that wraps another one (`guarded`), the settings of that of its parameter `llm`."""
        name = settings.get("llm", "")
        try:
            return _settings(await self._link.config(name)) if name else {}
        except ApiError:  # not loaded: what generates is not there either
            return {}

    def _read(self, model: Model, behind: dict[str, str], known: Model | None) -> Model:
        """The model with what its files say, or `known` if they are the same. Not on the event loop's thread."""
        folder = self._folder(model.triton_name, model.settings)
        if folder is None and behind:
            folder = self._folder(model.settings["llm"], behind)
        checkpoint = self._folder(model.triton_name, model.settings, _CHECKPOINTS)
        model.source = (*model.source, *map(_state, (folder, checkpoint)))
        if known is not None and known.source == model.source:
            return known
        if folder is None:
            model.no_template = (
                "the gateway does not know its checkpoint; start it with --checkpoint or --model-repository"
            )
            return model
        return self._read_files(model, folder, checkpoint)

    def _read_files(self, model: Model, folder: Path, checkpoint: Path | None) -> Model:
        try:
            model.template = load_template(folder, self._options.chat_template)
            model.no_template = "" if model.template else "its checkpoint has no chat template; use /v1/completions"
        except (ConfigError, OSError, UnicodeDecodeError) as error:  # perhaps it is being written
            model.no_template = _no_template(error)
        model.max_model_len = _max_model_len(model.settings, folder)
        model.max_new_tokens = _max_new_tokens(model.settings, checkpoint) if checkpoint is not None else 0
        model.tokenizer = ModelTokenizer(folder)
        if model.template is not None:
            model.tool_format = select_format(self._options.tool_parser, model.template.tool_source)
            model.reasoning_format = select_reasoning(self._options.reasoning_parser, model.template.source)
        return model

    def _folder(
        self, name: str, settings: dict[str, str], keys: tuple[str, ...] = (*_TOKENIZERS, *_CHECKPOINTS)
    ) -> Path | None:
        """The folder with the tokenizer's files: from --checkpoint, config.pbtxt or the cache of the hub."""
        if name in self._options.checkpoints:
            return self._options.checkpoints[name]
        repository = self._options.model_repository
        for key in keys:
            value = settings.get(key, "")
            path = Path(value)
            if value and not path.is_absolute() and repository is not None:
                path = (repository / name / path).resolve()
            path = path.parent if path.is_file() else path
            if value and path.is_absolute() and path.is_dir():
                return path
            if value and (cached := _hub_folder(value)) is not None:
                return cached
        return self._options.checkpoints.get("")


def _no_template(error: Exception) -> str:
    """For clients, who learn what is wrong with a template, but not where files lie."""
    if isinstance(error, ConfigError) and error.field == "chat_template":
        return f"its chat template cannot be used: {error}"
    return f"its chat template cannot be read ({internal_error(logger, 'a chat template was not read', error)})"


def _settings(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


def _state(folder: Path | None) -> tuple[object, ...]:
    """Equal for a folder whose files have not changed: of each its time, size and inode; None if it is absent."""
    if folder is None:
        return ()
    states: list[tuple[int, int, int] | None] = []
    for name in _FILES:
        try:
            found = (folder / name).stat()
        except OSError:
            states.append(None)
        else:
            states.append((found.st_mtime_ns, found.st_size, found.st_ino))
    return (str(folder), *states)


def _hub_folder(repository_id: str) -> Path | None:
    """The local folder of a Hugging Face id, if it was downloaded on this machine."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(repository_id, "tokenizer_config.json")
    except (ImportError, ValueError):  # not installed; not an id
        return None
    return Path(found).parent if isinstance(found, str) else None


def _number_in(settings: dict[str, str], name: str) -> int:
    """A parameter of config.pbtxt as the engine reads it; 0 for none, or one that the engine refuses to load with."""
    try:
        return read_whole(settings.get(name, ""))
    except ValueError:
        return 0


def _max_new_tokens(settings: dict[str, str], checkpoint: Path) -> int:
    if settings.get(_DEFAULT_MAX_TOKENS) or settings.get("generation_config") == "none":
        return 0
    try:
        return int(read_generation_config(checkpoint).get("max_tokens", 0))
    except ConfigError:  # the engine refuses to load with it
        return 0


def _max_model_len(settings: dict[str, str], folder: Path) -> int:
    for name in _LENGTHS:
        if length := _number_in(settings, name):
            return length
    return checkpoint_length(folder, settings.get("rope_scaling", ""))
