"""A step's profile in a line: the GPU's idle share, and the kernels that take most of it by what they do."""

from __future__ import annotations

import re
from collections import Counter

from measures import Record

# the first whose pattern is in a kernel's name or its template's arguments
GROUPS = (
    ("experts", r"expert|grouped|moe"),
    ("norm", r"norm"),
    ("keys and values", r"write_kv|write_latent"),
    ("attention", r"attention|flash|fmha|merge"),
    ("products", r"gemm|gemv|_mm|nvjet|cublas|cutlass|xmma|splitk|stream_w4|swap_ab|scaled_mm"),
    ("activation", r"gated_mul|silu"),
    ("draw", r"sample|greedy|argmax|softmax"),
    ("copies", r"memcpy|memset|copy"),
)
_LONGEST = 40


def group_of(kernel: str) -> str:
    """What a kernel does, or its own name."""
    return next((name for name, pattern in GROUPS if re.search(pattern, kernel, re.I)), short_name(kernel))


def short_name(kernel: str) -> str:
    """The function's own name: without type, namespaces, template and arguments."""
    name = re.sub(r"\((anonymous namespace|unnamed)\)::", "", kernel)
    function: str = re.split(r"[<(]", name, maxsplit=1)[0].split("::")[-1]
    return (function.split() or [kernel])[-1].strip("_").removesuffix("_kernel")[:_LONGEST]


def summary(profile: Record, most: int = 4) -> str:
    """Idle share, and the largest groups' microseconds a step, each with its largest kernel."""
    if "skipped" in profile:
        return f"not profiled: {profile['skipped']}"
    kernels = {name: us for name, (us, _) in profile.get("us_per_step", {}).items()}  # the largest first
    if not kernels:
        return f"{profile['host_cpu_us']} of {profile['step_us']} us a step on the host"
    spent: Counter[str] = Counter()
    largest: dict[str, str] = {}
    for name, us in kernels.items():
        group = group_of(name)
        spent[group] += us
        largest.setdefault(group, short_name(name))
    shown = [
        f"{group} {us:,.0f}" + (f" ({largest[group]})" if largest[group] != group else "")
        for group, us in spent.most_common(most)
    ]
    return f"idle {profile['idle']:.1%}, us a step: {', '.join(shown)}"
