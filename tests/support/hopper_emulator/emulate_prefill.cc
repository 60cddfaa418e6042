// The prefill kernel on the CPU, with the arguments of its own: see emulator.h. Built by emulation.py.

#include "pipeline/prefill_run.cuh"

using namespace slipstream;
using Shape = PrefillShape<SLIPSTREAM_TYPE, static_cast<PrefillKv>(SLIPSTREAM_KV), SLIPSTREAM_HEAD_DIM, SLIPSTREAM_SOFT_CAP,
                           SLIPSTREAM_ALIBI>;

// As MapEncoder of prefill_maps.cuh makes them.
template <bool IS_KEYS>
CUtensorMap cache_map(const PrefillParams& p) {
  constexpr bool kIsStaged = IS_KEYS ? Shape::kHasStagedKeys : Shape::kHasStagedValues;
  constexpr bool kIsRaw = Shape::kIsConverted || (IS_KEYS && Shape::kHasFp8Keys);
  constexpr int kBits = Shape::kIsConverted ? KvFormat<Shape::kKvType>::kBits : kIsRaw ? 8 : 16;
  const auto* data = static_cast<const char*>(IS_KEYS ? p.key_cache : p.value_cache);
  const int block_log2 = kIsStaged ? kStagedRowsLog2 : p.block_size_log2;
  const int rows = 1 << std::min(block_log2, kMaxPartRowsLog2), row_bytes = Shape::kHeadDim * kBits / 8;
  const int64_t num_blocks = kIsStaged ? int64_t{p.num_requests} * p.staged_blocks : p.num_blocks;
  CUtensorMap map{data, rows, row_bytes, rows};
  map.element_bytes = kIsRaw ? 1 : 2;
  map.box_bytes = Shape::kIsConverted ? Shape::kRawRowBytes : kSwizzleBytes;
  map.is_swizzled = !Shape::kIsConverted;
  map.num_planes = num_blocks * p.num_kv_heads * ((1 << block_log2) / rows), map.plane_bytes = rows * row_bytes;
  return map;
}

CUtensorMap fp8_value_map(const PrefillParams& p) {
  constexpr int kRow = 1 << kStagedRowsLog2;
  CUtensorMap map{static_cast<const char*>(p.value_cache), Shape::kHeadDim, kRow, Shape::kHeadDim};
  map.element_bytes = 1, map.box_bytes = kRow;
  map.num_planes = int64_t{p.num_requests} * p.staged_blocks * p.num_kv_heads, map.plane_bytes = kRow * Shape::kHeadDim;
  return map;
}

extern "C" int slipstream_emulate(const PrefillParams* params, unsigned seed) {
  const PrefillParams& p = *params;
  const int pack = 1 << p.pack_log2;
  CUtensorMap queries{static_cast<const char*>(p.q), p.num_q_heads, 2 * p.q_head_stride, pack, 2 * Shape::kHeadDim};
  queries.num_planes = p.num_tokens, queries.plane_bytes = 2 * p.q_token_stride, queries.box_planes = Shape::kRows / pack;
  const PrefillMaps maps{queries, cache_map<true>(p), Shape::kHasFp8Values ? fp8_value_map(p) : cache_map<false>(p)};
  emulator::warpgroups().clear();
  const auto attend = [&](char* shared) { run_prefill_attention<Shape>(p, maps, shared); };
  return emulator::run(p.num_sms, Shape::kThreads, PrefillMemory<Shape>::kAllocatedBytes, seed, attend);
}
