"""vLLM on one GPU with the measurements of bench_engine: the rival's half of a comparison. Needs vLLM installed.

    python tests/bench/bench_vllm.py --shape llama3-8b --format fp8 --kv-cache-dtype fp8 --out vllm.jsonl

vLLM as its users run it: its engine in a process of its own, CUDA graphs, chunked prefill, FlashAttention 3. Prefix
cache and text are off, as they are in bench_engine; weights are random bits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from adapters import names_of, write_adapter  # noqa: E402
from measures import Prompt, emit, parser_of, run  # noqa: E402
from shapes import LatentShape, Shape, shape_of  # noqa: E402
from step_window import LEAST_STEPS, StepWindow  # noqa: E402

# without these vLLM looks for a network that a benchmark machine may not have
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "TOKENIZERS_PARALLELISM": "false",
}
GRAPH_SIZES = [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256]  # its default of 51 only starts slower


def _compressed(name: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    common = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
    return {**common, "format": name, "kv_cache_scheme": None, "config_groups": {"group_0": group}}


def _numbers(bits: int, kind: str, strategy: str, dynamic: bool = False, group: int | None = None) -> dict[str, Any]:
    common = {"symmetric": True, "block_structure": None, "actorder": None, "observer": "minmax", "observer_kwargs": {}}
    return {**common, "num_bits": bits, "type": kind, "strategy": strategy, "dynamic": dynamic, "group_size": group}


_INT4 = _numbers(4, "int", "group", group=128)
# our name of the format -> (quantization_config of the checkpoint, keyword arguments of LLM)
FORMATS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "none": (None, {}),
    "fp8": (None, {"quantization": "fp8"}),
    "w4a8_fp8": (_compressed("pack-quantized", _INT4, _numbers(8, "float", "token", dynamic=True)), {}),
    "wint4": (_compressed("pack-quantized", _INT4, None), {}),
    "wint4-marlin": (_compressed("pack-quantized", _INT4, None), {"linear_backend": "marlin"}),
    "wint8": (_compressed("pack-quantized", _numbers(8, "int", "channel"), None), {}),
    "w8a8_int8": (
        _compressed("int-quantized", _numbers(8, "int", "channel"), _numbers(8, "int", "token", dynamic=True)),
        {},
    ),
}


def engine_options(arguments: argparse.Namespace, shape: Shape, folder: Path) -> dict[str, Any]:
    """Keyword arguments of LLM and AsyncEngineArgs; writes the model's config.json into the folder."""
    stored, options = FORMATS[arguments.format]
    if not isinstance(shape, LatentShape):  # for latent attention it chooses FLASH_ATTN_MLA itself
        options = {**options, "attention_config": {"backend": "FLASH_ATTN"}}
    if arguments.adapters:
        slots = {"max_loras": max(arguments.adapters), "max_lora_rank": arguments.adapter_rank}
        options = {**options, "enable_lora": True, **slots}
    config = {**shape.config(), **({"quantization_config": stored} if stored else {})}
    (folder / "config.json").write_text(json.dumps(config))
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": min(arguments.max_model_len, shape.max_len),
        "max_num_seqs": arguments.max_num_seqs,
        "tensor_parallel_size": arguments.tensor_parallel,
        "gpu_memory_utilization": 0.9,
        "enable_prefix_caching": arguments.prefix_caching,
        "kv_cache_dtype": arguments.kv_cache_dtype,
        "generation_config": "vllm",
        "seed": 0,
        "disable_log_stats": True,
        "worker_extension_cls": "vllm_dummy_fill.Fill",
        "compilation_config": {"cudagraph_capture_sizes": GRAPH_SIZES},
        **options,
    }


def graph_sizes(arguments: argparse.Namespace) -> list[int]:
    """Batches that are measured are not padded. Where requests end one by one, sizes between are needed, too."""
    batches = {batch for batch in arguments.batches if batch <= arguments.max_num_seqs}
    return sorted(batches if arguments.measure == "decode" and batches else {*GRAPH_SIZES, *batches})


@contextmanager
def watched_steps(core: Any, window: StepWindow, num_requests: int) -> Iterator[None]:
    """Shows the window each step that the client of the engine's process takes, by that process's own clock: the client
    may be behind it."""
    counts: dict[str, int] = {}
    has_ended = False

    def get_output() -> Any:
        nonlocal has_ended
        outputs = type(core).get_output(core)
        for output in outputs.outputs:
            counts[output.request_id] = counts.get(output.request_id, 0) + len(output.new_token_ids)
            has_ended = has_ended or output.finished
        window.see(outputs.timestamp, has_ended, lambda: min(counts.values()) if len(counts) == num_requests else 0)
        return outputs

    core.get_output = get_output
    try:
        yield
    finally:
        del core.get_output  # the class's is seen again


class VllmBench:
    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        from vllm import LLM

        self.shape = shape_of(arguments.shape, arguments.layers)
        self.temperature = arguments.temperature
        options = engine_options(arguments, self.shape, folder)
        options["compilation_config"] = {"cudagraph_capture_sizes": graph_sizes(arguments)}
        self.max_model_len = options["max_model_len"]
        self._llm = LLM(**options)
        self.num_adapters = 0
        self._adapters = []
        if arguments.adapters:
            from vllm.lora.request import LoRARequest

            path = str(write_adapter(folder / "adapter", self.shape, arguments.adapter_rank))
            names = enumerate(names_of(max(arguments.adapters)), 1)
            self._adapters = [LoRARequest(name, number, path) for number, name in names]
        cache = self._llm.llm_engine.vllm_config.cache_config
        self.pool_tokens = (cache.num_gpu_blocks or 0) * cache.block_size

    def step_seconds(self, prompts: list[Prompt], short: int, long: int) -> float:
        """Requests begin as they come, so the first may end before the last has begun: then with more tokens."""
        wanted, most = max(LEAST_STEPS, (long - short) // 2), self.max_model_len - len(prompts[0])
        for num_output in (long, 2 * long, 4 * long):
            window = StepWindow(short)
            with watched_steps(self._llm.llm_engine.engine_core, window, len(prompts)):
                self.timed(prompts, min(num_output, most))
            if window.num_steps >= wanted:
                break
        return window.seconds

    def timed(self, prompts: list[Prompt], num_output: int) -> float:
        from vllm import SamplingParams

        # ignore_eos alone fixes the length; min_tokens would add a logits processor
        params = SamplingParams(temperature=self.temperature, max_tokens=num_output, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        adapters = list(islice(cycle(self._adapters[: self.num_adapters]), len(inputs))) or None
        start = time.perf_counter()
        outputs = self._llm.generate(inputs, params, use_tqdm=False, lora_request=adapters)
        elapsed = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == num_output for output in outputs)
        return elapsed


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--format", choices=sorted(FORMATS), default="none", help="of the weights")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs")
    arguments = parser.parse_args()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # its engine process imports vllm_dummy_fill
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        bench = VllmBench(arguments, Path(folder))
        settings = {"engine": "vllm", "shape": arguments.shape, "set": [arguments.format, arguments.kv_cache_dtype]}
        settings |= {"temperature": arguments.temperature, "tensor_parallel": arguments.tensor_parallel}
        emit({**settings, "what": "setup", "load_s": round(time.perf_counter() - start, 2)}, arguments.out)
        run(bench, arguments, settings)


if __name__ == "__main__":
    main()
